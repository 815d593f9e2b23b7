"""What SAC cannot learn, refused before any work is lost, and settings that have no part in a configuration."""

from __future__ import annotations

import math

from canter.algorithms.sac.settings import SACSettings
from canter.algorithms.unused import Rule, unused_lines
from canter.nn.network import NetworkConfig
from canter.specs import Continuous, EnvSpec


def check_spec(config: SACSettings, spec: EnvSpec) -> None:
    """Refuse actions that a squashed Gaussian cannot give, and a ring shorter than a rollout."""
    what = spec.env_id or "this environment"
    if not isinstance(spec.action, Continuous):
        raise ValueError(f"sac needs continuous actions, and those of {what} are {spec.action}; use --algorithm ppo")
    if not spec.action.bounded:
        bounds = zip(spec.action.low, spec.action.high, strict=True)
        index, (low, high) = next((i, pair) for i, pair in enumerate(bounds) if not all(map(math.isfinite, pair)))
        raise ValueError(
            f"sac squashes its actions into the bounds of the environment, and component {index} of {what} has "
            f"low={low}, high={high}: bound the action space to the range that the task needs (gymnasium.wrappers."
            "RescaleAction and a finite Box, or the limits of the joints), or use --algorithm ppo"
        )
    if config.horizon * spec.num_envs > config.replay.capacity:
        raise ValueError(
            f"replay.capacity={config.replay.capacity} is less than a rollout, horizon * num_envs = "
            f"{config.horizon * spec.num_envs}"
        )


def unused_settings(config: SACSettings, spec: EnvSpec) -> list[str]:
    """A line for each setting that was changed and has no effect."""
    critic, policy = config.critic, config.policy
    of_target = "temperature.target_entropy temperature.target_std temperature.optimizer"
    blind = all(len(group.shape) != 3 for group in spec.obs.values())
    rules: list[Rule] = [
        (not config.scale_rewards, "return_limit", "scale_rewards is off"),
        (critic.atoms == 1, "critic.support", "with critic.atoms=1 a critic predicts a mean, not a distribution"),
        (critic.members == 1, "pessimism", "there is one critic"),
        (critic.blocks == 0, "critic.expansion", "there are no residual blocks"),
        (not config.temperature.learned, of_target, "temperature.learned is off"),
        (getattr(policy, "normalize_obs", None) is False, "policy.normalizer", "nothing is standardised"),
        (not critic.normalize_obs, "critic.normalizer", "nothing is standardised"),
        (blind, "critic.cnn", "it reads no images"),
        (blind and isinstance(policy, NetworkConfig), "policy.cnn", "it reads no images"),
    ]
    return unused_lines(config, rules)

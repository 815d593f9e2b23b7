"""What SAC cannot learn, refused before any work is lost, and settings that have no part in a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from canter.algorithms.sac.settings import SACSettings
from canter.algorithms.unused import changed_below
from canter.nn.network import NetworkConfig
from canter.specs import Continuous, EnvSpec


def check_spec(config: SACSettings, spec: EnvSpec) -> None:
    """Refuse actions that a squashed Gaussian cannot give, and a ring shorter than a rollout."""
    what = spec.env_id or "this environment"
    if not isinstance(spec.action, Continuous):
        raise ValueError(f"sac needs continuous actions, and those of {what} are {spec.action}; use --algorithm ppo")
    if not spec.action.bounded:
        bounds = zip(spec.action.low, spec.action.high, strict=True)
        index, (low, high) = next(
            (i, pair) for i, pair in enumerate(bounds) if abs(pair[0]) + abs(pair[1]) == float("inf")
        )
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
    return [
        f"algorithm.{path}={value} has no part here: {reason}"
        for key, reason in _rules(config, spec)
        for path, value in changed_below(config, key)
    ]


def _rules(config: SACSettings, spec: EnvSpec) -> Iterator[tuple[str, Any]]:
    if not config.scale_rewards:
        yield "return_limit", "scale_rewards is off"
    if config.critic.atoms == 1:
        yield "critic.support", "with critic.atoms=1 a critic predicts a mean, not a distribution"
    if config.critic.members == 1:
        yield "pessimism", "there is one critic"
    if config.critic.blocks == 0:
        yield "critic.expansion", "there are no residual blocks"
    if not config.temperature.learned:
        for key in ("target_entropy", "target_std", "optimizer"):
            yield f"temperature.{key}", "temperature.learned is off"
    for role in ("policy", "critic"):
        if getattr(getattr(config, role), "normalize_obs", True) is False:
            yield f"{role}.normalizer", "nothing is standardised"
    images = any(len(group.shape) == 3 for group in spec.obs.values())
    if not images:
        yield "critic.cnn", "it reads no images"
        if isinstance(config.policy, NetworkConfig):
            yield "policy.cnn", "it reads no images"

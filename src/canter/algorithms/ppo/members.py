"""Settings of a member of a population, and what a population refuses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from canter.algorithms.ppo.config import PPOConfig
from canter.core import distributed
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec
from canter.nn.distributions import Beta
from canter.nn.network import NetworkConfig
from canter.nn.schedules import AnySchedule, Constant


@dataclass(frozen=True, kw_only=True)
class MemberConfig:
    """Settings of one member of a population; null takes those that all share."""

    seed: int | None = None
    """Seed of its random streams; null for the run's seed plus the number of the member."""
    learning_rate: float | None = None
    """Learning rate at the start."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus at the start."""
    clip_ratio: float | None = None
    """Clip range of the probability ratio around 1."""
    gamma: float | None = None
    """Discount."""
    gae_lambda: float | None = None
    """Bias-variance trade-off of the advantage estimate."""

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        check_range(self, "must be above 0", "learning_rate")
        check_range(self, "must not be negative", "seed", "entropy_coef")

    def settings_of(self, shared: PPOConfig) -> PPOConfig:
        """Return the settings of a single run that learns as this member does."""
        own: dict[str, Any] = {
            name: value for name in ("clip_ratio", "gamma", "gae_lambda") if (value := getattr(self, name)) is not None
        }
        if self.entropy_coef is not None:
            own["entropy_coef"] = starting_at(shared.entropy_coef, self.entropy_coef)
        if self.learning_rate is not None:
            rate = starting_at(shared.optimizer.learning_rate, self.learning_rate)
            own["optimizer"] = replace(shared.optimizer, learning_rate=rate)
        values = {each.name: getattr(shared, each.name) for each in fields(PPOConfig)}
        return PPOConfig(**{**values, **own})


def starting_at(schedule: AnySchedule, value: float) -> AnySchedule:
    """Return a schedule of the same kind with another first value."""
    if isinstance(schedule, Constant):
        return Constant(value)
    described: Any = schedule
    return replace(described, start=value)


def settings_of_member(config: PPOConfig) -> dict[str, float]:
    """Return the settings that the members may differ in, except the learning rate."""
    return {
        "entropy_coef": config.entropy_coef.initial,
        "clip_ratio": config.clip_ratio,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
    }


def check_supported(config: PPOConfig, members: int, spec: EnvSpec) -> None:
    """Refuse, by name, what a population does not support."""
    if not members:
        raise UserError("members: expected at least one")
    model = config.model
    unsupported: list[tuple[Any, str]] = []
    for role, network in (("policy", model.policy), ("critic", model.critic or model.policy)):
        standard = isinstance(network, NetworkConfig)
        unsupported += [
            (not standard, f"model.{role}: networks other than fully connected ones"),
            (standard and network.rnn, f"model.{role}.rnn: recurrent networks"),
            (standard and network.precision != "float32", f"model.{role}.precision: other precisions than float32"),
        ]
    for name, group in spec.obs.items():
        unsupported.append((len(group.shape) > 1, f"observation {name!r}: observations of several axes"))
    unsupported += [
        (isinstance(model.distribution_for(spec.action), Beta), "model.distribution=beta: beta policies"),
        (config.extensions, "extensions"),
        (config.central_value, "central_value"),
        (config.critic_optimizer, "critic_optimizer"),
        (config.gradient_clipping != "joint", f"gradient_clipping={config.gradient_clipping}"),
        (config.objective != "discounted", f"objective={config.objective}"),
        (config.kl != "exact", f"kl={config.kl}"),
        (config.obs_statistics != "update", f"obs_statistics={config.obs_statistics}"),
        (config.recompute_advantage, "recompute_advantage"),
        (config.policy_average, f"policy_average={config.policy_average}"),
        (config.shuffle_blocks, f"shuffle_blocks={config.shuffle_blocks}"),
        (spec.num_agents > 1, "worlds of several agents"),
        (distributed.world_size() > 1, "several ranks"),
    ]
    for holds, what in unsupported:
        if holds:
            raise UserError(f"a population does not support {what}; train the members as single runs")
    if spec.num_envs % members:
        raise UserError(f"env.num_envs={spec.num_envs} cannot be divided among {members} members evenly")

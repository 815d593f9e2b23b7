"""Transforms of the environment's reward, whose result the algorithm learns from.

The order is fixed: time, shift, scale, limits, squash, centring, division by the spread of the discounted return. Only
the algorithm sees the result. Rollouts keep the raw reward, and so does everything that is reported.

T steps, N environments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.algorithms.ppo.advantages import MovingAverage, Per, discount
from canter.core.data.rollout import Rollout
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec
from canter.functional.returns import SQUASHES, TIME_SCALES, affine, discounted_return
from canter.functional.statistics import moments
from canter.nn.normalizer import Normalizer


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is made of the reward before learning from it, in the order of these settings."""

    time: Literal["none", "multiply", "divide"] = "none"
    """For steps of varying duration: multiply a rate by the time that the step took, or divide an amount by it."""
    shift: float = 0.0
    """Added first."""
    scale: float = 1.0
    """Then multiplied by."""
    minimum: float | None = None
    """Lower limit; null for none."""
    maximum: float | None = None
    """Upper limit; null for none."""
    squash: Literal["none", "log", "symlog"] = "none"
    """Logarithm, for rewards that `minimum` keeps positive; or `sign(r) log(1 + |r|)`, for any."""
    centering: float | None = None
    """Subtract a moving average of the reward, in which each new rollout has this share; null for none."""
    normalize: bool = False
    """Divide by the standard deviation of the discounted return; nothing is subtracted."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        low, high = _limits(self)
        if not low < high:
            raise UserError(f"minimum={self.minimum} must be below maximum={self.maximum}")
        if self.squash == "log" and not low > 0:
            raise UserError(f"squash='log' needs a minimum above 0, not minimum={self.minimum}; 'symlog' takes any")
        if self.scale == 0:
            raise UserError("scale=0.0 leaves nothing to learn from")
        check_range(self, "must lie above 0 and up to 1", "centering")

    def build(self, spec: EnvSpec, gamma: float, per: Per = "step") -> RewardPipeline:
        """The transforms for an environment, on its device; `gamma` is the discount of a step or a unit of time."""
        return RewardPipeline(self, spec, gamma, per).to(spec.device)


def _limits(config: RewardConfig) -> tuple[float, float]:
    low = -math.inf if config.minimum is None else config.minimum
    return low, math.inf if config.maximum is None else config.maximum


class RewardPipeline(nn.Module):
    """All transforms, with what they know of the rewards so far."""

    def __init__(self, config: RewardConfig, spec: EnvSpec, gamma: float, per: Per) -> None:
        super().__init__()
        self.config, self.limits = config, _limits(config)
        self.stages = nn.ModuleList()
        if config.centering is not None:
            self.stages.append(Centering(config.centering))
        if config.normalize:
            self.stages.append(ReturnScaling(gamma, per, spec.num_envs))

    @torch.no_grad()
    def forward(self, rollout: Rollout[Any]) -> Rollout[Any]:
        """The same rollout with transformed rewards; call it once for each, because statistics move first."""
        config = self.config
        reward = TIME_SCALES[config.time](rollout.reward, rollout.duration)
        reward = affine(reward, config.shift, config.scale).clamp(*self.limits)
        reward = SQUASHES[config.squash](reward)
        for stage in self.stages:
            reward = stage(reward, rollout)
        return replace(rollout, reward=reward)


class Centering(nn.Module):
    """Subtracts a moving average over all environments, so that values tell differences and not their sum."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.average = MovingAverage(step)

    def forward(self, reward: Tensor, rollout: Rollout[Any]) -> Tensor:
        """Rewards `[T, N]` less their average, which includes them."""
        count, mean, _ = moments(reward, rollout.valid)
        self.average.update(mean, count)
        return reward - self.average.value.to(reward.dtype)


class ReturnScaling(nn.Module):
    """Divides by the standard deviation of the discounted return over all rows ever seen, those at hand included."""

    def __init__(self, gamma: float, per: Per, num_envs: int) -> None:
        super().__init__()
        self.gamma = gamma
        self.per: Per = per
        self.running = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))
        self.statistics = Normalizer(eps=1e-30)  # only against a division by zero: rewards may be small

    def forward(self, reward: Tensor, rollout: Rollout[Any]) -> Tensor:
        """Rewards `[T, N]` in units of that spread; as they are while the returns are all alike."""
        gamma = discount(rollout, self.gamma, self.per)
        returns, after = discounted_return(reward.double(), rollout.done, rollout.valid, self.running, gamma)
        self.running.copy_(torch.where(torch.isfinite(after), after, 0.0))
        self.statistics.update(returns, rollout.valid)
        std, mean = self.statistics.scale, self.statistics.shift
        alike = std <= torch.finfo(reward.dtype).eps * mean.abs()
        return reward / torch.where(alike, 1.0, std)

"""Transforms of the environment's reward; the algorithm learns from the result.

The order is fixed: time, shift, scale, limits, squash, centring, division by the standard deviation
of the discounted return. Only the algorithm sees the result. Rollouts keep the raw reward, and
everything that is reported uses it.

T steps, N environments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.core.data.rollout import Rollout
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec
from canter.functional.returns import SQUASHES, TIME_SCALES, affine
from canter.functional.statistics import moments
from canter.nn.normalizer import Normalizer, add_returns_

Per = Literal["step", "time"]


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Transforms of the reward before learning from it, in the order of these settings."""

    time: Literal["none", "multiply", "divide"] = "none"
    """For steps of varying duration: multiply a rate by the duration of the step, or divide an
    amount by it."""
    shift: float = 0.0
    """Added first."""
    scale: float = 1.0
    """Factor, after the shift."""
    minimum: float | None = None
    """Lower limit; null for none."""
    maximum: float | None = None
    """Upper limit; null for none."""
    squash: Literal["none", "log", "symlog"] = "none"
    """Logarithm, for rewards that `minimum` keeps positive; or `sign(r) log(1 + |r|)`, for any."""
    centering: float | None = None
    """Subtract a moving average of the reward; the value is the weight of each new rollout in it.
    null for none."""
    normalize: bool = False
    """Divide by the standard deviation of the discounted return; nothing is subtracted."""

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        low, high = _limits(self)
        if not low < high:
            raise UserError(f"minimum={self.minimum} must be below maximum={self.maximum}")
        if self.squash == "log" and not low > 0:
            raise UserError(f"squash='log' needs a minimum above 0, not minimum={self.minimum}; 'symlog' takes any")
        if self.scale == 0:
            raise UserError("scale=0.0 leaves nothing to learn from")
        check_range(self, "must lie above 0 and up to 1", "centering")

    def build(self, spec: EnvSpec, gamma: float, per: Per = "step") -> RewardPipeline:
        """Return the transforms for an environment; `gamma` is per step or per unit of time."""
        return RewardPipeline(self, spec, gamma, per).to(spec.device)


def _limits(config: RewardConfig) -> tuple[float, float]:
    low = -math.inf if config.minimum is None else config.minimum
    high = math.inf if config.maximum is None else config.maximum
    return low, high


class RewardPipeline(nn.Module):
    """All transforms, with their running statistics."""

    def __init__(self, config: RewardConfig, spec: EnvSpec, gamma: float, per: Per) -> None:
        super().__init__()
        self.config = config
        self.limits = _limits(config)
        self.stages = nn.ModuleList()
        if config.centering is not None:
            self.stages.append(Centering(config.centering))
        if config.normalize:
            self.stages.append(ReturnScaling(gamma, per, spec.num_envs))

    @torch.no_grad()
    def forward(self, rollout: Rollout[Any]) -> Rollout[Any]:
        """Update the statistics with a rollout, once, and return it with transformed rewards."""
        reward = TIME_SCALES[self.config.time](rollout.reward, rollout.duration)
        reward = affine(reward, self.config.shift, self.config.scale).clamp(*self.limits)
        reward = SQUASHES[self.config.squash](reward)
        for stage in self.stages:
            reward = stage(reward, rollout)
        return replace(rollout, reward=reward)


class Centering(nn.Module):
    """Subtracts a moving average over all environments; values then express differences from it."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.average = MovingAverage(step)

    def forward(self, reward: Tensor, rollout: Rollout[Any]) -> Tensor:
        """Update the average with rewards `[T, N]`; return them less the average."""
        count, mean, _ = moments(reward, rollout.valid)
        self.average.update(mean, count)
        return reward - self.average.value.to(reward.dtype)


class ReturnScaling(nn.Module):
    """Divides by the running standard deviation of the discounted return."""

    def __init__(self, gamma: float, per: Per, num_envs: int) -> None:
        super().__init__()
        self.gamma = gamma
        self.per: Per = per
        self.running = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))
        """Discounted return of each environment so far."""
        self.statistics = Normalizer(eps=1e-30)  # only against a division by zero: rewards may be small

    def forward(self, reward: Tensor, rollout: Rollout[Any]) -> Tensor:
        """Update the statistics with rewards `[T, N]` and return the scaled rewards.

        They are not scaled while all returns are equal.
        """
        gamma = discount(rollout, self.gamma, self.per)
        add_returns_(self.statistics, self.running, reward, rollout.done, rollout.valid, gamma)
        std = self.statistics.scale
        mean = self.statistics.shift
        constant = std <= torch.finfo(reward.dtype).eps * mean.abs()
        return reward / torch.where(constant, 1.0, std)


class MovingAverage(nn.Module):
    """Exponential moving average of numbers, in float64.

    The weights add up to one from the first update on, so the average starts at the first number
    and has no bias towards 0.
    """

    def __init__(self, step: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.step = step
        self.value = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.weight = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, count: Tensor) -> None:
        """Include `x`, the mean of `count` samples; ignore NaN, infinity and a count of 0."""
        weight = self.weight + self.step * (1.0 - self.weight)
        value = self.value + self.step / weight * (x - self.value)
        usable = torch.isfinite(value).all() & (count > 0)
        self.value.copy_(torch.where(usable, value, self.value))
        self.weight.copy_(torch.where(usable, weight, self.weight))


def discount(rollout: Rollout[Any], gamma: float, per: Per) -> float | Tensor:
    """Return the discount of each step: `gamma`, or `gamma` per unit of time `[T, N]`."""
    return gamma if per == "step" else gamma**rollout.duration

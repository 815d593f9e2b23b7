"""Exponential moving averages: of numbers, and of a policy's weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from canter.nn.actor_critic import Policy


class MovingAverage(nn.Module):
    """Exponentially weighted mean of what it was shown, in float64; moved only by an explicit `update`.

    Weights add up to one from the first update on, so it starts at the first value instead of being biased towards 0.
    """

    def __init__(self, step: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.step = step
        self.value = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.weight = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, count: Tensor) -> None:
        """Move towards `x`, the mean of `count` samples; NaN, infinity and a count of 0 move nothing."""
        weight = self.weight + self.step * (1.0 - self.weight)
        value = self.value + self.step / weight * (x - self.value)
        usable = torch.isfinite(value).all() & (count > 0)
        self.value.copy_(torch.where(usable, value, self.value))
        self.weight.copy_(torch.where(usable, weight, self.weight))


class AveragedPolicy:
    """A copy of a policy with the mean weights of recent iterations, which circle less than the last ones do.

    Where two learn against each other, as policy and discriminator do, they tend to go round what they should reach;
    the mean lies inside (Yazici et al., 2019). Of the mean so far, `decay` stays when weights are added; at first all
    that were added count alike. Statistics are those of the latest.
    """

    def __init__(self, policy: Policy, decay: float) -> None:
        self.of, self.decay = policy, decay
        self.policy = copy.copy(policy)
        self.policy.actor = copy.deepcopy(policy.actor).requires_grad_(False)
        self.count = torch.zeros((), device=policy.spec.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Take the weights as they are now into the mean."""
        self.count += 1
        share = (1 / self.count).clamp(min=1 - self.decay)
        for mean, weight in zip(self.policy.actor.parameters(), self.of.actor.parameters(), strict=True):
            mean.lerp_(weight, share)
        for mean, statistic in zip(self.policy.actor.buffers(), self.of.actor.buffers(), strict=True):
            mean.copy_(statistic)

    def living(self) -> dict[str, Tensor]:
        """All that goes on after a stop, where it lives."""
        return {"count": self.count, **self.policy.actor.state_dict()}

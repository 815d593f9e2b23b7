"""Transforms of a reward before learning from it.

T steps, N environments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def affine(reward: Tensor, shift: float, scale: float) -> Tensor:
    """`(reward + shift) * scale`."""
    return (reward + shift) * scale


def symlog(reward: Tensor) -> Tensor:
    """`sign(r) log(1 + |r|)`: the reward itself near 0, its logarithm far away, on both sides."""
    return reward.sign() * reward.abs().log1p()


SQUASHES: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda reward: reward, "log": torch.log, "symlog": symlog}
"""Ways to make large rewards smaller; "log" is for positive ones."""

TIME_SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda reward, duration: reward,
    "multiply": torch.mul,
    "divide": torch.div,
}
"""`(reward, duration) -> reward`: unchanged, multiplied by the duration, or divided by it."""


def discounted_return(
    reward: Tensor, done: Tensor, valid: Tensor, before: Tensor, gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The discounted sum of each episode's rewards up to each row, and what goes on into the next rollout.

    `G_t = gamma G_{t-1} + reward_t`, beginning at 0 with every episode. Invalid rows leave it as it is.

    Args:
        reward: `[T, N]`.
        done: `[T, N]` bool, the episode ended with row t, in either way.
        valid: `[T, N]` bool.
        before: `[N]`, the second result for the rollout before; 0 at first.
        gamma: Discount of one step, a number or `[T, N]`.

    Returns:
        `G` `[T, N]`, and `[N]` for `before` of the next rollout.
    """
    discount, rows = torch.ones_like(reward) * gamma, list[Tensor]()
    for t in range(reward.shape[0]):
        after = torch.where(valid[t], discount[t] * before + reward[t], before)
        rows.append(after)
        before = after.masked_fill(done[t], 0.0)
    return torch.stack(rows), before

"""Advantages and value targets from a rollout.

T steps, N environments. Row t holds what happened when acting on s_t: `reward[t]`, `terminated[t]` (the task ended,
nothing follows) and `done[t]` (the episode ended in any way) describe the end of that step, not its start.

Transforms of a reward before learning from it.

T steps, N environments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from canter.core.dispatch import has_kernels


@has_kernels
@torch.no_grad()
def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets by generalised advantage estimation, both `[T, N]` and without gradient.

    Termination removes the value of the successor; any end of an episode cuts the trace, so that no row learns from
    the episode after it.

    Args:
        reward: `[T, N]`.
        value: `[T, N]`, V(s_t).
        next_value: `[T, N]`, the value of the true successor of every row, also where the episode was truncated
            (see `successor_values`). Ignored, whatever it holds, in terminated rows.
        terminated: `[T, N]` bool.
        done: `[T, N]` bool, terminated or truncated.
        gamma: Discount of one step, a number or a tensor that broadcasts to `[T, N]` (`gamma**duration` for steps of
            unequal length).
        gae_lambda: 0 gives one-step temporal differences, 1 gives Monte Carlo returns.

    Returns:
        The advantage and the return (`advantage + value`).
    """
    # Filled, not multiplied: 0 * NaN would let an unknown successor into the sum.
    successor = next_value.masked_fill(terminated, 0.0)
    advantage = reward + gamma * successor - value  # the temporal differences, accumulated in place below
    decay = (~done).to(advantage.dtype) * (gamma * gae_lambda)
    trace_back_(advantage, decay)
    return advantage, advantage + value


@has_kernels
def trace_back_(x: Tensor, decay: Tensor) -> None:
    """Add to each row of `x` `[T, N]` the sum over the rows after it: `x[t] += decay[t] * x[t + 1]`, from the end."""
    rows, decays = x.unbind(), decay.unbind()
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(decays[t], rows[t + 1])


def average_reward_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    reward_rate: float | Tensor,
    gae_lambda: float,
    duration: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and targets of differential values, for tasks judged by their reward per unit of time.

    `reward_rate` is the long-run average reward per unit of time, `duration` `[T, N]` the time that each step took
    (None: 1). The temporal difference is `reward - reward_rate * duration + V(s') - V(s)`: nothing is discounted, and
    values tell how much better than average the future is. Other arguments and results as in `gae`.
    """
    elapsed = 1.0 if duration is None else duration
    return gae(reward - reward_rate * elapsed, value, next_value, terminated, done, 1.0, gae_lambda)


def successor_values(value: Tensor, done: Tensor, reset: Tensor, final_value: Tensor | None) -> Tensor:
    """Value of the true successor of every row, `[T, N]`.

    `value` is `[T+1, N]`, the values of all observations acted on and of the one after the last step. `final_value`
    `[T, N]` holds, in rows that ended, the value of the episode's true last observation (other rows are arbitrary).
    None says that nobody stored that observation. Then it is the next row's own, as in environments that reset in a row
    of its own, unless `reset` `[T+1, N]` says that an episode begins there: the simulator has lost it, and V(s_t), the
    value of the observation before, stands in for it.
    """
    if final_value is None:
        done, final_value = done & reset[1:], value[:-1]
    return torch.where(done, final_value, value[1:])


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

"""Returns and advantages of a rollout, and transforms of the reward before learning.

T steps, N environments. Index t holds the result of acting on s_t: `reward[t]`, `terminated[t]`
(the task ended, nothing follows) and `done[t]` (the episode ended in any way) describe the end of
that step, not its start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from canter.core.dispatch import has_kernels

# Transforms of the reward


def affine(reward: Tensor, shift: float, scale: float) -> Tensor:
    """Return `(reward + shift) * scale`."""
    return (reward + shift) * scale


def symlog(reward: Tensor) -> Tensor:
    """Return `sign(r) log(1 + |r|)`: about the reward itself near 0, logarithmic far from it."""
    return reward.sign() * reward.abs().log1p()


SQUASHES: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda reward: reward, "log": torch.log, "symlog": symlog}
"""Functions that compress large rewards; "log" is for positive rewards."""

TIME_SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda reward, duration: reward,
    "multiply": torch.mul,
    "divide": torch.div,
}
"""`(reward, duration) -> reward`: unchanged, multiplied by the duration, or divided by it."""


# Advantages and value targets


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
    """Return advantages and value targets by generalised advantage estimation, both `[T, N]`.

    They carry no gradient. Termination removes the value of the successor; any end of an episode
    cuts the trace, so that no step learns from the episode after it.

    Args:
        reward: `[T, N]`.
        value: `[T, N]`, V(s_t).
        next_value: `[T, N]`, the value of the true successor of every step, also of truncated
            episodes (see `successor_values`). Ignored, even if NaN, in terminated steps.
        terminated: `[T, N]` bool.
        done: `[T, N]` bool, terminated or truncated.
        gamma: Discount of one step, a number or a tensor that broadcasts to `[T, N]`
            (`gamma**duration` for steps of unequal length).
        gae_lambda: 0 returns one-step temporal differences, 1 returns Monte Carlo returns.

    Returns:
        The advantage and the return (`advantage + value`).
    """
    # Filled, not multiplied: 0 * NaN would let an unknown successor into the sum.
    successor = next_value.masked_fill(terminated, 0.0)
    advantage = reward + gamma * successor - value  # temporal differences, summed in place below
    decay = (~done).to(advantage.dtype) * (gamma * gae_lambda)
    reverse_discounted_sum_(advantage, decay)
    return advantage, advantage + value


@has_kernels
def reverse_discounted_sum_(x: Tensor, decay: Tensor) -> None:
    """Accumulate `x` `[T, N]` backwards in time, in place: `x[t] += decay[t] * x[t + 1]`."""
    steps = x.unbind()
    decays = decay.unbind()
    for t in range(len(steps) - 2, -1, -1):
        steps[t].add_(decays[t] * steps[t + 1])  # torch.vmap has no batched addcmul_


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
    """Return advantages and targets of differential values, for the average-reward objective.

    `reward_rate` is the long-run average reward per unit of time, `duration` `[T, N]` the time that
    each step took (None: 1). The temporal difference is
    `reward - reward_rate * duration + V(s') - V(s)`: nothing is discounted, and values say how much
    better than average the future is. Other arguments and results are those of `gae`.
    """
    elapsed = 1.0 if duration is None else duration
    return gae(reward - reward_rate * elapsed, value, next_value, terminated, done, 1.0, gae_lambda)


def successor_values(value: Tensor, done: Tensor, reset: Tensor, final_value: Tensor | None) -> Tensor:
    """Return the value of the true successor of every step, `[T, N]`.

    `value` is `[T+1, N]`, the values of all observations acted on and of the one after the last
    step. `final_value` `[T, N]` holds, in steps that ended an episode, the value of the episode's
    true last observation (other steps are arbitrary). None means that this observation was not
    stored. Then the next observation is the true last one, as in environments that reset in a
    separate step, unless `reset` `[T+1, N]` marks it as the first of an episode: the simulator has
    discarded the last observation, and V(s_t), the value of the observation before, replaces it.
    """
    if final_value is None:
        done = done & reset[1:]
        final_value = value[:-1]
    return torch.where(done, final_value, value[1:])


def discounted_return(
    reward: Tensor, done: Tensor, valid: Tensor, before: Tensor, gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the discounted sum of rewards of each episode so far, and its carry-over.

    `G_t = gamma G_{t-1} + reward_t`, starting at 0 in every episode. Invalid steps leave it
    unchanged.

    Args:
        reward: `[T, N]`.
        done: `[T, N]` bool, the episode ended with step t, in either way.
        valid: `[T, N]` bool.
        before: `[N]`, the second result for the rollout before; 0 at first.
        gamma: Discount of one step, a number or `[T, N]`.

    Returns:
        `G` `[T, N]`, and `[N]` for `before` of the next rollout.
    """
    discount = torch.ones_like(reward) * gamma
    sums: list[Tensor] = []
    for t in range(reward.shape[0]):
        after = torch.where(valid[t], discount[t] * before + reward[t], before)
        sums.append(after)
        before = after.masked_fill(done[t], 0.0)
    return torch.stack(sums), before

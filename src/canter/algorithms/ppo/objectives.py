"""What a policy maximises: the discounted return, or the average reward per unit of time.

T steps, N environments.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.algorithms.ppo.moving_average import MovingAverage
from canter.data.rollout import Rollout
from canter.functional.returns import average_reward_gae, gae
from canter.functional.stats import moments
from canter.nn.heads import ValueHead
from canter.struct import Metrics

Per = Literal["step", "time"]


def discount(rollout: Rollout[Any], gamma: float, per: Per) -> float | Tensor:
    """The discount of each row: `gamma` a step, or `gamma` a unit of time `[T, N]`."""
    return gamma if per == "step" else gamma**rollout.duration


class Discounted(nn.Module):
    """The discounted sum of rewards; there is nothing to estimate beside the values."""

    def __init__(self, gamma: float, per: Per, gae_lambda: float) -> None:
        super().__init__()
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.per: Per = per

    def observe(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> None:
        """Nothing."""

    def advantages(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns `[T, N]`."""
        return gae(
            reward=rollout.reward,
            value=value,
            next_value=next_value,
            terminated=rollout.terminated,
            done=rollout.done,
            gamma=discount(rollout, self.gamma, self.per),
            gae_lambda=self.gae_lambda,
        )

    def centre_(self, head: ValueHead, return_: Tensor, valid: Tensor) -> None:
        """Nothing: rewards alone say how large values are."""

    def metrics(self) -> Metrics:
        """None."""
        return {}


class AverageReward(nn.Module):
    """The long-run average reward per unit of time; values tell how much better than average the future is.

    The rate is a moving average of `r + V(s') - V(s)` over one of the duration, and not of the reward alone. In the
    long run both are the same, since values cancel along an episode. But a rollout that begins with short queues and
    ends with long ones, or a reset to a good state, makes rewards alone look too good, and values know by how much.

    Advantages leave the level of values open, and an error of the rate makes it drift. So after each rollout the critic
    as a whole is shifted towards a mean of 0: its differences, and with them the advantages, stay as they are.

    An episode that terminates counts as one that goes on in a state of value 0, as good as the average.
    """

    def __init__(self, step: float, gae_lambda: float) -> None:
        super().__init__()
        self.step, self.gae_lambda = step, gae_lambda
        self.gain_and_time = MovingAverage(step, (2,))

    @property
    def rate(self) -> Tensor:
        """Reward per unit of time, 0-d float64; 0 at first."""
        gain, time = self.gain_and_time.value.unbind()
        return torch.where(time > 0, gain / torch.where(time > 0, time, 1.0), 0.0)

    def observe(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> None:
        """Move the rate to include a new rollout; `value` and `next_value` are `[T, N]`."""
        gain = rollout.reward + next_value.masked_fill(rollout.terminated, 0.0) - value
        count, means, _ = moments(torch.stack([gain, rollout.duration], dim=-1), rollout.valid)
        self.gain_and_time.update(means, count)

    def advantages(self, rollout: Rollout[Any], value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and differential returns `[T, N]`."""
        return average_reward_gae(
            reward=rollout.reward,
            value=value,
            next_value=next_value,
            terminated=rollout.terminated,
            done=rollout.done,
            reward_rate=self.rate.to(value.dtype),
            gae_lambda=self.gae_lambda,
            duration=rollout.duration,
        )

    def centre_(self, head: ValueHead, return_: Tensor, valid: Tensor) -> None:
        """Shift the critic towards a mean of 0 over the states that were visited."""
        _, mean, _ = moments(return_, valid)
        head.shift_(-self.step * torch.where(torch.isfinite(mean), mean, 0.0))

    def metrics(self) -> Metrics:
        """The rate, in the units of the transformed reward."""
        return {"value/reward_rate": self.rate}


Objective = Discounted | AverageReward

"""The unit of rewards: known from all that were seen, applied to those that are drawn.

T steps, N environments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from canter import distributed
from canter.data.rollout import Rollout
from canter.functional.rewards import discounted_return
from canter.nn.normalizer import Normalizer


class ReturnScale(nn.Module):
    """Divides by the standard deviation of discounted returns, or by their largest amount over `limit` if that is more.

    Rewards are stored as they came, so old ones follow what is known of the returns now.
    """

    def __init__(self, gamma: float, limit: float, num_envs: int) -> None:
        super().__init__()
        self.gamma, self.limit = gamma, limit
        self.statistics = Normalizer()
        self.running = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))
        self.largest = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rollout: Rollout[Any]) -> None:
        """Take note of a rollout, once."""
        reward = rollout.reward.double()
        returns, after = discounted_return(reward, rollout.done, rollout.valid, self.running, self.gamma)
        self.running.copy_(torch.where(torch.isfinite(after), after, 0.0))
        self.statistics.update(returns, rollout.valid)
        amount = torch.where(rollout.valid & torch.isfinite(returns), returns.abs(), 0.0).amax()
        self.largest.copy_(torch.maximum(self.largest, distributed.max_(amount)))

    def forward(self, reward: Tensor) -> Tensor:
        """In the unit of the returns seen so far."""
        return reward / torch.maximum(self.statistics.scale, (self.largest / self.limit).float())

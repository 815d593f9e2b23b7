"""The running mean of a policy's weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from canter.nn.actor_critic import Policy


class AveragedPolicy:
    """A copy of a policy with the running mean of its weights, which oscillates less than they do.

    Two that learn against each other, such as policy and discriminator, tend to circle around their
    solution; the mean lies inside the circle (Yazici et al., 2019). `decay` is the share of the
    mean that remains when weights are added; at first all weights count alike. Observation
    statistics are the latest ones.
    """

    def __init__(self, policy: Policy, decay: float) -> None:
        self.source = policy
        self.decay = decay
        self.policy = copy.copy(policy)
        self.policy.actor = copy.deepcopy(policy.actor).requires_grad_(False)
        self.count = torch.zeros((), device=policy.spec.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Add the current weights to the mean."""
        self.count += 1
        share = (1 / self.count).clamp(min=1 - self.decay)
        for mean, weight in zip(self.policy.actor.parameters(), self.source.actor.parameters(), strict=True):
            mean.lerp_(weight, share)
        for mean, statistic in zip(self.policy.actor.buffers(), self.source.actor.buffers(), strict=True):
            mean.copy_(statistic)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live count and weights."""
        return {"count": self.count, **self.policy.actor.state_dict()}

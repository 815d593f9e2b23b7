"""Several judges of an observation and an action, computed at once.

E critics, B rows, K atoms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from canter.nn.stack import Stack, StackConfig, StackedLinear
from canter.plain import check_range
from canter.specs import EnvSpec
from canter.struct import Obs


@dataclass(frozen=True, kw_only=True)
class CriticConfig(StackConfig):
    """How many critics there are, what they predict, and their layers."""

    members: int = 2
    """Critics that are learned side by side."""
    atoms: int = 1
    """1: each predicts the mean return. More: its distribution over as many evenly spaced returns."""
    support: tuple[float, float] = (-5.0, 5.0)
    """The least and the greatest return that atoms stand for, in the units of scaled rewards."""

    def __post_init__(self) -> None:
        """Refuse numbers without sense."""
        super().__post_init__()
        check_range(self, "must be at least 1", "members", "atoms")
        if not self.support[0] < self.support[1]:
            raise ValueError(f"support={self.support} must be a lower and a higher return")

    def build(self, spec: EnvSpec, action_dim: int) -> Critics:
        """The critics for an environment's observations and actions of so many components."""
        return Critics(self, spec, action_dim)


class Critics(nn.Module):
    """An encoder of observations that all share, and a network of its own for each, which reads the action too."""

    support: Tensor

    def __init__(self, config: CriticConfig, spec: EnvSpec, action_dim: int) -> None:
        super().__init__()
        self.members, self.atoms, self.ends = config.members, config.atoms, config.support
        self.encoder = config.encoder(spec.obs, "critic")
        self.stack = Stack(config, config.members, self.encoder.features + action_dim)
        self.head = StackedLinear(config.members, config.hidden[-1], config.atoms, config.init)
        self.register_buffer("support", torch.linspace(*config.support, config.atoms))

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        """Values `[E, B]`, or logits `[E, B, K]`, of observations `[B, ...]` and actions `[B, A]` in -1..1."""
        x = torch.cat([self.encoder.encode(obs), action], -1)
        out = self.head(self.stack(x.expand(self.members, *x.shape)))
        return out.squeeze(-1) if self.atoms == 1 else out

    def values(self, out: Tensor) -> Tensor:
        """Mean returns `[E, B]` from what a call gave."""
        return out if self.atoms == 1 else (out.softmax(-1) * self.support).sum(-1)

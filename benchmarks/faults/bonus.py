"""An extension for runs that are killed: a reward and a loss, and a count of its own that must survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import canter


class Bonus(canter.Extension):
    """Pays for every step, more with every rollout, and adds a little to the loss."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.rollouts = torch.nn.Buffer(torch.zeros(()))

    def reward(self, rollout: Any) -> torch.Tensor:
        """More with every rollout."""
        self.rollouts += 1
        return rollout.reward + self.scale * self.rollouts

    def loss(self, batch: Any, output: Any) -> dict[str, torch.Tensor]:
        """Keeps values small."""
        return {"loss/bonus": self.scale * self.rollouts * output.value.square()}


@canter.register("extension", "bonus")
@dataclass(frozen=True, kw_only=True)
class BonusConfig:
    """Settings of `Bonus`."""

    scale: float = 0.01

    def build(self, spec: Any, model: Any, generator: torch.Generator) -> Bonus:
        """The extension."""
        return Bonus(self.scale)

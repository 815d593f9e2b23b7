"""Numbers that a simulator reports of its own, on the way to the log.

T steps, M names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter import distributed


class EnvMetrics:
    """What the simulator itself reports (`Step.metrics`), by step, at an address that stays once all names are known.

    A name is learned when it first comes: the first rollouts, which run eagerly, fix the names for a captured
    collection.
    """

    def __init__(self, horizon: int, device: torch.device) -> None:
        self.names: list[str] = []
        self.nothing = torch.tensor(torch.nan, device=device)
        self.table = self.nothing.expand(horizon, 0)
        """`[T, M]`, NaN where a step did not report."""

    def write(self, t: int, reported: dict[str, Tensor]) -> None:
        """Keep what step t reported."""
        new = [name for name in reported if name not in self.names]
        if new:
            self.names += new
            self.table = torch.cat([self.table, self.nothing.expand(len(self.table), len(new))], 1)
        if self.names:
            self.table[t].copy_(torch.stack([reported.get(name, self.nothing) for name in self.names]))

    def means(self) -> dict[str, Tensor]:
        """By `env/<name>`, 0-d: means over the steps that reported, on all ranks; NaN where none did."""
        if not self.names:
            return {}
        sums = distributed.sum_(torch.stack([self.table.nansum(0), (~self.table.isnan()).sum(0).to(self.table)]))
        return {f"env/{name}": mean for name, mean in zip(self.names, (sums[0] / sums[1]).unbind(), strict=True)}

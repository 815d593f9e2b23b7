"""Networks of extensions (AMP's discriminator, curiosity) in the files of a source library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from canter.compat.weights import (
    OptimizerProgress,
    Statistics,
    Weights,
    check_moments,
    check_same,
    check_statistics,
    moments_in,
    optimizer_progress,
    set_optimizer_progress,
    set_statistics,
    statistics_of,
)
from canter.nn.normalizer import AnyNormalizer, Normalizer
from canter.nn.optimizer import ParameterGroup


@dataclass(frozen=True)
class SideNetwork:
    """Parameters and statistics of an extension by the names of a source library, and their optimizer."""

    prefix: str
    """Start of all names of parameters."""
    parameters: dict[str, Tensor]
    normalizers: dict[str, AnyNormalizer]
    """Normalizer by the role of its statistics; those without statistics are in no file."""
    group: ParameterGroup
    turn: Callable[[str, Tensor], Tensor] = lambda name, value: value
    """Converts a parameter, a moment or statistics, by name or role, between both orders of columns."""

    def _statistics(self) -> dict[str, list[Normalizer]]:
        return {role: [part] if isinstance(part, Normalizer) else [] for role, part in self.normalizers.items()}

    def _turned(self, role: str, found: Statistics | None) -> Statistics | None:
        if found is None:
            return None
        return Statistics(self.turn(role, found.mean), self.turn(role, found.variance), found.count)

    def check(self, weights: Weights) -> None:
        """Raise ConfigError for a file with another network, or none."""
        theirs = {name: tensor for name, tensor in weights.parameters.items() if name.startswith(self.prefix)}
        check_same(self.parameters, theirs)
        check_moments(self.parameters, weights)
        for role, parts in self._statistics().items():
            check_statistics(parts, weights.statistics.get(role), role)

    @torch.no_grad()
    def load(self, weights: Weights, progress: OptimizerProgress) -> None:
        """Load the network, its statistics and its optimizer from a checked file."""
        moments = moments_in(self.group, self.parameters.items())
        for name, parameter in self.parameters.items():
            parameter.copy_(self.turn(name, weights.parameters[name]))
            for here, value in zip(moments.get(name, ()), weights.moments.get(name, ()), strict=False):
                here.copy_(self.turn(name, value))
        for role, parts in self._statistics().items():
            set_statistics(parts, self._turned(role, weights.statistics.get(role)))
        set_optimizer_progress(self.group, progress)

    @torch.no_grad()
    def take(self, phase: str) -> Weights:
        """Return the weights by the source library's names, with the optimizer as that of `phase`."""
        weights = Weights(optimizers={phase: optimizer_progress(self.group)})
        for name, parameter in self.parameters.items():
            weights.parameters[name] = self.turn(name, parameter.detach()).cpu()
        for name, (mean, square) in moments_in(self.group, self.parameters.items()).items():
            weights.moments[name] = self.turn(name, mean).cpu(), self.turn(name, square).cpu()
        for role, parts in self._statistics().items():
            if (found := self._turned(role, statistics_of(parts))) is not None:
                weights.statistics[role] = found
        return weights

"""Running mean and standard deviation, moved only by an explicit `update`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.functional.statistics import absorb_, moments, standardize


@dataclass(frozen=True, kw_only=True)
class NormalizerConfig:
    """How running statistics become a scale."""

    eps: float = 1e-8
    """Added so that nothing is divided by zero."""
    eps_on: Literal["variance", "deviation"] = "variance"
    """What it is added to: the variance, before the root, or the standard deviation."""
    clip: float | None = 10.0
    """Standardised numbers further from 0 than this are cut off; null for none."""
    prior_count: float = 0.0
    """As how many rows a mean of 0 and a variance of 1 count that nobody saw."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        for name in ("eps", "prior_count"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name)} must be finite and not negative")
        check_range(self, "must be above 0", "clip")

    def build(self, shape: tuple[int, ...] = ()) -> Normalizer:
        """For tensors of this trailing shape."""
        return Normalizer(shape, self.clip, self.eps, self.eps_on == "deviation", self.prior_count)


class Normalizer(nn.Module):
    """Standardises tensors of trailing `shape` by the moments of all rows it was ever shown.

    Moments are float64, as float32 would stop moving after some million rows. `forward` and `inverse` are pure;
    buffers change in place and only in `update`. `clip` bounds what `forward` gives and what `inverse` takes.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    scale: Tensor
    inverse_scale: Tensor

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        clip: float | None = None,
        eps: float = 1e-8,
        eps_on_std: bool = False,
        prior_count: float = 0.0,
    ) -> None:
        super().__init__()
        self.clip, self.eps, self.eps_on_std = clip, eps, eps_on_std
        self.register_buffer("count", torch.tensor(prior_count, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.full(shape, prior_count, dtype=torch.float64))
        # float32 copies of what the hot path needs.
        scale = 1.0 + eps if eps_on_std else math.sqrt(1.0 + eps)
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.full(shape, scale))
        self.register_buffer("inverse_scale", torch.full(shape, 1.0 / scale))

    def forward(self, x: Tensor) -> Tensor:
        """`(x - mean) / std`, clipped; before the first update mean and std are 0 and 1."""
        return standardize(x, self.shift, self.inverse_scale, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """`x * std + mean`, of a clipped `x`."""
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        return x * self.scale + self.shift

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge the rows of `x` `[..., *shape]` where `mask` `[...]` is True, over all ranks."""
        running, derived = (self.count, self.mean, self.m2), (self.shift, self.scale, self.inverse_scale)
        absorb_(running, moments(x, mask), derived, self.eps, self.eps_on_std)


class IdentityNormalizer(nn.Module):
    """A normaliser that leaves everything as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def inverse(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Nothing."""


AnyNormalizer = Normalizer | IdentityNormalizer

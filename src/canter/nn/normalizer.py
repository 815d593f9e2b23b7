"""Running mean and standard deviation, moved only by an explicit `update`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from canter.functional.running import absorb_, standardize
from canter.functional.stats import moments


class Normalizer(nn.Module):
    """Standardises tensors of trailing `shape` by the moments of all rows it was ever shown.

    Moments are float64, as float32 would stop moving after some million rows. `forward` and `inverse` are pure;
    buffers change in place and only in `update`, once per iteration, so what was computed while acting can be
    computed again while learning. `clip` bounds the output of `forward`; a normaliser that is inverted must not clip.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    scale: Tensor
    inverse_scale: Tensor

    def __init__(self, shape: tuple[int, ...] = (), clip: float | None = None, eps: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.eps = clip, eps
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        # float32 copies of what the hot path needs.
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))
        self.register_buffer("inverse_scale", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        """`(x - mean) / std`, clipped; the identity before the first update."""
        return standardize(x, self.shift, self.inverse_scale, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """`x * std + mean`."""
        return x * self.scale + self.shift

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge the rows of `x` `[..., *shape]` where `mask` `[...]` is True, over all ranks."""
        running, derived = (self.count, self.mean, self.m2), (self.shift, self.scale, self.inverse_scale)
        absorb_(running, moments(x, mask), derived, self.eps)


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

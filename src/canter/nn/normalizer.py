"""Running mean and standard deviation, moved only by an explicit `update`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from canter.functional.stats import merge_moments, moments
from canter.kernels import usable


class Normalizer(nn.Module):
    """Standardises tensors of trailing `shape` by the moments of all rows it was ever shown.

    Moments are float64, so that a billion rows neither freeze nor cancel them. `forward` and `inverse` are pure;
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
        if usable(x) and self.clip is not None and not x.requires_grad:
            from canter.kernels.rows import standardize

            return standardize(x, self.shift, self.inverse_scale, self.clip)
        x = (x - self.shift) * self.inverse_scale
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """`x * std + mean`."""
        return x * self.scale + self.shift

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge the rows of `x` `[..., *shape]` where `mask` `[...]` is True, over all ranks."""
        # A NaN from a simulator must not poison the statistics: the run stops on it later, with everything else intact.
        if usable(self.shift):
            from canter.kernels.statistics import absorb_

            derived = (self.shift, self.scale, self.inverse_scale)
            return absorb_((self.count, self.mean, self.m2), moments(x, mask), derived, self.eps)
        merged = merge_moments(self.count, self.mean, self.m2, *moments(x, mask))
        finite = torch.stack([torch.isfinite(part).all() for part in merged]).all()
        for buffer, part in zip((self.count, self.mean, self.m2), merged, strict=True):
            buffer.copy_(torch.where(finite, part, buffer))
        variance = torch.where(self.count > 0, self.m2 / self.count.clamp(min=1), torch.ones_like(self.m2))
        std = torch.sqrt(variance + self.eps)
        self.shift.copy_(self.mean)
        self.scale.copy_(std)
        self.inverse_scale.copy_(1.0 / std)


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

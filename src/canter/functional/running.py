"""Running moments of what a normaliser was shown, and standardising by them."""

from __future__ import annotations

import torch
from torch import Tensor

from canter.dispatch import has_kernels
from canter.functional.stats import merge_moments

Tensors = tuple[Tensor, Tensor, Tensor]


@has_kernels
def standardize(x: Tensor, shift: Tensor, inverse_scale: Tensor, clip: float | None) -> Tensor:
    """`(x - shift) * inverse_scale` for `x` `[..., *shape]`, kept within -clip..clip unless that is None."""
    x = (x - shift) * inverse_scale
    return x if clip is None else x.clamp(-clip, clip)


@has_kernels
def absorb_(running: Tensors, new: Tensors, derived: Tensors, eps: float, eps_on_std: bool = False) -> None:
    """Merge `new` moments into `running` ones in place, unless that gives anything that is not finite.

    Both are count, mean and sum of squared deviations in float64; `derived` become mean, standard deviation and its
    inverse in float32, with `eps` added to the variance or to the standard deviation. A NaN from a simulator must not
    spoil the statistics: the run stops on it later.
    """
    merged = merge_moments(*running, *new)
    finite = torch.stack([torch.isfinite(part).all() for part in merged]).all()
    for buffer, part in zip(running, merged, strict=True):
        buffer.copy_(torch.where(finite, part, buffer))
    (count, mean, m2), (shift, scale, inverse_scale) = running, derived
    variance = torch.where(count > 0, m2 / count.clamp(min=1), torch.ones_like(m2))
    std = torch.sqrt(variance) + eps if eps_on_std else torch.sqrt(variance + eps)
    shift.copy_(mean)
    scale.copy_(std)
    inverse_scale.copy_(1.0 / std)

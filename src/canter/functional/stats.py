"""Means over the valid samples, and moments over those of all ranks.

`mask` is True where a sample counts; what the other samples hold, NaN included, has no influence. Statistics are
accumulated in float64: float32 counts stop at 2**24, and sums of squares lose a small spread around a large mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter import distributed
from canter.dispatch import has_kernels


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over its masked-in samples, differentiable; 0 when there are none.

    `mask` covers the last axes of `x`; axes before it are kept, so several quantities can be averaged in one pass.

    It is that of this rank alone. Whoever averages over ranks weighs each by its count (`Optimizer.exchange_`).
    """
    total = torch.where(mask, x, 0.0).sum(tuple(range(-mask.ndim, 0)))
    return (total / mask.sum(dtype=torch.float64).clamp(min=1.0)).to(x.dtype)


@has_kernels
def masked_sums(x: Tensor, mask: Tensor, centre: Tensor | None = None) -> Tensor:
    """Sums of `x` over its masked-in samples, or of their squared distances from `centre`, in float64.

    `mask` covers the leading axes of `x`; `centre`, float64, and what comes out have the shape of the others.
    """
    counted = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    x = x.double() if centre is None else (x.double() - centre).square()
    return torch.where(counted, x, 0.0).sum(tuple(range(mask.ndim)))


@has_kernels
@torch.no_grad()
def own_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `moments`, of this rank alone."""
    count, total = mask.sum(dtype=torch.float64), masked_sums(x, mask)
    mean = total / count.clamp(min=1.0)
    return count, mean, masked_sums(x, mask, mean)


@torch.no_grad()
def moments(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations over all ranks, float64 and without gradient.

    `mask` covers the leading axes of `x`; the axes after it are features with moments of their own. Without a mask
    every element counts and there are no feature axes. The count is 0-d; mean and m2 have the feature shape and are 0
    when the count is. The population variance is `m2 / count`.
    """
    count, mean, m2 = own_moments(x, torch.ones_like(x, dtype=torch.bool) if mask is None else mask)
    if not distributed.active():
        return count, mean, m2
    # One exchange: every rank's own, side by side, and put together by all of them alike (Chan, Golub and LeVeque).
    parts = torch.zeros((distributed.world_size(), 1 + 2 * mean.numel()), dtype=torch.float64, device=x.device)
    parts[distributed.rank()] = torch.cat([count.reshape(1), mean.reshape(-1), m2.reshape(-1)])
    counts, means, m2s = distributed.sum_(parts).split([1, mean.numel(), mean.numel()], dim=1)
    count = counts.sum()
    total_mean = (counts * means).sum(0) / count.clamp(min=1.0)
    total_m2 = (m2s + counts * (means - total_mean).square()).sum(0)
    return count, total_mean.reshape(mean.shape), total_m2.reshape(mean.shape)


def merge_moments(
    count_a: Tensor, mean_a: Tensor, m2_a: Tensor, count_b: Tensor, mean_b: Tensor, m2_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of two sets of samples together, from the moments of each (Chan, Golub and LeVeque, 1983).

    Either set, or both, may be empty.
    """
    count = count_a + count_b
    share_b = count_b / torch.where(count > 0, count, 1.0)
    delta = mean_b - mean_a
    return count, mean_a + delta * share_b, m2_a + m2_b + delta.square() * count_a * share_b


def _std(count: Tensor, mean: Tensor, m2: Tensor, dtype: torch.dtype, unbiased: bool = False) -> Tensor:
    """Standard deviation in float64, of the samples or `unbiased`; 0 where it is no larger than rounding of `dtype`.

    Equal samples are often equal up to rounding only, and their float64 mean is itself rounded; dividing by that
    spread would turn rounding errors into a signal of size 1.
    """
    std = (m2 / (count - float(unbiased)).clamp(min=1.0)).sqrt()
    resolution = max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float64).eps)
    return torch.where(std > resolution * mean.abs(), std, 0.0)


def normalize(x: Tensor, mask: Tensor, eps: float = 1e-8, unbiased: bool = False) -> Tensor:
    """Shift and scale `x` to mean 0 and standard deviation 1 over the masked-in samples of all ranks.

    `unbiased` divides the squares by n - 1 instead of n.
    Samples outside the mask become 0, and so does everything when the samples are all equal. Keeps shape and dtype;
    the axes of `x` after those of `mask` are normalised apart.
    """
    count, mean, m2 = moments(x, mask)
    std = _std(count, mean, m2, x.dtype, unbiased)
    counted = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return torch.where(counted & (std > 0), (x.double() - mean) / (std + eps), 0.0).to(x.dtype)


def explained_variance(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """`1 - Var(target - prediction) / Var(target)` over the masked-in samples of all ranks, 0-d, never NaN.

    1 is a perfect prediction up to a constant, 0 is no better than a constant, negative is worse. It is 0 by
    definition when the targets do not vary.
    """
    both = torch.stack([target.double() - prediction.double(), target.double()], -1)
    (count, means, m2s), resolutions = moments(both, mask), (torch.float64, target.dtype)
    residual, spread = (_std(count, means[i], m2s[i], dtype) for i, dtype in enumerate(resolutions))
    explained = 1.0 - (residual / torch.where(spread > 0, spread, 1.0)).square()
    return torch.where(spread > 0, explained, 0.0).to(target.dtype)

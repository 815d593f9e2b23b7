"""Means over the valid samples, and moments over those of all ranks.

`mask` is True where a sample counts; what the other samples hold, NaN included, has no influence. Statistics are
accumulated in float64: float32 counts stop at 2**24, and sums of squares lose a small spread around a large mean.

Running moments of what a normaliser was shown, and standardising by them.

One number for many runs or episodes, and how sure it is.

n samples along the first axis; further axes are kept, so a whole curve is summarised at once.

The long-run average reward per unit of time, with its uncertainty by batch means.

What was seen is cut into 20 batches, each a few environments or a long stretch of one, and Student's t gives the
interval from the spread of their averages. It is right if batches hardly depend on each other. With at least 20
environments they do not at all; with fewer each must be much longer than the task remembers.

K stretches of time, N environments.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from canter.core import distributed
from canter.core.dispatch import has_kernels


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


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """Mean of the middle half of n samples `[n, ...]`: `[...]`, float64.

    A quarter of the samples counts for nothing at either end, so a lucky or failed run moves it little. Where n / 4 is
    no whole number, the samples at the quartiles count in part; the exact quartile range is averaged for any n.
    """
    if not len(x):
        raise ValueError("the interquartile mean of no samples does not exist")
    return np.tensordot(_weights(len(x)), np.sort(np.asarray(x, dtype=np.float64), axis=0), axes=1)


def bootstrap_interval(
    x: np.ndarray, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end `[...]` of the bootstrap interval of the interquartile mean of `[n, ...]`.

    Each draw takes n of the samples with replacement, the same ones for all further axes. Samples are drawn by `seed`:
    the same data always give the same interval. With fewer than five samples it is narrower than it should be.
    """
    taken = np.random.default_rng(seed).integers(len(x), size=(draws, len(x)))
    columns = np.asarray(x, dtype=np.float64).reshape(len(x), -1).T
    # Column by column: sorting short rows side by side is quick, and all columns at once would be large.
    estimates = np.stack([np.sort(column[taken], axis=1) @ _weights(len(x)) for column in columns])
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2], axis=1)
    return low.reshape(x.shape[1:]), high.reshape(x.shape[1:])


def _weights(n: int) -> np.ndarray:
    """Shares of n sorted samples: sample i covers the ranks i..i+1, and what lies within n/4..3n/4 counts."""
    edges = np.arange(n + 1).clip(n / 4, 3 * n / 4)
    return np.diff(edges) / (n / 2)


BATCHES = 20
QUANTILE = 2.093
"""Student's t with 19 degrees of freedom is below this with probability 97.5 %."""


def in_groups(sums: Tensor) -> Tensor:
    """Sums `[2, N]` of rewards and durations of N environments, over at most 20 groups of them: `[2, G]`."""
    parts = sums.tensor_split(min(BATCHES, sums.shape[-1]), dim=-1)
    return torch.stack([part.sum(-1) for part in parts], dim=-1)


def batch_means(sums: Tensor) -> tuple[float, float] | None:
    """The average and the half-width of its 95 % interval, from sums of rewards and durations `[K, 2, N]`.

    None where they make fewer than 20 batches, or no time has passed.
    """
    # Environment by environment, so that a batch holds as much of one as it can before it goes on to the next.
    gain, time = sums.double().permute(1, 2, 0).flatten(1)
    total = float(time.sum())
    if len(gain) < BATCHES or not total > 0:
        return None
    mean = float(gain.sum()) / total
    residuals = torch.stack([part.sum() for part in (gain - mean * time).tensor_split(BATCHES)])
    error = math.sqrt(float(residuals.square().sum()) * BATCHES / (BATCHES - 1)) / total
    return mean, QUANTILE * error

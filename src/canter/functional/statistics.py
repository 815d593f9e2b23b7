"""Statistics of samples: masked means and moments, running moments, interquartile and batch means.

`mask` is True where a sample counts; the values of other samples, NaN included, have no influence.
Moments are accumulated in float64: float32 counts stop at 2**24, and sums of squares lose a small
spread around a large mean. Functions that say so combine the samples of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from canter.core import distributed
from canter.core.dispatch import has_kernels

Tensors = tuple[Tensor, Tensor, Tensor]
Key = TypeVar("Key", bound=Hashable)


# Means and moments of masked samples


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the differentiable mean of `x` over the samples where `mask` is True; 0 if none is.

    `mask` covers the last axes of `x`; axes before it are kept, so several quantities can be
    averaged in one pass.

    The mean is over this rank alone. To average over ranks, weight each rank by its count
    (`Optimizer.exchange_`).
    """
    total = torch.where(mask, x, 0.0).sum(tuple(range(-mask.ndim, 0)))
    return (total / mask.sum(dtype=torch.float64).clamp(min=1.0)).to(x.dtype)


@has_kernels
def masked_sums(x: Tensor, mask: Tensor, centre: Tensor | None = None) -> Tensor:
    """Return float64 sums of `x` over masked samples, or of squared distances from `centre`.

    `mask` covers the leading axes of `x`; `centre` (float64) and the result have the shape of the
    other axes.
    """
    counted = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    x = x.double() if centre is None else (x.double() - centre).square()
    return torch.where(counted, x, 0.0).sum(tuple(range(mask.ndim)))


@has_kernels
@torch.no_grad()
def local_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `moments`, over this rank alone."""
    count = mask.sum(dtype=torch.float64)
    mean = masked_sums(x, mask) / count.clamp(min=1.0)
    return count, mean, masked_sums(x, mask, mean)


@torch.no_grad()
def moments(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squared differences from the mean (`m2`) over all ranks.

    Results are float64, without gradient. `mask` covers the leading axes of `x`; the axes after it
    are features, each with its own moments. Without a mask every element counts and there are no
    feature axes. The count is 0-d; mean and m2 have the feature shape and are 0 when the count is.
    The population variance is `m2 / count`.
    """
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    count, mean, m2 = local_moments(x, mask)
    if not distributed.active():
        return count, mean, m2
    # One exchange: the moments of all ranks side by side, which every rank then merges in the same
    # way (Chan, Golub and LeVeque).
    size = mean.numel()
    parts = torch.zeros((distributed.world_size(), 1 + 2 * size), dtype=torch.float64, device=x.device)
    parts[distributed.rank()] = torch.cat([count.reshape(1), mean.reshape(-1), m2.reshape(-1)])
    counts, means, m2s = distributed.sum_(parts).split([1, size, size], dim=1)
    count = counts.sum()
    total_mean = (counts * means).sum(0) / count.clamp(min=1.0)
    total_m2 = (m2s + counts * (means - total_mean).square()).sum(0)
    return count, total_mean.reshape(mean.shape), total_m2.reshape(mean.shape)


def merge_moments(
    count_a: Tensor, mean_a: Tensor, m2_a: Tensor, count_b: Tensor, mean_b: Tensor, m2_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of the union of two sets of samples (Chan, Golub and LeVeque, 1983).

    Either set, or both, may be empty.
    """
    count = count_a + count_b
    share_b = count_b / torch.where(count > 0, count, 1.0)
    delta = mean_b - mean_a
    return count, mean_a + delta * share_b, m2_a + m2_b + delta.square() * count_a * share_b


def _std(count: Tensor, mean: Tensor, m2: Tensor, dtype: torch.dtype, unbiased: bool = False) -> Tensor:
    """Return the standard deviation in float64; 0 if it is no larger than rounding of `dtype`.

    Equal samples are often equal up to rounding only, and their float64 mean is itself rounded;
    dividing by that spread would turn rounding errors into a signal of size 1.
    """
    std = (m2 / (count - float(unbiased)).clamp(min=1.0)).sqrt()
    resolution = max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float64).eps)
    return torch.where(std > resolution * mean.abs(), std, 0.0)


def normalize(x: Tensor, mask: Tensor, eps: float = 1e-8, unbiased: bool = False) -> Tensor:
    """Return `x` with mean 0 and standard deviation 1 over the masked samples of all ranks.

    `unbiased` divides the squares by n - 1 instead of n. Samples outside the mask become 0; if all
    samples are equal, everything becomes 0. Shape and dtype are kept; the axes of `x` after those
    of `mask` are normalised separately.
    """
    count, mean, m2 = moments(x, mask)
    std = _std(count, mean, m2, x.dtype, unbiased)
    counted = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return torch.where(counted & (std > 0), (x.double() - mean) / (std + eps), 0.0).to(x.dtype)


def explained_variance(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return `1 - Var(target - prediction) / Var(target)` over the masked samples of all ranks.

    The result is 0-d and never NaN. 1 is a perfect prediction up to a constant, 0 is no better than
    a constant, negative is worse. It is 0 by definition when the targets do not vary.
    """
    both = torch.stack([target.double() - prediction.double(), target.double()], -1)
    count, means, m2s = moments(both, mask)
    residual = _std(count, means[0], m2s[0], torch.float64)
    spread = _std(count, means[1], m2s[1], target.dtype)
    explained = 1.0 - (residual / torch.where(spread > 0, spread, 1.0)).square()
    return torch.where(spread > 0, explained, 0.0).to(target.dtype)


# Running moments of a normaliser


@has_kernels
def standardize(x: Tensor, shift: Tensor, inverse_scale: Tensor, clip: float | None) -> Tensor:
    """Return `(x - shift) * inverse_scale` for `x` `[..., *shape]`, clipped unless that is None."""
    x = (x - shift) * inverse_scale
    return x if clip is None else x.clamp(-clip, clip)


@has_kernels
def update_moments_(running: Tensors, new: Tensors, derived: Tensors, eps: float, eps_on_std: bool = False) -> None:
    """Merge `new` moments into `running` in place, unless the result has NaN or infinity.

    Both are count, mean and m2 in float64. `derived` receives mean, standard deviation and its
    inverse in float32, with `eps` added to the variance or, with `eps_on_std`, to the standard
    deviation. A NaN from a simulator must not corrupt the statistics: the run stops on it later.
    """
    merged = merge_moments(*running, *new)
    finite = torch.stack([torch.isfinite(part).all() for part in merged]).all()
    for buffer, part in zip(running, merged, strict=True):
        buffer.copy_(torch.where(finite, part, buffer))
    count, mean, m2 = running
    shift, scale, inverse_scale = derived
    variance = torch.where(count > 0, m2 / count.clamp(min=1), torch.ones_like(m2))
    std = torch.sqrt(variance) + eps if eps_on_std else torch.sqrt(variance + eps)
    shift.copy_(mean)
    scale.copy_(std)
    inverse_scale.copy_(1.0 / std)


# Interquartile mean of several runs or episodes, with a bootstrap interval
#
# n samples along the first axis; further axes are kept, so a whole curve is summarised at once.


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """Return the float64 mean `[...]` of the middle half of n samples `[n, ...]`.

    A quarter of the samples is dropped at either end, so a lucky or failed run has little
    influence. If n / 4 is not an integer, the samples at the quartiles count in part; the exact
    quartile range is averaged for any n.
    """
    if not len(x):
        raise ValueError("the interquartile mean of no samples does not exist")
    return np.tensordot(_interquartile_weights(len(x)), np.sort(np.asarray(x, dtype=np.float64), axis=0), axes=1)


def bootstrap_interval(
    x: np.ndarray, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends `[...]` of the bootstrap interval of the interquartile mean of `[n, ...]`.

    Each draw resamples n of the samples with replacement, the same ones for all further axes. The
    draws depend on `seed` alone: the same data always return the same interval. With fewer than
    five samples it is narrower than it should be.
    """
    indices = np.random.default_rng(seed).integers(len(x), size=(draws, len(x)))
    columns = np.asarray(x, dtype=np.float64).reshape(len(x), -1).T
    weights = _interquartile_weights(len(x))
    # Column by column: sorting short rows side by side is quick, all columns at once would be
    # large.
    estimates = np.stack([np.sort(column[indices], axis=1) @ weights for column in columns])
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2], axis=1)
    return low.reshape(x.shape[1:]), high.reshape(x.shape[1:])


def _interquartile_weights(n: int) -> np.ndarray:
    """Return the weights of n sorted samples: the part of i..i+1 that lies within n/4..3n/4."""
    edges = np.arange(n + 1).clip(n / 4, 3 * n / 4)
    return np.diff(edges) / (n / 2)


# Means of a few runs and differences between them, with intervals by Student's t
#
# The runs of a group are independent samples. Groups may differ in their spread (Welch, 1947).


@dataclass(frozen=True)
class MeanDifference:
    """Difference of the means of two groups of independent samples, by Welch's t-test."""

    difference: float
    """Second mean minus first."""
    low: float
    """Lower end of the 95 % interval of the difference."""
    high: float
    """Upper end of the 95 % interval of the difference."""
    p_value: float
    """Two-sided p-value of equal means."""
    degrees_of_freedom: float
    """Welch and Satterthwaite's degrees of freedom."""


def mean_interval(x: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return the ends of Student's interval of the mean of n samples; None for fewer than two."""
    if len(x) < 2:
        return None
    mean, variance = _mean_and_variance(x)
    half = student_t_quantile(level, len(x) - 1) * math.sqrt(variance)
    return (mean - half, mean + half) if math.isfinite(half) else None


def welch_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> MeanDifference | None:
    """Return the mean of `b` minus the mean of `a`, with its interval and Welch's t-test.

    None if a group has fewer than two samples, or if no group has any spread: nothing can then be
    said about the error of the difference.
    """
    if min(len(a), len(b)) < 2:
        return None
    mean_a, variance_a = _mean_and_variance(a)
    mean_b, variance_b = _mean_and_variance(b)
    variance = variance_a + variance_b
    if not (math.isfinite(variance) and variance > 0):
        return None
    difference = mean_b - mean_a
    share = variance_a / variance
    degrees = 1.0 / (share**2 / (len(a) - 1) + (1.0 - share) ** 2 / (len(b) - 1))
    error = math.sqrt(variance)
    half = student_t_quantile(level, degrees) * error
    p_value = max(0.0, 1.0 - student_t_probability(abs(difference) / error, degrees))
    return MeanDifference(difference, difference - half, difference + half, p_value, degrees)


def _mean_and_variance(x: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two samples, and the variance of that mean."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.mean(x)), float(np.var(x, ddof=1)) / len(x)


def welch_differences(
    base: Sequence[float], others: Mapping[Key, Sequence[float]]
) -> dict[Key, tuple[MeanDifference, float] | tuple[None, None]]:
    """Return `welch_difference` of each sample from `base`, with its p-value by Holm's method for all of them."""
    tests = {key: welch_difference(base, own) for key, own in others.items()}
    known = {key: test for key, test in tests.items() if test is not None}
    adjusted = dict(zip(known, holm_adjusted([test.p_value for test in known.values()]), strict=True))
    return {key: (test, adjusted[key]) if test is not None else (None, None) for key, test in tests.items()}


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests by Holm's method, in the same order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def student_t_probability(t: float, degrees_of_freedom: float) -> float:
    """Return the probability that Student's t is between -t and t, for at least one degree of freedom.

    With t = sqrt(dof) tan(angle) the density is a power of the cosine, which Gauss and Legendre's
    rule integrates.
    """
    return _cosine_integral(math.atan(t / math.sqrt(degrees_of_freedom)), degrees_of_freedom)


def student_t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the t for which Student's t is between -t and t with this probability."""
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _cosine_integral(middle, degrees_of_freedom) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees_of_freedom) * math.tan(low)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)


def _cosine_integral(angle: float, degrees_of_freedom: float) -> float:
    """Return the integral of cos^(dof - 1) from -angle to angle, as a share of that to 90 degrees."""
    values = np.cos(angle / 2 * (_NODES + 1.0)) ** (degrees_of_freedom - 1.0)
    log_scale = math.lgamma((degrees_of_freedom + 1) / 2) - math.lgamma(degrees_of_freedom / 2)
    return float(angle * (_WEIGHTS @ values)) * math.exp(log_scale) / math.sqrt(math.pi)


# Long-run average reward per unit of time, with an interval by batch means
#
# The observed time is cut into 20 batches, each a few environments or a long stretch of one, and
# Student's t turns the spread of their averages into the interval. It is right if batches hardly
# depend on each other: with at least 20 environments they are independent; with fewer, each batch
# must be much longer than the correlation time of the task. K stretches of time, N environments.

BATCHES = 20
QUANTILE = 2.093
"""97.5 % quantile of Student's t distribution with 19 degrees of freedom."""


def group_sums(sums: Tensor) -> Tensor:
    """Return sums `[2, N]` of rewards and durations added up in at most 20 groups: `[2, G]`."""
    parts = sums.tensor_split(min(BATCHES, sums.shape[-1]), dim=-1)
    return torch.stack([part.sum(-1) for part in parts], dim=-1)


def batch_means(sums: Tensor) -> tuple[float, float] | None:
    """Return the average reward per unit of time and the half-width of its 95 % interval.

    `sums` `[K, 2, N]` holds sums of rewards and of durations. Returns None if they make fewer than
    20 batches, or if no time has passed.
    """
    # Environment by environment, so that a batch covers as much of one as possible before the next.
    gain, time = sums.double().permute(1, 2, 0).flatten(1)
    total = float(time.sum())
    if len(gain) < BATCHES or not total > 0:
        return None
    mean = float(gain.sum()) / total
    residuals = torch.stack([part.sum() for part in (gain - mean * time).tensor_split(BATCHES)])
    error = math.sqrt(float(residuals.square().sum()) * BATCHES / (BATCHES - 1)) / total
    return mean, QUANTILE * error

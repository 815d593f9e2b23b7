"""One number for many runs or episodes, and how sure it is.

n samples along the first axis; further axes are kept, so a whole curve is summarised at once.
"""

from __future__ import annotations

import numpy as np


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

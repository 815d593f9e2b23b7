"""The long-run average reward per unit of time, with its uncertainty by batch means.

What was seen is cut into 20 batches, each a few environments or a long stretch of one, and Student's t gives the
interval from the spread of their averages. It is right if batches hardly depend on each other. With at least 20
environments they do not at all; with fewer each must be much longer than the task remembers.

K stretches of time, N environments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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

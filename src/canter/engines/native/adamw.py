"""AdamW with gradient clipping over one flat vector, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from canter.engines.native.declines import compiled


def square_sum(gradient: Tensor) -> float:
    """Sum of the squares of a contiguous vector `[n]`, accumulated in float64 in a fixed order."""
    return compiled().square_sum(gradient.dtype == torch.float64, gradient.numpy())


def adamw_(
    flat: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_norm: float,
    norm: float | None = None,
) -> float:
    """One step of AdamW in place on vectors `[n]`, gradients clipped at `max_norm`; returns the gradient's norm.

    `norm` is that of a longer gradient of which this is a part, to clip several jointly; None takes this one's own.
    Where it is not finite nothing moves, and neither does `step`, a 0-d float32 tensor that counts the steps taken.
    """
    return compiled().adamw(
        flat.dtype == torch.float64,
        flat.numpy(),
        gradient.numpy(),
        exp_avg.numpy(),
        exp_avg_sq.numpy(),
        step.numpy(),
        learning_rate,
        *betas,
        eps,
        weight_decay,
        max_norm,
        -1.0 if norm is None else norm,
    )

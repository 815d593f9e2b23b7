"""One optimiser step over flat vectors: skip test, clipping, and Adam with weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from canter.core.dispatch import has_kernels


@dataclass(frozen=True)
class AdamGroup:
    """P parameters with one learning rate, and the state of Adam; tensors are updated in place."""

    flat: Tensor
    """`[P]` parameters."""
    gradient: Tensor
    """`[P]`; its scale after a step is undefined, clipping may be applied in place."""
    exp_avg: Tensor
    """`[P]` running mean of the gradient."""
    exp_avg_sq: Tensor
    """`[P]` running mean of its square."""
    step: Tensor
    """0-d: number of steps so far."""
    learning_rate: Tensor
    """0-d step size."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    """Gradients are clipped to this norm."""
    coupled: bool = False
    """Add weight decay to the gradient (Adam's L2) instead of decaying the parameters (AdamW)."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays of the CPU tensors, in field order; cached: as slow as a small step."""
        tensors = (self.flat, self.gradient, self.exp_avg, self.exp_avg_sq, self.step, self.learning_rate)
        return tuple(tensor.numpy() for tensor in tensors)


@has_kernels
def adam_step_(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Step all groups, unless the 0-d bool `skip` is True or a gradient has NaN or infinity.

    Returns 0-d tensors: the norm of all gradients together, and 1 if it is NaN or infinity, else 0.
    `joint` clips by that norm, otherwise each group is clipped by its own. Nothing waits for the
    host.
    """
    squares = [torch.dot(group.gradient, group.gradient) for group in groups]
    norm = torch.stack(squares).sum().sqrt()
    blocked = ~(norm < math.inf)  # true of NaN too
    skipped = (skip | blocked).to(norm.dtype)
    for group, square in zip(groups, squares, strict=True):
        clipped_norm = norm if joint else square.sqrt()
        group.step.add_(1.0 - skipped)
        # Private, but torch's own optimiser spends more time around this call than in it. It
        # divides by `grad_scale` and checks `found_inf` inside its kernel, so clipping and skipping
        # are free.
        fused = torch._fused_adam_ if group.coupled else torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
        fused(
            [group.flat],
            [group.gradient],
            [group.exp_avg],
            [group.exp_avg_sq],
            [],
            [group.step],
            lr=group.learning_rate,
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay,
            eps=group.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=(clipped_norm / group.max_norm).clamp_(min=1.0),
            found_inf=skipped,
        )
    return norm, blocked.to(norm.dtype)

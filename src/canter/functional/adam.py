"""One optimiser step over flat vectors: whether to take it, clipping, and Adam with weight decay."""

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
    """P parameters that share one learning rate, with what a step needs besides; all tensors change in place."""

    flat: Tensor
    """`[P]`."""
    gradient: Tensor
    """`[P]`; after a step it may have been shortened or not."""
    exp_avg: Tensor
    """`[P]` running mean of the gradient."""
    exp_avg_sq: Tensor
    """`[P]` running mean of its square."""
    step: Tensor
    """0-d: steps taken so far."""
    learning_rate: Tensor
    """0-d."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    """Gradients longer than this are shortened to it."""
    coupled: bool = False
    """Whether weight decay is added to the gradient (Adam's L2) instead of taken from the parameters (AdamW)."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The memory of the six tensors on a CPU, in their order, found once: it takes as long as a small step."""
        tensors = (self.flat, self.gradient, self.exp_avg, self.exp_avg_sq, self.step, self.learning_rate)
        return tuple(tensor.numpy() for tensor in tensors)


@has_kernels
def adam_step_(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """One step for all groups, except where the 0-d bool `skip` holds or a gradient is not finite; 0-d results.

    Gives the norm of all gradients together, and 1 where it is not finite. `joint` clips by that norm, otherwise each
    group by its own. Nothing waits for the host.
    """
    squares = [torch.dot(group.gradient, group.gradient) for group in groups]
    norm = torch.stack(squares).sum().sqrt()
    blocked = ~(norm < math.inf)  # true of NaN too
    skipped = (skip | blocked).to(norm.dtype)
    for group, square in zip(groups, squares, strict=True):
        own = norm if joint else square.sqrt()
        group.step.add_(1.0 - skipped)
        # Private, but torch's own optimiser spends more time around this call than in it. It divides by `grad_scale`
        # and checks `found_inf` inside its kernel, so that clipping and skipping cost nothing.
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
            grad_scale=(own / group.max_norm).clamp_(min=1.0),
            found_inf=skipped,
        )
    return norm, blocked.to(norm.dtype)

"""An optimiser step in C: norm, clipping and Adam, for all groups without a tensor of one number in between."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from canter.dispatch import kernel
from canter.engines.native.declines import AVAILABLE, compiled
from canter.functional.adam import AdamGroup, adam_step_

LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}


def _on_cpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> bool:
    return AVAILABLE and groups[0].gradient.is_cpu


@kernel(of=adam_step_, accepts=_on_cpu)
def adam_step_on_cpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Decides by numbers, which are at hand there."""
    square_sum, adamw, dtype = compiled().square_sum, compiled().adamw, groups[0].gradient.dtype
    is_double = dtype == torch.float64
    squares = [square_sum(is_double, group.gradient) for group in groups]
    # Beyond float32 as in the plain function, though C adds up in double; a NaN is not below it either.
    blocked = not sum(squares) <= LARGEST[dtype]
    total = math.inf if blocked else math.sqrt(sum(squares))
    if not (blocked or bool(skip.numpy())):
        for group, square in zip(groups, squares, strict=True):
            adamw(
                is_double,
                group.flat,
                group.gradient,
                group.exp_avg,
                group.exp_avg_sq,
                group.step,
                float(group.learning_rate.numpy()),
                *group.betas,
                group.eps,
                group.weight_decay,
                group.coupled,
                group.max_norm,
                total if joint else math.sqrt(square),
            )
    return torch.scalar_tensor(total, dtype=dtype), torch.scalar_tensor(float(blocked), dtype=dtype)

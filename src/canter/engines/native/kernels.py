"""Kernels in C for a CPU: optimizer steps, copies of small tensors, and sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from canter.core.dispatch import kernel
from canter.core.struct import copy_all_, fused_writer, maybe_any
from canter.engines.native import AVAILABLE, compiled
from canter.functional.optimization import AdamGroup, adam_step_
from canter.functional.returns import reverse_discounted_sum_
from canter.functional.statistics import masked_sums
from canter.nn.schedules import follow_kl_

LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
FLAGS = {dtype: torch.arange(2, dtype=dtype).unbind() for dtype in LARGEST}
"""0 and 1, never written to: a new tensor takes as long as a small step."""


def _groups_on_cpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> bool:
    return AVAILABLE and groups[0].gradient.is_cpu


@kernel(of=adam_step_, accepts=_groups_on_cpu)
def adam_step_on_cpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step, with the decisions made on Python numbers."""
    square_sum = compiled().square_sum
    adamw = compiled().adamw
    dtype = groups[0].gradient.dtype
    is_double = dtype == torch.float64
    squares = [square_sum(is_double, group.arrays[1]) for group in groups]
    # Overflow as in float32, like the plain function, although C sums in double; NaN fails the
    # comparison too.
    blocked = not sum(squares) <= LARGEST[dtype]
    total = math.inf if blocked else math.sqrt(sum(squares))
    if not (blocked or skip.tolist()):  # faster than making an array
        for group, square in zip(groups, squares, strict=True):
            *arrays, learning_rate = group.arrays
            adamw(
                is_double,
                *arrays,
                float(learning_rate),
                *group.betas,
                group.eps,
                group.weight_decay,
                group.coupled,
                group.max_norm,
                total if joint else math.sqrt(square),
            )
    return torch.scalar_tensor(total, dtype=dtype), FLAGS[dtype][blocked]


@kernel(of=copy_all_, accepts=lambda targets, _: AVAILABLE and bool(targets) and targets[0].is_cpu)
def copy_all_on_cpu(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy bytes, without a call of torch for each tensor, if all dtypes and layouts match."""
    if not compiled().copy(targets, sources):
        copy_all_.plain(targets, sources)


@kernel(of=fused_writer, accepts=lambda buffers: AVAILABLE and all(x.is_cpu and x.is_contiguous() for x in buffers))
def fused_writer_on_cpu(buffers: list[Tensor]) -> Callable[[int, list[Tensor | None]], bool]:
    """Return a writer that copies the bytes of each step.

    A tensor that was written in the step before is not checked again.
    """
    return partial(compiled().write, compiled().row_writer(buffers))


@kernel(of=maybe_any, accepts=lambda flags: flags.is_cpu)
def maybe_any_on_cpu(flags: Tensor) -> bool:
    """Return whether any flag is set: reading is free on a CPU."""
    return bool(flags.any().tolist())


def _on_cpu(x: Tensor, decay: Tensor) -> bool:
    supported = x.dtype in (torch.float32, torch.float64) and x.dtype == decay.dtype
    return AVAILABLE and x.is_cpu and supported and x.is_contiguous() and decay.is_contiguous()


@kernel(of=reverse_discounted_sum_, accepts=_on_cpu)
def reverse_discounted_sum_on_cpu(x: Tensor, decay: Tensor) -> None:
    """Accumulate without a call of torch for each step."""
    compiled().reverse_discounted_sum(x.dtype == torch.float64, x.shape[1], x, decay)


@kernel(of=follow_kl_, accepts=lambda value, *_: value.is_cpu and value.dtype == torch.float32)
def follow_kl_on_cpu(value: Tensor, kl: Tensor, target: float, factor: float, minimum: float, maximum: float) -> None:
    """Update the value by Python numbers, compared in the precision of `kl`."""
    measured = kl.tolist()
    number = np.float64 if kl.dtype == torch.float64 else np.float32
    change = 1.0
    if not measured <= number(2 * target):  # NaN counts as too far
        change = 1.0 / factor
    elif measured != 0.0 and measured < number(target / 2):
        change = factor
    value.mul_(change).clamp_(minimum, maximum)


def _rows_on_cpu(x: Tensor, mask: Tensor, centre: Tensor | None = None) -> bool:
    supported = x.dtype in LARGEST and x.is_contiguous() and mask.is_contiguous()
    return AVAILABLE and x.is_cpu and supported and x.numel() > 0 and not x.requires_grad


@kernel(of=masked_sums, accepts=_rows_on_cpu)
def masked_sums_on_cpu(x: Tensor, mask: Tensor, centre: Tensor | None = None) -> Tensor:
    """Sum in one pass, without arrays in float64."""
    sums = torch.empty(x.shape[mask.ndim :], dtype=torch.float64)
    compiled().column_sums(x.dtype == torch.float64, sums.numel(), x, mask, sums, centre)
    return sums

"""Plain functions that C does on a CPU: an optimiser step, copies of small tensors, sums over rows and back in time."""

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
from canter.functional.adam import AdamGroup, adam_step_
from canter.functional.returns import trace_back_
from canter.functional.statistics import masked_sums
from canter.nn.schedules import follow_kl_

LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
FLAGS = {dtype: torch.arange(2, dtype=dtype).unbind() for dtype in LARGEST}
"""0 and 1, which nobody writes to: a new number takes as long as a small step."""


def _groups_on_cpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> bool:
    return AVAILABLE and groups[0].gradient.is_cpu


@kernel(of=adam_step_, accepts=_groups_on_cpu)
def adam_step_on_cpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Decides by numbers, which are at hand there."""
    square_sum = compiled().square_sum
    adamw = compiled().adamw
    dtype = groups[0].gradient.dtype
    is_double = dtype == torch.float64
    squares = [square_sum(is_double, group.arrays[1]) for group in groups]
    # Beyond float32 as in the plain function, though C adds up in double; a NaN is not below it either.
    blocked = not sum(squares) <= LARGEST[dtype]
    total = math.inf if blocked else math.sqrt(sum(squares))
    if not (blocked or skip.tolist()):  # read where it lies, in a fraction of the time that an array takes
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
    """Bytes, without a call of torch for each; where a dtype or a layout differs, as the plain function."""
    if not compiled().copy(targets, sources):
        copy_all_.plain(targets, sources)


@kernel(of=fused_writer, accepts=lambda buffers: AVAILABLE and all(x.is_cpu and x.is_contiguous() for x in buffers))
def row_writer_on_cpu(buffers: list[Tensor]) -> Callable[[int, list[Tensor | None]], bool]:
    """Whatever has the shape and the dtype of a row, as bytes; what came in the step before is not looked at again."""
    return partial(compiled().write, compiled().row_writer(buffers))


@kernel(of=maybe_any, accepts=lambda flags: flags.is_cpu)
def may_hold_on_cpu(flags: Tensor) -> bool:
    """Looks."""
    return bool(flags.any().tolist())


def _on_cpu(x: Tensor, decay: Tensor) -> bool:
    known = x.dtype in (torch.float32, torch.float64) and x.dtype == decay.dtype
    return AVAILABLE and x.is_cpu and known and x.is_contiguous() and decay.is_contiguous()


@kernel(of=trace_back_, accepts=_on_cpu)
def trace_back_on_cpu(x: Tensor, decay: Tensor) -> None:
    """Without a call of torch for each row."""
    compiled().trace_back(x.dtype == torch.float64, x.shape[1], x, decay)


@kernel(of=follow_kl_, accepts=lambda value, *_: value.is_cpu and value.dtype == torch.float32)
def follow_kl_on_cpu(value: Tensor, kl: Tensor, target: float, factor: float, minimum: float, maximum: float) -> None:
    """Decides by numbers, compared in the precision of `kl`."""
    found = kl.tolist()
    number = np.float64 if kl.dtype == torch.float64 else np.float32
    near = found != 0.0 and found < number(target / 2)
    change = (factor if near else 1.0) if found <= number(2 * target) else 1.0 / factor
    value.mul_(change).clamp_(minimum, maximum)


def _rows_on_cpu(x: Tensor, mask: Tensor, centre: Tensor | None = None) -> bool:
    known = x.dtype in LARGEST and x.is_contiguous() and mask.is_contiguous()
    return AVAILABLE and x.is_cpu and known and x.numel() > 0 and not x.requires_grad


@kernel(of=masked_sums, accepts=_rows_on_cpu)
def masked_sums_on_cpu(x: Tensor, mask: Tensor, centre: Tensor | None = None) -> Tensor:
    """In one pass, without arrays in float64."""
    sums = torch.empty(x.shape[mask.ndim :], dtype=torch.float64)
    compiled().column_sums(x.dtype == torch.float64, sums.numel(), x, mask, sums, centre)
    return sums

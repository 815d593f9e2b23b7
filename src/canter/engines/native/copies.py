"""What surrounds the mathematics of a step on a CPU: copying small tensors, and sums backwards in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from canter.dispatch import kernel
from canter.engines.native.declines import AVAILABLE, compiled
from canter.functional.returns import trace_back_
from canter.struct import copy_all_, row_writer


@kernel(of=copy_all_, accepts=lambda targets, _: AVAILABLE and bool(targets) and targets[0].is_cpu)
def copy_all_on_cpu(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Bytes, without a call of torch for each; where a dtype or a layout differs, as the plain function."""
    if not compiled().copy(targets, sources):
        copy_all_.plain(targets, sources)


@kernel(of=row_writer, accepts=lambda buffers: AVAILABLE and all(x.is_cpu and x.is_contiguous() for x in buffers))
def row_writer_on_cpu(buffers: list[Tensor]) -> Callable[[int, list[Tensor | None]], bool]:
    """Whatever has the shape and the dtype of a row, as bytes; what came in the step before is not looked at again."""
    return partial(compiled().write, compiled().places(buffers))


def _on_cpu(x: Tensor, decay: Tensor) -> bool:
    known = x.dtype in (torch.float32, torch.float64) and x.dtype == decay.dtype
    return AVAILABLE and x.is_cpu and known and x.is_contiguous() and decay.is_contiguous()


@kernel(of=trace_back_, accepts=_on_cpu)
def trace_back_on_cpu(x: Tensor, decay: Tensor) -> None:
    """Without a call of torch for each row."""
    compiled().trace_back(x.dtype == torch.float64, x.shape[1], x, decay)

"""Hot functions written for GPUs in Triton, and a few for a CPU in NumPy and C, in modules whose names say `host`.

Each is a drop-in for a plain torch function elsewhere, which stays the definition: tests hold them against it. Callers
choose by `usable(tensor)` and `on_host(tensor)`; an installation without Triton never gets to those for GPUs.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def usable(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor: float32 or int64 on a GPU, outside of a compiler's trace."""
    if torch.compiler.is_compiling():
        return False
    return tensor.is_cuda and tensor.dtype != torch.float64 and _has_triton()


def on_host(tensor: Tensor) -> bool:
    """Whether the forms for a CPU apply to this tensor: float32 or float64, outside of any trace and of autocast."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64)

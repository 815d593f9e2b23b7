"""Hot functions written for GPUs in Triton.

Each is a drop-in for a plain torch function elsewhere, which stays the definition: tests hold them against it. Callers
choose by `usable(tensor)`; a CPU, or an installation without Triton, never gets here.
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

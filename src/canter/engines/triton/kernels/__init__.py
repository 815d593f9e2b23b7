"""Triton kernels for a GPU, registered in the dispatch table for the plain functions they replace.

The plain functions are the definition: tests compare every kernel with its own. No kernel is
imported before `load_kernels`, so that Canter works without Triton.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec


def has_triton() -> bool:
    """Return whether Triton is installed, as it is with GPU builds of torch."""
    return find_spec("triton") is not None


@cache
def load_kernels() -> None:
    """Register all kernels in the dispatch table if Triton is installed."""
    if has_triton():
        for module in ("gaussian_params", "linear", "optimizer", "recurrent", "rollout", "sac", "statistics"):
            importlib.import_module(f"canter.engines.triton.kernels.{module}")

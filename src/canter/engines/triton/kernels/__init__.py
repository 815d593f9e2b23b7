"""Kernels for a GPU, written in Triton, entered in the dispatch table beside the plain functions they stand for.

The plain functions stay the definition: tests hold every kernel against its own. Nothing here is imported before
`load_kernels`, which an installation without Triton never needs.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec


def has_triton() -> bool:
    """Whether Triton is installed, as it is with GPU builds of torch."""
    return find_spec("triton") is not None


@cache
def load_kernels() -> None:
    """Enter all kernels in the dispatch table, where Triton is installed."""
    if has_triton():
        for module in ("gaussian_params", "linear", "optimizer", "rows", "soft", "statistics"):
            importlib.import_module(f"canter.engines.triton.kernels.{module}")

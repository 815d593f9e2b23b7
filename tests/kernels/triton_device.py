"""Where tests of Triton kernels run: on a GPU, or with Triton's interpreter (`TRITON_INTERPRET=1`) on a CPU."""

import os

import pytest
import torch

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"),
]


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()

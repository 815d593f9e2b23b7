"""The device of tests of Triton kernels: a GPU, or with Triton's interpreter (`TRITON_INTERPRET=1`) on a CPU."""

import os

import pytest
import torch

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"),
    # The interpreter computes with numpy, which warns of what is not finite.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


def _mend_interpreter():
    """Let kernels count up to a number of theirs: Triton 3.6 reads it in a way that numpy has forbidden since 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if INTERPRETED:
    _mend_interpreter()


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(autouse=True)
def strict_float32():
    """The same numbers for every test, and products as exact as the plain functions they are held against."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(before)

"""Copies and sums backwards in time in C against the plain functions."""

import pytest
import torch

from canter.engines.native import AVAILABLE
from canter.functional.returns import trace_back_
from canter.struct import copy_all_

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 5), (130, 1), (17, 33)])
def test_sums_backwards_are_those_of_the_plain_function(shape, dtype):
    x, decay = torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
    expected = x.clone()
    trace_back_.plain(expected, decay)
    trace_back_(x, decay)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


SOURCES = [
    torch.tensor([1.5, -2.0]),
    torch.tensor([True, False]),
    torch.tensor([[3], [4]]),
    torch.arange(6.0).reshape(3, 2).T,
]


@pytest.mark.parametrize("same", [True, False])
def test_every_tensor_arrives_whatever_its_layout_or_dtype(same):
    dtypes = [source.dtype if same else torch.float64 for source in SOURCES]
    targets = [torch.zeros(s.shape, dtype=dtype) for s, dtype in zip(SOURCES, dtypes, strict=True)]
    assert copy_all_.kernels
    copy_all_(targets, SOURCES)
    for target, source in zip(targets, SOURCES, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_a_source_of_another_size_is_refused_and_nothing_is_copied():
    targets = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="size"):
        copy_all_(targets, [torch.ones(2), torch.ones(2)])

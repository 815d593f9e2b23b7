"""Copies and sums backwards in time in C against the plain functions."""

import numpy as np
import pytest
import torch

from canter.core.struct import copy_all_, fused_writer
from canter.engines.native import AVAILABLE
from canter.functional.returns import reverse_discounted_sum_

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 5), (130, 1), (17, 33)])
def test_sums_backwards_are_those_of_the_plain_function(shape, dtype):
    x, decay = torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
    expected = x.clone()
    reverse_discounted_sum_.plain(expected, decay)
    reverse_discounted_sum_(x, decay)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


SOURCES = [
    torch.tensor([1.5, -2.0]),
    torch.tensor([True, False]),
    torch.tensor([[3], [4]]),
    torch.arange(6.0).reshape(3, 2).T,
]


@pytest.mark.parametrize("same", [True, False])
def test_tensors_of_every_layout_and_dtype_arrive(same):
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


def test_a_row_is_written_in_place_and_missing_fields_stay():
    buffers = [torch.zeros(3, 2), torch.zeros((3, 2, 2), dtype=torch.int64), torch.ones(3, 2)]
    write = fused_writer(buffers)
    first = torch.tensor([1.5, -2.0])
    assert write(1, [first, torch.tensor([[1, 2], [3, 4]])])
    first += 1.0
    assert write(2, [first, None])
    assert buffers[0].tolist() == [[0.0, 0.0], [1.5, -2.0], [2.5, -1.0]]
    assert buffers[1][1].tolist() == [[1, 2], [3, 4]] and not buffers[1][2].any() and buffers[2].all()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1),
        torch.ones(2, 1),
        torch.ones(2).double(),
        torch.ones(2, dtype=torch.int32),  # as many bytes
        torch.ones(4)[::2],
        torch.empty(0),
        np.zeros(2),
    ],
)
def test_a_row_of_another_form_is_left_to_others(value):
    buffers = [torch.zeros(3, 2), torch.zeros(3, 2)]
    write = fused_writer(buffers)
    assert write(0, [torch.ones(2), torch.ones(2)])
    assert not write(1, [torch.ones(2), value])
    assert not buffers[0][1:].any()
    assert not write(3, [torch.ones(2)]) and not write(-1, [torch.ones(2)]) and not write(0, [torch.ones(2)] * 3)


def test_a_source_that_moved_is_found_again():
    buffers, source = [torch.zeros(2, 2)], torch.ones(2)
    write = fused_writer(buffers)
    assert write(0, [source])
    source.data = torch.full((2,), 5.0)
    assert write(1, [source])
    assert buffers[0].tolist() == [[1.0, 1.0], [5.0, 5.0]]

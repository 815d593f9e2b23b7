"""Sums of rows in C, and the law of the adaptive rate by numbers, against their plain functions."""

import math

import pytest
import torch

from canter.engines.native import AVAILABLE, compiled
from canter.functional.statistics import masked_sums, moments
from canter.nn.schedules import follow_kl_

needs_compiler = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 65, 1), (24, 33, 17), (4, 9, 3, 5)])
def test_sums_are_those_of_the_plain_function(shape, dtype):
    torch.manual_seed(sum(shape))
    x = (1000.0 + 3.0 * torch.randn(shape)).to(dtype)  # squares of the distances would be lost in float32
    axes = min(2, len(shape))
    mask = torch.rand(shape[:axes]) < 0.7
    x[~mask] = math.nan  # what does not count has no influence
    assert masked_sums.kernels[-1][0](x, mask)
    mean = masked_sums.plain(x, mask) / mask.sum().clamp(min=1)
    for centre in (None, mean):
        expected = masked_sums.plain(x, mask, centre)
        torch.testing.assert_close(masked_sums(x, mask, centre), expected, rtol=1e-12, atol=1e-12)
    assert moments(x, mask)[1].shape == shape[axes:]


@needs_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_seen_in_their_own_column_only(bad):
    x = torch.ones(6, 4)
    x[2, 1] = bad
    found = masked_sums(x, torch.ones(6, dtype=torch.bool))
    assert torch.equal(found.isfinite(), torch.tensor([True, False, True, True]))


@needs_compiler
def test_wrong_lengths_are_errors_and_never_writes_beyond_an_array():
    x, mask, sums = torch.ones(6, 4), torch.ones(6, dtype=torch.bool), torch.zeros(4, dtype=torch.float64)
    for wrong in ((x[:5], mask, sums, None), (x, mask, sums[:3], None), (x, mask, sums, sums[:3])):
        with pytest.raises(ValueError):
            compiled().column_sums(False, 4, *wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kl", [0.0, 1e-30, 0.004, 0.005, 0.006, 0.02, 0.0200001, 5.0, -1e-9, math.nan, math.inf])
@pytest.mark.parametrize("value", [1e-3, 1e-6, 1e-2])
def test_the_rate_follows_as_by_the_plain_function(value, kl, dtype):
    assert follow_kl_.kernels
    ours, plain = (torch.tensor(value) for _ in range(2))
    for law, rate in ((follow_kl_, ours), (follow_kl_.plain, plain)):
        law(rate, torch.tensor(kl, dtype=dtype), 0.01, 1.5, 1e-6, 1e-2)
    assert torch.equal(ours, plain)

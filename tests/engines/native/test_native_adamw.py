"""AdamW in C against torch's, and against the clipping of Canter's optimiser."""

import math

import pytest
import torch

from canter.engines.native import AVAILABLE
from canter.functional.optimization import AdamGroup, adam_step_

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")


NEVER = torch.tensor(False)


def group(n, dtype=torch.float32, **settings):
    """A group of `n` random numbers with a random gradient."""
    torch.manual_seed(n)
    numbers = [torch.randn(n, dtype=dtype), torch.randn(n, dtype=dtype)]
    moments = [torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype), torch.zeros(())]
    given = {"betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.1, "max_norm": 0.5} | settings
    return AdamGroup(*numbers, *moments, learning_rate=torch.tensor(3e-3), **given)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("sizes", [(1,), (7, 64), (4097, 5)])
def test_steps_are_those_of_the_plain_function(sizes, weight_decay, coupled, joint):
    ours, plain = ([group(n, weight_decay=weight_decay, coupled=coupled) for n in sizes] for _ in range(2))
    assert adam_step_.kernels
    for number in range(20):
        for mine, other in zip(ours, plain, strict=True):
            for one in (mine, other):
                generator = torch.Generator().manual_seed(number)
                one.gradient.normal_(0.0, 10.0 if number % 2 else 0.01, generator=generator)
        norm, blocked = adam_step_(ours, joint, NEVER)
        expected, _ = adam_step_.plain(plain, joint, NEVER)
        torch.testing.assert_close(norm, expected.to(norm.dtype))
        assert blocked == 0
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.flat, other.flat, rtol=1e-5, atol=1e-6)
        assert mine.step == 20


@pytest.mark.parametrize(("bad", "skip"), [(math.nan, False), (math.inf, False), (0.0, True)])
def test_a_norm_that_is_not_finite_and_a_skipped_step_leave_no_trace(bad, skip):
    groups = [group(9), group(4)]
    groups[0].gradient[4] = bad
    before = [one.flat.clone() for one in groups]
    _, blocked = adam_step_(groups, True, torch.tensor(skip))
    assert blocked == (not skip)
    for one, flat in zip(groups, before, strict=True):
        assert torch.equal(one.flat, flat) and (one.exp_avg == 0).all() and one.step == 0

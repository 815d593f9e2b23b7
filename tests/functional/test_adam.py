"""The definition of an optimiser step, which the kernels are compared with."""

import math

import pytest
import torch

from canter.functional.optimization import AdamGroup, adam_step_


def group(gradient):
    flat = torch.ones(2)
    moments = [torch.zeros(2), torch.zeros(2), torch.zeros(())]
    rate = torch.tensor(0.1)
    return AdamGroup(flat, torch.tensor(gradient), *moments, rate, (0.9, 0.99), 0.0, weight_decay=0.0, max_norm=1.0)


def test_the_first_step_is_the_learning_rate_against_the_sign_of_the_gradient():
    one = group([3.0, -4.0])
    norm, blocked = adam_step_.plain([one], True, torch.tensor(False))
    assert (norm.item(), blocked.item(), one.step.item()) == (5.0, 0.0, 1.0)
    torch.testing.assert_close(one.flat, torch.tensor([0.9, 1.1]))


@pytest.mark.parametrize(
    ("number", "skip", "blocked"), [(math.nan, False, 1.0), (math.inf, False, 1.0), (1.0, True, 0.0)]
)
def test_a_step_that_is_skipped_changes_and_counts_nothing(number, skip, blocked):
    groups = [group([3.0, -4.0]), group([number, 0.0])]
    _, reported = adam_step_.plain(groups, False, torch.tensor(skip))
    assert reported.item() == blocked
    for one in groups:
        assert one.step.item() == 0.0
        assert one.flat.tolist() == [1.0, 1.0]
        assert one.exp_avg.tolist() == [0.0, 0.0]

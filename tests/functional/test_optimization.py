"""The order of minibatches, and the definition of an optimiser step, which the kernels are compared with."""

import math

import pytest
import torch

from canter.functional.optimization import AdamGroup, adam_step_, epoch_orders


def first_minibatches(shuffle):
    """Return the first epoch `[M, B]` of 2 chunks of 4 environments: sequence `4 * chunk + environment`."""
    generator = torch.Generator().manual_seed(0)
    return next(epoch_orders(shuffle, 8, 4, generator, num_minibatches=2, blocks=2)).view(2, 4)


def test_minibatches_take_equal_parts_of_each_block_of_environments():
    # Environments 0 and 1 are one block, 2 and 3 the other.
    assert first_minibatches("none").tolist() == [[0, 4, 2, 6], [1, 5, 3, 7]]
    shuffled = first_minibatches("epoch")
    assert sorted(shuffled.flatten().tolist()) == list(range(8))
    assert (shuffled % 4 < 2).sum(1).tolist() == [2, 2]


def group(gradient):
    return AdamGroup(
        flat=torch.ones(2),
        gradient=torch.tensor(gradient),
        exp_avg=torch.zeros(2),
        exp_avg_sq=torch.zeros(2),
        step=torch.zeros(()),
        learning_rate=torch.tensor(0.1),
        betas=(0.9, 0.99),
        eps=0.0,
        weight_decay=0.0,
        max_norm=1.0,
    )


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

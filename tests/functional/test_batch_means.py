import math

import pytest
import torch

from canter.functional.statistics import BATCHES, QUANTILE, batch_means, group_sums


def test_the_quantile_is_that_of_student_t():
    from scipy.stats import t

    assert pytest.approx(t.ppf(0.975, BATCHES - 1), abs=1e-3) == QUANTILE


def test_twenty_environments_are_twenty_batches_by_hand():
    gain = torch.arange(20.0)
    mean, ci = batch_means(torch.stack([gain, torch.full((20,), 2.0)]).unsqueeze(0))
    assert mean == pytest.approx(9.5 / 2)
    # The ordinary interval of the mean of twenty averages 0, 1/2, 1, ...
    assert ci == pytest.approx(QUANTILE * (gain / 2).std().item() / math.sqrt(20))


def test_the_average_is_reward_over_time_not_a_mean_of_ratios():
    sums = torch.zeros(20, 2, 1)
    sums[:, 0] = 1.0
    sums[::2, 1], sums[1::2, 1] = 1.0, 3.0
    assert batch_means(sums)[0] == pytest.approx(0.5)


def test_a_constant_rate_has_no_uncertainty():
    duration = torch.rand((30, 1, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, ci = batch_means(torch.cat([4.0 * duration, duration], 1))
    assert mean == pytest.approx(4.0)
    assert ci == pytest.approx(0.0, abs=1e-12)


def test_fewer_than_twenty_batches_say_nothing():
    assert batch_means(torch.ones(19, 2, 1)) is None
    assert batch_means(torch.ones(10, 2, 2)) is not None
    assert batch_means(torch.zeros(20, 2, 1)) is None  # no time has passed


def test_a_batch_is_a_stretch_of_one_environment_before_it_is_another_environment():
    """Two environments that differ for ever: batches across both would hide how little is known."""
    sums = torch.ones(40, 2, 2)
    sums[:, 0, 1] = 3.0
    mean, ci = batch_means(sums)
    assert mean == 2.0
    assert ci == pytest.approx(QUANTILE * math.sqrt(20 / 19) / math.sqrt(20))


@pytest.mark.parametrize("num_envs", [1, 8, 64])
def test_intervals_of_95_percent_miss_one_time_in_twenty(num_envs):
    generator = torch.Generator().manual_seed(1)
    repeats, missed = 400, 0
    for _ in range(repeats):
        gain = torch.randn((64, 1, num_envs), generator=generator) + 1.0
        mean, ci = batch_means(torch.cat([gain, torch.ones_like(gain)], 1))
        missed += abs(mean - 1.0) > ci
    assert missed / repeats == pytest.approx(0.05, abs=0.035)  # 3 standard errors of 400 coins


def test_groups_keep_the_sums_and_are_at_most_twenty():
    sums = torch.arange(2.0 * 50).view(2, 50)
    assert group_sums(sums).shape == (2, 20)
    assert torch.equal(group_sums(sums).sum(-1), sums.sum(-1))
    assert torch.equal(group_sums(sums[:, :3]), sums[:, :3])

import numpy as np
import pytest

from canter.functional.statistics import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize(
    ("samples", "mean"),
    [
        ([7.0], 7.0),
        ([1.0, 3.0], 2.0),
        ([0.0, 5.0, 100.0], (0.25 * 0 + 5 + 0.25 * 100) / 1.5),
        ([4.0, 2.0, 1.0, 1000.0], 3.0),
        ([1.0, 2.0, 3.0, 4.0, 100.0], (0.75 * 2 + 3 + 0.75 * 4) / 2.5),
        ([8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 4.5),
    ],
)
def test_the_middle_half_counts(samples, mean):
    assert interquartile_mean(np.array(samples)) == pytest.approx(mean)


def test_it_is_the_trimmed_mean_where_quarters_are_whole_and_keeps_further_axes():
    samples = np.random.default_rng(0).standard_cauchy((12, 3, 2))
    assert interquartile_mean(samples) == pytest.approx(np.sort(samples, axis=0)[3:9].mean(axis=0))


def test_no_samples_have_no_mean():
    with pytest.raises(ValueError, match="no samples"):
        interquartile_mean(np.zeros((0, 3)))


def test_the_interval_of_two_samples_is_known():
    # Two draws from {0, 1}: the mean is 0 and 1 with probability 1/4 each, and 1/2 with probability 1/2.
    samples = np.array([0.0, 1.0])
    assert bootstrap_interval(samples, level=0.95) == (0.0, 1.0)
    assert bootstrap_interval(samples, level=0.6) == (0.0, 1.0)  # quantiles 0.2 and 0.8
    assert bootstrap_interval(samples, level=0.4) == (0.5, 0.5)


def test_the_interval_is_the_same_each_time_and_as_wide_as_theory_says():
    samples = np.random.default_rng(1).normal(3.0, 2.0, size=(200, 4))
    low, high = bootstrap_interval(samples)
    assert np.array_equal(low, bootstrap_interval(samples)[0])
    assert np.all(low < interquartile_mean(samples)) and np.all(interquartile_mean(samples) < high)
    # The 25% trimmed mean of normal samples has standard error about 1.10 sigma / sqrt(n).
    assert (high - low) / 2 == pytest.approx(1.96 * 1.10 * 2.0 / np.sqrt(200), rel=0.25)


def test_equal_samples_leave_no_doubt():
    low, high = bootstrap_interval(np.full((5, 2), 3.5))
    assert low.tolist() == high.tolist() == [3.5, 3.5]

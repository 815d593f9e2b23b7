"""Means of a few runs and their differences, against tables and against sums by hand."""

import math

import pytest

from canter.functional.statistics import (
    holm_adjusted,
    mean_interval,
    student_t_probability,
    student_t_quantile,
    welch_difference,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.30265), (4, 2.77645), (19, 2.09302), (120, 1.97993), (10_000, 1.96020)],
)
def test_quantiles_are_those_of_the_tables(degrees, quantile):
    assert student_t_quantile(0.95, degrees) == pytest.approx(quantile, abs=6e-5)
    assert student_t_probability(quantile, degrees) == pytest.approx(0.95, abs=1e-5)


def test_the_interval_of_a_mean_is_students():
    # Variance 1, n = 3, two degrees of freedom.
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), abs=1e-5)
    assert mean_interval([1.0]) is None


def test_the_difference_of_groups_of_equal_spread_by_hand():
    found = welch_difference([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])
    # Both variances are 1, so the squared error is 2/3 and the degrees of freedom are 4. For these the distribution
    # of t has a closed form.
    half = 2.776445 * math.sqrt(2 / 3)
    assert (found.difference, found.degrees_of_freedom) == pytest.approx((4.0, 4.0))
    assert (found.low, found.high) == pytest.approx((4 - half, 4 + half), abs=1e-5)
    ratio = 4 / math.sqrt(2 / 3) / math.sqrt(1 + 24 / 4)
    assert found.p_value == pytest.approx(1 - 2 * 0.375 * ratio * (1 - ratio**2 / 12), abs=1e-9)


def test_groups_may_differ_in_their_spread():
    # Variances 5/3 and 20/3 of four each: squared error 25/12, degrees of freedom 75/17.
    found = welch_difference([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])
    assert found.difference == 2.5
    assert found.degrees_of_freedom == pytest.approx(75 / 17)
    assert found.p_value == pytest.approx(1 - student_t_probability(math.sqrt(3), 75 / 17))
    constant = welch_difference([1.0, 1.0], [2.0, 3.0, 4.0])
    assert constant.degrees_of_freedom == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("a", "b"), [([1.0], [2.0, 3.0]), ([], [1.0]), ([1.0, 1.0], [2.0, 2.0]), ([1e300, -1e300], [0.0, 1.0])]
)
def test_without_spread_nothing_is_claimed(a, b):
    assert welch_difference(a, b) is None


def test_p_values_are_adjusted_for_the_number_of_tests():
    assert holm_adjusted([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm_adjusted([0.6, 0.9]) == [1.0, 1.0]
    assert holm_adjusted([]) == []

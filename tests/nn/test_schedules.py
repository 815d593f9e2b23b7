import math

import pytest
import torch

from canter.nn.schedules import AdaptiveKL, Constant, Linear, StepAt


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def test_linear_is_a_function_of_absolute_progress_and_ends_where_stated():
    schedule, value = Linear(1.0, 0.2), scalar(1.0)
    for progress, expected in [(0.0, 1.0), (0.5, 0.6), (1.0, 0.2), (1.7, 0.2), (0.25, 0.8)]:
        schedule.set_(value, scalar(progress))
        assert value.item() == pytest.approx(expected)


def test_a_constant_is_set_again_when_a_run_is_resumed_with_another_one():
    loaded = scalar(1e-3)
    Constant(1e-4).set_(loaded, scalar(0.5))
    assert loaded.item() == 1e-4


def test_a_step_changes_at_its_share_of_the_run():
    schedule = StepAt(1.0, 0.1, at=0.5)
    value = scalar(1.0)
    for progress, expected in [(0.0, 1.0), (0.49, 1.0), (0.5, 0.1), (1.0, 0.1)]:
        schedule.set_(value, scalar(progress))
        assert value.item() == pytest.approx(expected)


def test_adaptive_kl_follows_its_law_exactly():
    schedule, value = AdaptiveKL(1e-3, target_kl=0.01, factor=1.5), scalar(1e-3)
    seen = []
    # above twice the target, within, below half, exactly at both edges (no change), 0 (nothing has moved yet)
    for kl in (0.021, 0.01, 0.004, 0.02, 0.005, 0.0):
        schedule.observe_(value, scalar(kl), "epoch")
        seen.append(value.item())
    lower = 1e-3 / 1.5
    assert seen == pytest.approx([lower, lower, 1e-3, 1e-3, 1e-3, 1e-3])


def test_adaptive_kl_never_leaves_its_bounds():
    schedule, value = AdaptiveKL(1e-3, minimum=5e-4, maximum=2e-3), scalar(1e-3)
    for kl, bound in ((1.0, 5e-4), (0.001, 2e-3)):
        for _ in range(20):
            schedule.observe_(value, scalar(kl), "epoch")
        assert value.item() == pytest.approx(bound)


def test_a_learning_rate_that_fell_very_low_comes_back():
    """Steps of such a size move a policy by next to nothing, which must count as too near and not as no step at all."""
    schedule, value = AdaptiveKL(1e-3, target_kl=0.01), scalar(1e-6)
    for _ in range(20):
        # What a step moves grows with the square of its size; at 1e-6 it was seen to be 1e-9 after a few minibatches.
        schedule.observe_(value, scalar(1e-9 * (value.item() / 1e-6) ** 2), "epoch")
    assert value.item() > 1e-3


def test_a_kl_that_is_not_a_number_lowers_the_learning_rate():
    schedule, value = AdaptiveKL(1e-3), scalar(1e-3)
    for kl in (math.nan, math.inf):
        before = value.item()
        schedule.observe_(value, scalar(kl), "epoch")
        assert value.item() < before


@pytest.mark.parametrize("every", ["minibatch", "epoch", "update"])
def test_adaptive_kl_reacts_only_to_its_own_event(every):
    for event in ("minibatch", "epoch", "update"):
        value = scalar(1e-3)
        AdaptiveKL(1e-3, every=every).observe_(value, scalar(1.0), event)
        assert (value.item() != 1e-3) == (event == every)


def test_constant_stays():
    value = scalar(0.5)
    Constant(0.5).set_(value, scalar(0.9))
    Constant(0.5).observe_(value, scalar(9.0), "epoch")
    assert value.item() == 0.5


def test_schedules_edit_the_tensor_in_place():
    value = scalar(1e-3)
    address = value.data_ptr()
    Linear(1e-3).set_(value, scalar(0.5))
    AdaptiveKL(1e-3).observe_(value, scalar(1.0), "epoch")
    assert value.data_ptr() == address


def test_a_start_outside_the_bounds_is_refused():
    with pytest.raises(ValueError, match=r"start=0.1 must lie in minimum..maximum"):
        AdaptiveKL(0.1)

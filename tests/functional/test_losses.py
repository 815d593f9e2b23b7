import math

import pytest
import torch
from torch import Tensor

from canter.functional.losses import (
    BOUND_LOSSES,
    SURROGATES,
    VALUE_LOSSES,
    clipped_mse,
    clipped_surrogate,
    huber,
    mse,
    smooth_clipped_surrogate,
    vanilla_surrogate,
)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(surrogate, ratio: float, advantage: float, clip_ratio: float = 0.2) -> tuple[float, float]:
    """Gradient of the loss by the log-probability: by autograd and by central differences."""
    log_prob = torch.log(f64(ratio)).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return surrogate(x, f64(0.0), f64(advantage), clip_ratio)

    (gradient,) = torch.autograd.grad(loss(log_prob).sum(), log_prob)
    step = 1e-6
    difference = (loss(log_prob + step) - loss(log_prob - step)) / (2 * step)
    return gradient.item(), difference.item()


# The clip acts only where it would take away what was gained: A > 0 above it, A < 0 below it.


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 2.0), (0.5, -2.0), (1.2001, 1.0), (0.7999, -1.0)])
def test_clipped_surrogate_stops_past_the_clip_in_the_profitable_direction(ratio, advantage):
    gradient, difference = slope(clipped_surrogate, ratio, advantage)
    assert gradient == 0.0
    assert difference == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage"), [(0.5, 2.0), (1.5, -2.0), (1.0, 2.0), (1.0, -2.0), (1.1, 2.0), (0.9, -2.0)]
)
def test_clipped_surrogate_keeps_the_full_gradient_everywhere_else(ratio, advantage):
    gradient, difference = slope(clipped_surrogate, ratio, advantage)
    assert gradient == pytest.approx(-advantage * ratio, rel=1e-12)
    assert difference == pytest.approx(gradient, rel=1e-7)


def test_clipped_surrogate_values_by_hand():
    ratio, advantage = f64(1.5, 0.5, 1.5, 0.5, 1.1), f64(1, 1, -1, -1, 3)
    loss = clipped_surrogate(ratio.log(), torch.zeros(5).double(), advantage, 0.2)
    torch.testing.assert_close(loss, f64(-1.2, -0.5, 1.5, 0.8, -3.3))


@pytest.mark.parametrize("ratio", [0.3, 0.8, 1.0, 1.05, 1.2, 2.5])
def test_smooth_clip_is_the_sigmoid_clamp(ratio):
    low, high = 0.8, 1.2
    expected = low + (high - low) / (1 + math.exp(-4 * ((ratio - low) / (high - low) - 0.5)))
    for advantage in (1.0, -1.0):
        loss = smooth_clipped_surrogate(f64(math.log(ratio)), f64(0.0), f64(advantage), 0.2)
        assert loss.item() == pytest.approx(max(-advantage * ratio, -advantage * expected), rel=1e-12)


def test_smooth_clip_starts_like_the_plain_gradient_and_fades_without_stopping():
    gradients = [slope(smooth_clipped_surrogate, ratio, 1.0)[0] for ratio in (1.0, 1.1, 1.2, 1.4, 2.0)]
    assert gradients[0] == pytest.approx(-1.0)
    assert all(gradient < 0 for gradient in gradients)
    # d/dlogr of tanh((r - 1) / c) c is r / cosh((r - 1) / c)**2
    assert gradients[3] == pytest.approx(-1.4 / math.cosh(2.0) ** 2)


def test_smooth_clip_never_leaves_the_clip_range():
    ratio = torch.linspace(0.01, 5.0, 500, dtype=torch.float64)
    gain = -smooth_clipped_surrogate(ratio.log(), torch.zeros_like(ratio), torch.ones_like(ratio), 0.2)
    cost = smooth_clipped_surrogate(ratio.log(), torch.zeros_like(ratio), -torch.ones_like(ratio), 0.2)
    assert gain.max() <= 1.2 and cost.min() >= 0.8
    assert (gain.diff() >= 0).all()


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 2.0), (0.5, 2.0), (1.5, -2.0), (0.5, -2.0)])
@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_surrogate_gradients_match_finite_differences(name, ratio, advantage):
    gradient, difference = slope(SURROGATES[name], ratio, advantage)
    assert difference == pytest.approx(gradient, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_surrogates_share_the_policy_gradient_at_the_old_policy(name):
    assert slope(SURROGATES[name], 1.0, 3.0)[0] == pytest.approx(-3.0)


def test_vanilla_surrogate_is_minus_advantage_times_log_prob():
    log_prob = f64(-1.0, -2.0)
    assert torch.equal(vanilla_surrogate(log_prob, f64(9, 9), f64(3, -1), 0.2), f64(3, -2))


def test_mse_is_half_the_squared_error():
    assert torch.equal(mse(f64(1, 4), f64(0, 0), f64(3, 3), 0.2), f64(2.0, 0.5))


def test_clipped_mse_is_the_larger_of_both_errors():
    # Old value 0, clip 1. Target 4: value 3 counts as 1, error 3 beats 1. Target -1: value 3 has error 4, beats 2.
    # Value 0.5 is within the clip: plain error.
    loss = clipped_mse(f64(3, 3, 0.5), f64(0, 0, 0), f64(4, -1, 2), 1.0)
    torch.testing.assert_close(loss, f64(4.5, 8.0, 1.125))


def test_clipped_mse_gradient_stops_only_when_moving_on_would_help():
    value = f64(3, 3, 0.5).requires_grad_()
    clipped_mse(value, f64(0, 0, 0), f64(4, -1, 2), 1.0).sum().backward()
    torch.testing.assert_close(value.grad, f64(0, 4, -1.5))


def test_huber_is_quadratic_up_to_one_and_linear_beyond():
    error = f64(0, 0.5, 1, 3, -3)
    loss = huber(error + 10, f64(0, 0, 0, 0, 0), torch.full_like(error, 10), 0.2)
    torch.testing.assert_close(loss, f64(0, 0.125, 0.5, 2.5, 2.5))


def test_value_losses_agree_near_the_target():
    value, old = f64(1.0), f64(1.1)
    losses = [loss(value, old, f64(1.3), 0.5).item() for loss in VALUE_LOSSES.values()]
    assert losses == pytest.approx([0.045, 0.045, 0.045])


def test_bound_losses_by_hand():
    mean = torch.stack([f64(1.6, -1.3, 0.4), f64(1.1, -1.1, 0.0)])
    torch.testing.assert_close(BOUND_LOSSES["soft"](mean, 1.1), f64(0.25 + 0.04, 0.0))
    torch.testing.assert_close(BOUND_LOSSES["regularisation"](mean, 1.1), f64(2.56 + 1.69 + 0.16, 2.42))


def test_the_soft_bound_pulls_back_and_has_no_gradient_inside():
    mean = f64(2.0, -2.0, 1.0, -1.0).requires_grad_()
    (slope,) = torch.autograd.grad(BOUND_LOSSES["soft"](mean, 1.1), mean)
    torch.testing.assert_close(slope, f64(1.8, -1.8, 0.0, 0.0))

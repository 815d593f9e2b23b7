import math

import pytest
import torch

from canter.functional.returns import SQUASHES, TIME_SCALES, affine, discounted_return, symlog


def rows(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)


def test_the_shift_comes_before_the_scale():
    assert affine(rows(1, -3), shift=2.0, scale=10.0).flatten().tolist() == [30.0, -10.0]


def test_symlog_is_the_logarithm_on_both_sides_and_the_identity_near_zero():
    assert symlog(rows(0.0)).item() == 0.0
    assert symlog(rows(math.e - 1, 1 - math.e, 1e6, -1e6)).flatten().tolist() == pytest.approx(
        [1.0, -1.0, math.log(1e6 + 1), -math.log(1e6 + 1)]
    )
    x = rows(0.0).requires_grad_()
    # sign(0) is 0: the slope there is 1 only in the limit.
    assert (symlog(x + 1e-9) / 1e-9).item() == pytest.approx(1.0)


def test_squashes_and_time_scales_by_hand():
    assert SQUASHES["log"](rows(1.0, math.e)).flatten().tolist() == pytest.approx([0.0, 1.0])
    assert torch.equal(SQUASHES["none"](rows(1, 2)), rows(1, 2))
    reward, duration = rows(6, 8), rows(2, 0.5)
    assert torch.equal(TIME_SCALES["none"](reward, duration), reward)
    assert torch.equal(TIME_SCALES["multiply"](reward, duration), rows(12, 4))
    assert torch.equal(TIME_SCALES["divide"](reward, duration), rows(3, 16))


def test_discounted_return_restarts_with_every_episode_and_continues_over_rollouts():
    never = flags(0, 0, 0, 0)
    returns, after = discounted_return(rows(1, 1, 1, 1), flags(0, 1, 0, 0), ~never, torch.zeros(1).double(), 0.5)
    assert torch.equal(returns, rows(1, 1.5, 1, 1.5))
    assert after.tolist() == [1.5]
    returns, after = discounted_return(rows(2, 0), flags(0, 1), ~flags(0, 0), after, 0.5)
    assert torch.equal(returns, rows(2.75, 1.375))
    assert after.tolist() == [0.0]


def test_discounted_return_skips_invalid_steps():
    reward, valid = rows(4, float("nan"), 4), flags(1, 0, 1)
    returns, _ = discounted_return(reward, flags(0, 0, 0), valid, torch.zeros(1).double(), 0.5)
    assert returns[[0, 2]].flatten().tolist() == [4.0, 6.0]


def test_discounted_return_takes_a_discount_for_each_row():
    gamma = rows(0.5, 0.25, 1.0)
    returns, _ = discounted_return(
        rows(8, 0, 0), flags(0, 0, 0), ~flags(0, 0, 0), torch.full((1,), 4.0).double(), gamma
    )
    assert torch.equal(returns, rows(10, 2.5, 2.5))


def test_the_spread_of_periodic_rewards_has_its_closed_form():
    """Rewards 1, 0, 1, 0, ... for ever: G alternates between 1 / (1 - g^2) and g / (1 - g^2)."""
    gamma, steps = 0.9, 2000
    reward = rows(*([1.0, 0.0] * (steps // 2)))
    never = torch.zeros_like(reward, dtype=torch.bool)
    returns, _ = discounted_return(reward, never, ~never, torch.zeros(1).double(), gamma)
    expected = 0.5 * (1 - gamma) / (1 - gamma**2)
    assert returns[steps // 2 :].std(correction=0).item() == pytest.approx(expected)

import math

import pytest
import torch

from canter.nn.heads import BoundedLogStd, GaussianHead, LinearHead, StdConfig, ValueHead


@pytest.mark.parametrize("kind", ["parameter", "network"])
def test_a_gaussian_starts_at_its_initial_std(kind):
    head = GaussianHead(4, 3, StdConfig(kind=kind, initial=0.3), "orthogonal", 0.01)
    params = head(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), None)
    assert params.shape == (5, 6)
    assert torch.allclose(params[:, 3:].exp(), torch.tensor(0.3), atol=0.01 if kind == "network" else 1e-5)


def test_log_std_stays_within_bounds_and_keeps_a_gradient_at_both():
    bound = BoundedLogStd(StdConfig(minimum=0.01, maximum=10.0))
    raw = torch.tensor([-1e3, -50.0, 0.0, 50.0, 1e3], requires_grad=True)
    log_std = bound(raw)
    assert (log_std.exp() >= 0.01 * (1 - 1e-6)).all()
    assert (log_std.exp() <= 10.0 * (1 + 1e-6)).all()
    (slope,) = torch.autograd.grad(log_std.sum(), raw)
    assert (slope > 0).all()


@pytest.mark.parametrize("direction", [-1.0, 1.0])
def test_a_std_driven_to_its_bound_for_long_comes_back(direction):
    bound = BoundedLogStd(StdConfig())
    raw = torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([raw], lr=1e-2)

    def push(sign, steps):
        for _ in range(steps):
            adam.zero_grad()
            (-sign * bound(raw)).sum().backward()
            adam.step()
        return bound(raw).exp().item()

    extreme = push(direction, 10_000)
    assert 0.01 < extreme < 10.0
    assert extreme < 0.02 or extreme > 5.0
    back = push(-direction, 12_000)
    assert math.log(back / extreme) * -direction > 1.0


def test_std_bounds_that_do_not_hold_the_initial_value_are_refused():
    with pytest.raises(ValueError, match=r"initial=0\.001"):
        StdConfig(initial=0.001)


def test_forbidden_choices_get_no_probability():
    head = LinearHead(4, 3, "orthogonal", 1.0)
    mask = torch.tensor([[True, False, True]])
    probabilities = torch.softmax(head(torch.ones(1, 4), mask), -1).detach()
    assert probabilities[0, 1] == 0
    assert probabilities.sum() == pytest.approx(1.0)


def test_moving_value_statistics_moves_no_prediction():
    generator = torch.Generator().manual_seed(0)
    head = ValueHead(8, "orthogonal", 1.0, normalize=True)
    features = torch.randn(50, 8, generator=generator)
    for scale in (3.0, 500.0, 40.0):
        before = head.normalizer.inverse(head(features)).detach()
        head.update_statistics(torch.randn(200, generator=generator) * scale + 7 * scale, torch.ones(200) > 0)
        after = head.normalizer.inverse(head(features)).detach()
        assert (after - before).abs().max() <= 1e-5 * after.abs().max().clamp(min=scale)


def test_value_head_without_normalisation_ignores_statistics():
    head = ValueHead(8, "orthogonal", 1.0, normalize=False)
    weight = head.linear.weight.clone()
    head.update_statistics(torch.arange(10.0), torch.ones(10) > 0)
    assert torch.equal(head.linear.weight, weight)

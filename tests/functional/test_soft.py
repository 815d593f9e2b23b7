"""Losses of SAC against definitions in float64 that share nothing with them."""

import math

import numpy as np
import pytest
import torch

from canter.functional.losses import (
    cross_entropy,
    entropy_of_std,
    least_mean_distribution,
    policy_loss,
    project_distribution,
    soft_target,
    squashed_sample,
    temperature_loss,
)

CASES = 10_000


@pytest.mark.parametrize("atoms", [2, 5, 101])
@pytest.mark.parametrize(("low", "high"), [(-5.0, 5.0), (-3.0, 7.5)])
def test_projection_shares_each_atom_among_its_neighbours(atoms, low, high):
    rng, cases = np.random.default_rng(0), 300
    grid, width = np.linspace(low, high, atoms), (high - low) / (atoms - 1)
    probs = rng.dirichlet(np.ones(atoms), cases)
    # gamma^k and rewards as they come: also 0 (terminated), exactly on an atom, and beyond both ends.
    discount = rng.choice([0.0, 1.0, 0.99, 0.5], (cases, 1))
    reward = rng.choice([0.0, width, -2 * width, 1.37, -20.0, 20.0], (cases, 1)) * rng.choice([1.0, rng.random()])
    places = reward + discount * grid
    expected = np.zeros_like(probs)
    for row in range(cases):  # hat functions: 1 at an atom, 0 at its neighbours
        for place, p in zip(np.clip(places[row], low, high), probs[row], strict=True):
            expected[row] += p * np.clip(1 - np.abs(place - grid) / width, 0, None)
    found = project_distribution(torch.tensor(probs), torch.tensor(places), low, high).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    inside = (places >= low).all(1) & (places <= high).all(1)
    assert inside.any()
    means = (probs * places).sum(1)
    np.testing.assert_allclose((found * grid).sum(1)[inside], means[inside], atol=1e-11)  # what is exact about it
    rounded = project_distribution(torch.tensor(probs).float(), torch.tensor(places).float(), low, high)
    np.testing.assert_allclose(rounded.numpy(), expected, atol=2e-4)  # float32 places times atoms


def test_density_of_a_squashed_sample_is_that_of_the_change_of_variables():
    rng = np.random.default_rng(1)
    mean, log_std = rng.normal(0, 2, (CASES, 3)), rng.uniform(-5, 2, (CASES, 3))
    noise = rng.normal(size=(CASES, 3))
    action, log_prob = squashed_sample(torch.tensor(np.concatenate([mean, log_std], 1)), torch.tensor(noise))
    raw = mean + np.exp(log_std) * noise
    np.testing.assert_allclose(action.numpy(), np.tanh(raw), atol=1e-14)
    # 1 - tanh^2 = 1 / cosh^2; log cosh without overflow.
    log_slope = -2 * (np.abs(raw) + np.log1p(np.exp(-2 * np.abs(raw))) - np.log(2))
    log_density = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    expected = (log_density - log_slope).sum(1)
    # torch's softplus is the identity above 20, which leaves out exp(-20) = 2e-9 for each component.
    np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-11, atol=3 * 2 * 2.1e-9)


def test_gradient_of_the_density_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(20, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: squashed_sample(p, noise), params)


def test_losses_and_targets_are_their_formulas():
    rng = np.random.default_rng(2)
    reward, value, log_prob = rng.normal(size=(3, CASES)) * 10
    discount = rng.choice([0.0, 0.99, 0.99**3], CASES)
    temperature = rng.uniform(1e-4, 3)

    def t(numbers, **options):
        return torch.tensor(numbers, dtype=torch.float64, **options)

    found = soft_target(t(reward), t(discount), t(value), t(temperature), t(log_prob))
    expected = [r + d * (v - temperature * lp) for r, d, v, lp in zip(reward, discount, value, log_prob, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    expected = [temperature * lp - v for lp, v in zip(log_prob, value, strict=True)]
    np.testing.assert_allclose(policy_loss(t(temperature), t(log_prob), t(value)), expected, rtol=1e-12, atol=1e-12)
    log_temperature = t(math.log(temperature), requires_grad=True)
    loss = temperature_loss(log_temperature, t(log_prob), -3.0)
    np.testing.assert_allclose(loss.detach(), [-math.log(temperature) * (lp - 3.0) for lp in log_prob], rtol=1e-12)
    (slope,) = torch.autograd.grad(loss.mean(), log_temperature)
    assert slope.item() == pytest.approx(-(log_prob.mean() - 3.0))
    assert (slope < 0) == (-log_prob.mean() < -3.0)  # too little entropy: the temperature rises


def test_too_little_entropy_raises_the_temperature_and_no_gradient_reaches_the_policy():
    log_prob = torch.tensor([4.0, 6.0], requires_grad=True)
    log_temperature = torch.zeros(1, requires_grad=True)
    loss = temperature_loss(log_temperature, log_prob, -2.0).mean()
    slopes = torch.autograd.grad(loss, [log_temperature, log_prob], allow_unused=True)
    assert slopes[0].item() == -3.0 and slopes[1] is None


def test_entropy_of_a_std_is_that_of_a_normal_distribution():
    for std in (0.05, 0.15, 1.0):
        assert entropy_of_std(std, 4) == pytest.approx(2 * np.log(2 * np.pi * np.e * std**2), rel=1e-12)
    assert entropy_of_std(0.15, 1) == pytest.approx(-0.478, abs=5e-4)


def test_cross_entropy_and_the_lowest_distribution_by_loops():
    rng = np.random.default_rng(3)
    logits, target = rng.normal(size=(2, 200, 7)), rng.dirichlet(np.ones(7), 200)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [[-(target[b] * np.log(probs[e, b])).sum() for b in range(200)] for e in range(2)]
    np.testing.assert_allclose(cross_entropy(torch.tensor(logits), torch.tensor(target)), expected, rtol=1e-12)
    support = np.linspace(-2, 3, 7)
    chosen = least_mean_distribution(torch.tensor(probs), torch.tensor(support)).numpy()
    for b in range(200):
        means = [(probs[e, b] * support).sum() for e in range(2)]
        np.testing.assert_array_equal(chosen[b], probs[int(np.argmin(means)), b])

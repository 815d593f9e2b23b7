"""PPO's loss differentiated by hand against the plain functions and autograd, in float64."""

import numpy as np
import pytest
import torch

from canter.distributions import Categorical, DiagGaussian
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.kernels import host_losses

ROWS = 300
FAMILIES = {
    "gaussian": (DiagGaussian(3), host_losses.gaussian),
    "categorical": (Categorical(4), host_losses.categorical),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rows(distribution):
    """Old parameters, an action, its old log-probability and an advantage for each row; the network's new output."""
    old = torch.randn(ROWS, distribution.param_dim, dtype=torch.float64)
    action = distribution.sample(old)
    output = old + 0.3 * torch.randn_like(old)
    log_std = None
    if isinstance(distribution, DiagGaussian):
        output, log_std = output[:, :3].contiguous(), 0.3 * torch.randn(3, dtype=torch.float64)
    return output, log_std, action, old, distribution.log_prob(old, action), torch.randn(ROWS, dtype=torch.float64)


def arrays(*tensors):
    return [None if tensor is None else tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("name", FAMILIES)
def test_terms_sums_and_gradients_of_the_policy_are_those_of_autograd(name):
    distribution, family = FAMILIES[name]
    output, log_std, action, old, old_log_prob, advantage = rows(distribution)
    terms = family(*arrays(output, log_std, action, old))
    sums, *ours = host_losses.policy_loss(
        terms, *arrays(old_log_prob, advantage), 0.01, clip_ratio=0.2, entropy_coef=0.013
    )
    wanted = [tensor.requires_grad_() for tensor in (output, log_std) if tensor is not None]
    params = torch.cat([tensor.expand(ROWS, -1) for tensor in wanted], -1)
    log_prob, entropy = distribution.log_prob(params, action), distribution.entropy(params)
    surrogate = SURROGATES["clipped"](log_prob, old_log_prob, advantage, 0.2)
    clipped = (torch.exp(log_prob - old_log_prob) - 1).abs() > 0.2
    assert 0 < clipped.sum() < ROWS
    exact = [term.sum().item() for term in (surrogate, entropy, distribution.kl(old, params), clipped)]
    np.testing.assert_allclose(sums, exact, rtol=1e-10)
    gradients = torch.autograd.grad(0.01 * (surrogate.sum() - 0.013 * entropy.sum()), wanted)
    for mine, gradient in zip((one for one in ours if one is not None), gradients, strict=True):
        np.testing.assert_allclose(mine, gradient.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_sum_and_gradient_of_the_value_loss_are_those_of_autograd(clip):
    value, old, target = torch.randn(3, ROWS, dtype=torch.float64)
    value = old + 0.3 * value
    error, ours = host_losses.value_loss(*arrays(value, old, target), 0.7, clip)
    kind = "mse" if clip is None else "clipped"
    exact = VALUE_LOSSES[kind](value.requires_grad_(), old, target, clip or 0.0).sum()
    np.testing.assert_allclose(error, exact.item(), rtol=1e-12)
    np.testing.assert_allclose(ours, torch.autograd.grad(0.7 * exact, value)[0].numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_stays_float32(name):
    """A number of NumPy's own type would turn all that follows into float64, at twice the time."""
    distribution, family = FAMILIES[name]
    output, log_std, action, *others = rows(distribution)
    action = action.float() if action.is_floating_point() else action
    old, old_log_prob, advantage = (tensor.float() for tensor in others)
    terms = family(*arrays(output.float(), None if log_std is None else log_std.float(), action, old))
    results = host_losses.policy_loss(terms, *arrays(old_log_prob, advantage), 0.01, clip_ratio=0.2, entropy_coef=0.01)
    assert {one.dtype for one in results[1:] if one is not None} == {np.dtype(np.float32)}
    _, d_value = host_losses.value_loss(*arrays(advantage, advantage, old_log_prob), 0.7, 0.2)
    assert d_value.dtype == np.float32


@pytest.mark.parametrize("name", FAMILIES)
def test_no_rows_give_zeros(name):
    distribution, family = FAMILIES[name]
    output, log_std, *others = rows(distribution)
    none = [array[:0] for array in arrays(output, *others)]
    terms = family(none[0], *arrays(log_std), *none[1:3])
    sums, d_output, d_log_std = host_losses.policy_loss(terms, *none[3:], 1e9, clip_ratio=0.2, entropy_coef=0.013)
    assert not any(sums) and d_output.shape == (0, output.shape[1]) and (d_log_std is None or not d_log_std.any())
    assert host_losses.value_loss(none[3], none[3], none[3], 1e9, 0.2)[0] == 0


def test_a_choice_without_probability_gets_no_gradient():
    distribution, family = FAMILIES["categorical"]
    output, _, action, old, _, advantage = rows(distribution)
    output[:, 3], old[:, 3] = -1e8, -1e8
    action = action.clamp(max=2)
    terms = family(*arrays(output, None, action, old))
    old_log_prob = distribution.log_prob(old, action)
    _, d_output, _ = host_losses.policy_loss(
        terms, *arrays(old_log_prob, advantage), 0.01, clip_ratio=0.2, entropy_coef=0.013
    )
    assert np.isfinite(d_output).all() and not d_output[:, 3].any() and d_output[:, 2].any()

"""PPO's loss differentiated by hand against the plain functions and autograd, in float64."""

import pytest
import torch

from canter.distributions import Categorical, DiagGaussian
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.stats import masked_mean
from canter.kernels import host_losses

FAMILIES = {
    "gaussian": (DiagGaussian(3), host_losses.gaussian),
    "categorical": (Categorical(4), host_losses.categorical),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rows(distribution, shape=(1, 300)):
    old = torch.randn(*shape, distribution.param_dim, dtype=torch.float64)
    action, old_value = distribution.sample(old), torch.randn(shape, dtype=torch.float64)
    return {
        "action": action,
        "old_params": old,
        "old_log_prob": distribution.log_prob(old, action),
        "advantage": torch.randn(shape, dtype=torch.float64),
        "old_value": old_value,
        "return_": old_value + torch.randn(shape, dtype=torch.float64),
        "valid": torch.rand(shape) > 0.3,
    }


def by_hand(family, params, value, batch, value_clip):
    numbers = {"clip_ratio": 0.2, "value_clip": value_clip, "value_coef": 0.7, "entropy_coef": torch.tensor(0.013)}
    return host_losses.ppo_loss(family, params, value, **batch, count=batch["valid"].sum().double(), **numbers)


def by_autograd(distribution, params, value, batch, value_clip):
    params, value = params.clone().requires_grad_(), value.clone().requires_grad_()
    log_prob = distribution.log_prob(params, batch["action"])
    kind = "mse" if value_clip is None else "clipped"
    terms = [
        SURROGATES["clipped"](log_prob, batch["old_log_prob"], batch["advantage"], 0.2),
        VALUE_LOSSES[kind](value, batch["old_value"], batch["return_"], value_clip or 0.0),
        distribution.entropy(params),
        distribution.kl(batch["old_params"], params),
        ((torch.exp(log_prob - batch["old_log_prob"]) - 1).abs() > 0.2).double(),
    ]
    means = masked_mean(torch.stack(terms), batch["valid"])
    loss = means[0] + 0.7 * means[1] - torch.tensor(0.013) * means[2]
    return loss, means, *torch.autograd.grad(loss, (params, value))


@pytest.mark.parametrize("value_clip", [None, 0.2])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_means_and_gradients_are_those_of_autograd(name, value_clip):
    distribution, family = FAMILIES[name]
    batch = rows(distribution)
    params = batch["old_params"] + 0.3 * torch.randn_like(batch["old_params"])
    value = batch["old_value"] + 0.3 * torch.randn_like(batch["old_value"])
    ours = by_hand(family, params, value, batch, value_clip)
    for mine, exact in zip(ours, by_autograd(distribution, params, value, batch, value_clip), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_row_holds_that_is_not_valid_does_not_come_through(name):
    distribution, family = FAMILIES[name]
    batch = rows(distribution)
    void = ~batch["valid"]
    params, value = batch["old_params"] + 0.1, batch["old_value"] + 0.1
    clean = by_hand(family, params, value, batch, None)
    for spoiled in (params, value, batch["advantage"], batch["return_"], batch["old_params"]):
        spoiled[void] = torch.nan
    for mine, exact in zip(by_hand(family, params, value, batch, None), clean, strict=True):
        assert torch.equal(mine, exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_counts_where_no_row_is_valid(name):
    distribution, family = FAMILIES[name]
    batch = rows(distribution) | {"valid": torch.zeros(1, 300, dtype=torch.bool)}
    assert not any(result.any() for result in by_hand(family, batch["old_params"], batch["old_value"], batch, 0.2))


def test_a_masked_choice_gets_no_gradient():
    distribution, family = FAMILIES["categorical"]
    batch = rows(distribution)
    batch["old_params"][..., 3] = -1e8
    batch["action"] = batch["action"].clamp(max=2)
    d_params = by_hand(family, batch["old_params"], batch["old_value"], batch, None)[2]
    assert torch.isfinite(d_params).all() and not d_params[..., 3].any() and d_params[..., 2].any()

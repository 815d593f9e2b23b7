"""The native engine against the definition: metrics and all gradients, over a table of descriptions."""

import copy
import random

import pytest
import torch
from native_cases import PPOLoss, build, coefs, definition, engine_of, make_batch, means_of, spoil, valid_rows

from canter.core import distributed
from canter.core.specs import TensorSpec
from canter.engines.base import BoundLossConfig
from canter.engines.native import AVAILABLE
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from covering import covering_array

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")

OPTIONS = {
    "action": ("gaussian", "one_gaussian", "tanh_gaussian", "beta", "categorical", "multi_categorical"),
    "std": ("parameter", "network"),
    "std_form": ("bounded", "log", "scalar", "softplus"),
    "activation": ("tanh", "relu", "elu", "silu", "gelu", "leaky_relu"),
    "layer_norm": (False, True),
    "layout": ("separate", "trunk", "two_groups"),
    "hidden": ((), (1,), (17,), (16, 9), (63, 65, 8)),
    "surrogate": ("clipped", "smooth_clipped", "vanilla", None),
    "value_loss": ("mse", "clipped", "huber", None),
    "bound": (None, "soft", "regularisation"),
    "bounds": ("rescale", "clip", "none"),
    "advantage": ("given", "minibatch", "minibatch_sample"),
    "masked": (False, True),
    "valid": ("all", "some", "none"),
    "rows": (1, 5, 64, 65, 200),
}
GROUPS = {"policy": TensorSpec((7,)), "critic": TensorSpec((4, 2))}


def random_case(seed):
    picker = random.Random(seed)
    case = {name: picker.choice(values) for name, values in OPTIONS.items()}
    if case["surrogate"] is None and case["value_loss"] is None:
        case["value_loss"] = "mse"
    if case["std"] == "network" and case["std_form"] == "scalar":
        case["std_form"] = "log"  # a network's output may be negative, and gradients at the least std are enormous
    case["masked"] = case["masked"] and "categorical" in case["action"]
    if case["action"] not in ("gaussian", "one_gaussian") or case["surrogate"] is None:
        case["bound"] = None
    return case


# Between them they have every two options together that a random case ever has.
CASES = [dict(row) for row in covering_array([tuple(random_case(seed).items()) for seed in range(1000)])]


def of_case(case, dtype):
    network = NetworkConfig(hidden=case["hidden"], activation=case["activation"], layer_norm=case["layer_norm"])
    settings = {"shared_trunk": case["layout"] == "trunk", "bounds": case["bounds"]}
    if case["layout"] == "two_groups":
        groups = ("critic", "policy")
        settings["critic"] = NetworkConfig(hidden=(12,), activation="elu", obs_groups=groups, normalize_obs=False)
    std = StdConfig(kind=case["std"], form=case["std_form"])
    model, gradients = build(case["action"], GROUPS, network, dtype=dtype, masked=case["masked"], std=std, **settings)
    bound = case["bound"] and BoundLossConfig(form=case["bound"], coef=0.3, limit=0.4)
    bound = bound and bound.build(model.policy.distribution, torch.device("cpu"))
    loss = PPOLoss(surrogate=case["surrogate"], value_loss=case["value_loss"], bound=bound, advantage=case["advantage"])
    return loss, model, gradients, make_batch(model, case["rows"], dtype, case["valid"])


def run(loss, model, gradients, batch, index=None, threads=1):
    engine = engine_of(model, gradients, threads, loss)
    index = torch.arange(batch.valid.shape[1]) if index is None else index
    return means_of(engine.gradients(engine.begin(batch), index, coefs(0.02, engine.dtype)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_metrics_and_gradients_in_float64(case):
    loss, model, gradients, batch = of_case(case, torch.float64)
    means = run(loss, model, gradients, spoil(batch, ~batch.valid))
    exact, wanted = definition(loss, model, batch, 0.02)
    assert set(means) == set(exact)
    for name, mean in exact.items():
        torch.testing.assert_close(means[name], mean, rtol=1e-10, atol=1e-10)
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_metrics_and_gradients_in_float32(case):
    """Held against float64: as near as autograd in float32 is, up to a factor and what a few dozen roundings of numbers
    of size 1, which is that of the terms of each sum, may add."""
    loss, model, gradients, batch = of_case(case, torch.float32)
    means = run(loss, model, gradients, batch)
    plain, plain_gradients = definition(loss, model, batch, 0.02)
    double = batch.map(lambda x: x.double() if x.is_floating_point() else x)
    exact_model = copy.deepcopy(model).double()
    exact, exact_gradients = definition(loss, exact_model, double, 0.02)
    for name, mean in exact.items():
        error = float((plain[name] - mean).abs())
        # KL and the surrogate are small differences of numbers near 1, and a ratio may lie on the clip.
        atol = 1.5 / case["rows"] if name == "policy/clip_fraction" else 1e-6 + 4.0 * error
        torch.testing.assert_close(means[name].double(), mean, rtol=2e-6, atol=atol)
    for (parameter, rounded), gradient in zip(plain_gradients.items(), exact_gradients.values(), strict=True):
        error = float((rounded - gradient).abs().max())
        atol = 4e-6 * (1.0 + float(gradient.abs().max())) + 4.0 * error
        torch.testing.assert_close(gradients[parameter].double(), gradient, rtol=0.0, atol=atol)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("hidden", [(63, 65), (128, 1)])
def test_many_samples_by_index(hidden, threads):
    network = NetworkConfig(hidden=hidden, activation="elu", layer_norm=True)
    model, gradients = build(network=network)
    loss, batch = PPOLoss(advantage="minibatch", value_loss="clipped"), make_batch(model, 5000, valid="some")
    index = torch.randperm(5000)[:4097]
    means = run(loss, model, gradients, spoil(batch, ~batch.valid), index, threads)
    exact, wanted = definition(loss, model, valid_rows(batch, index), 0.02)
    for name, mean in exact.items():
        torch.testing.assert_close(means[name], mean, rtol=1e-10, atol=1e-10)
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-10, atol=1e-10)


BAD = {
    "advantage": torch.nan,
    "return_": torch.nan,
    "value": torch.inf,
    "log_prob": -torch.inf,
    "dist_params": torch.nan,
}


@pytest.mark.parametrize("field", [*BAD, "obs", "infinite_obs", "ratio"])
@pytest.mark.parametrize("action", ["gaussian", "categorical"])
def test_nonfinite_results_are_those_of_autograd(field, action):
    model, gradients = build(action)
    batch, loss = make_batch(model, 70), PPOLoss(value_loss="clipped")
    if field == "obs":
        batch.obs["policy"][0, 3, 2] = torch.nan
    elif field == "infinite_obs":  # clipped by the normaliser
        batch.obs["policy"][0, 3, 2] = torch.inf
    elif field == "ratio":  # overflows where its gain no longer counts: 0 times infinity in autograd
        batch.log_prob[0, 3], batch.advantage[0, 3] = -1e4, 1.0
    else:
        getattr(batch, field)[0, 3] = BAD[field]
    means = run(loss, model, gradients, batch)
    exact, wanted = definition(loss, model, batch, 0.02)
    for name, mean in exact.items():
        assert torch.isfinite(means[name]) == torch.isfinite(mean), name
    for parameter, gradient in wanted.items():
        assert torch.equal(torch.isfinite(gradients[parameter]), torch.isfinite(gradient))


def test_parameters_that_the_loss_does_not_depend_on_get_zeros():
    model, gradients = build()
    run(PPOLoss(surrogate=None), model, gradients, make_batch(model, 8))
    assert all((gradients[parameter] == 0).all() for parameter in model.policy_parameters())
    assert any((gradients[parameter] != 0).any() for parameter in model.critic_parameters())


@pytest.mark.parametrize("advantage", ["given", "minibatch"])
def test_a_rank_returns_means_over_its_samples_and_shares_moments(advantage, monkeypatch):
    """Two ranks: this one, and one with the same advantages and three times as many rows, none of them seen here."""
    model, gradients = build()
    batch, loss = make_batch(model, 40, valid="some"), PPOLoss(advantage=advantage)
    alone = run(loss, model, gradients, batch)
    kept = {parameter: view.clone() for parameter, view in gradients.items()}
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "sum_", lambda tensor: tensor.mul_(4.0))
    means = run(loss, model, gradients, batch)
    for name, mean in alone.items():
        torch.testing.assert_close(means[name], mean, rtol=1e-10, atol=1e-10)
    for parameter, gradient in kept.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-10, atol=1e-10)

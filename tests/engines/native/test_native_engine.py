"""Acting, values, equal bits and who owns memory."""

import gc
import multiprocessing
import resource
import threading
from functools import partial
from typing import Any

import pytest
import torch
from native_cases import (
    ACTIONS,
    GROUPS,
    PPOLoss,
    build,
    coefs,
    definition,
    engine_of,
    make_batch,
    means_of,
    observations,
    refusal,
)

from canter.core.specs import ACTION_MASK, TensorSpec
from canter.engines.native import AVAILABLE, STD_FORMS, compiled
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")
COEFS = coefs(0.01)


@pytest.mark.parametrize("rows", [1, 4, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", ["rescale", "clip", "none"])
@pytest.mark.parametrize("action", ACTIONS)
def test_actions_are_drawn_as_the_policy_draws_them(action, bounds, dtype, rows):
    std = StdConfig(kind="network" if rows == 4 else "parameter")
    masked = "categorical" in action and bounds == "clip"
    model, gradients = build(action, dtype=dtype, bounds=bounds, masked=masked, std=std)
    spec, distribution = model.policy.spec, model.policy.distribution
    obs = observations(spec.obs, (rows,), dtype, spec.action)
    engine = engine_of(model, gradients)
    for_env, drawn, params, state = engine.act(obs, (), None, torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model.actor({n: g[None] for n, g in obs.items()}, (), None)[0][0]
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (1e-5, 2e-6)
    assert_close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    assert_close(params, exact)
    wanted = distribution.sample(params, torch.Generator().manual_seed(1))
    assert_close(drawn, wanted)
    assert_close(for_env, distribution.to_env(wanted))
    assert state == ()
    log_prob = engine.log_prob(params, drawn)
    assert_close(log_prob, distribution.log_prob(params, drawn))
    if bounds == "rescale" and action == "gaussian":
        assert (for_env[:, 0].abs() <= 2.0).all()


@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_those_of_the_critic(dtype, trunk):
    model, gradients = build(dtype=dtype, shared_trunk=trunk)
    model.critic.head.update_statistics(torch.randn(5, 6, dtype=dtype) * 3 + 1, torch.ones(5, 6, dtype=torch.bool))
    obs = observations(GROUPS, (21, 6), dtype)
    engine = engine_of(model, gradients)
    values, state = engine.values(obs, (), None)
    with torch.no_grad():
        exact = model.critic.unroll(obs, (), None)[0]
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (1.3e-6, 1e-5)  # float32: as assert_close by default
    torch.testing.assert_close(values, exact, rtol=rtol, atol=atol)
    needed = torch.rand(21, 6) < 0.3
    some, _ = engine.values(obs, (), None, needed)
    assert torch.equal(some, torch.where(needed, values, 0.0)) and state == ()
    none, _ = engine.values(obs, (), None, torch.zeros_like(needed))
    assert (none == 0).all()


@pytest.mark.parametrize("std", ["parameter", "network"])
@pytest.mark.parametrize("activation", ["tanh", "elu", "silu", "gelu"])
@pytest.mark.parametrize("action", ACTIONS)
def test_the_first_ratio_is_exactly_one(action, activation, std):
    """Rows come one by one, in other numbers and in another order than they are learned from."""
    network = NetworkConfig(hidden=(65, 33), activation=activation, layer_norm=activation == "elu")
    model, gradients = build(action, network=network, dtype=torch.float32, std=StdConfig(kind=std))
    engine = engine_of(model, gradients, threads=2)
    batch, rng = make_batch(model, 256, torch.float32), torch.Generator().manual_seed(3)
    steps = [
        engine.act({"policy": rows[0]}, (), None, rng) for rows in batch.obs["policy"].split([1, 2, 5, 120, 128], 1)
    ]
    batch.action = torch.cat([action for _, action, _, _ in steps])[None]
    batch.dist_params = torch.cat([params for _, _, params, _ in steps])[None]
    batch.log_prob = engine.log_prob(batch.dist_params, batch.action)
    batch.advantage = torch.ones_like(batch.advantage)
    means = means_of(engine.gradients(engine.begin(batch), torch.randperm(256), COEFS))
    assert means["loss/policy"] == -1.0 and means["policy/kl"] == 0.0 and means["policy/clip_fraction"] == 0.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equal_calls_return_equal_bits(threads):
    model, gradients = build(network=NetworkConfig(hidden=(96, 64)), dtype=torch.float32)
    batch, index = make_batch(model, 3000, torch.float32), torch.randperm(3000)
    found = []
    for _ in range(4):
        engine = engine_of(model, gradients, threads)
        rows = engine.begin(batch)
        for _ in range(3):
            means = means_of(engine.gradients(rows, index, COEFS))
            found.append(
                torch.cat([*(view.reshape(-1) for view in gradients.values()), torch.stack([*means.values()])])
            )
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_acting_and_values_do_not_depend_on_threads():
    model, gradients = build(network=NetworkConfig(hidden=(256, 256)), dtype=torch.float32)
    obs = observations(GROUPS, (777,), torch.float32)
    rows, found = {"policy": obs["policy"][None]}, []
    for threads in (1, 3):
        engine = engine_of(model, gradients, threads)
        *acted, _ = engine.act(obs, (), None, torch.Generator().manual_seed(0))
        found.append([*acted, engine.values(rows, (), None)[0]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_weights_and_statistics_are_seen_as_they_change():
    model, gradients = build()
    engine, obs = engine_of(model, gradients), observations(GROUPS, (6,), torch.float64)
    engine.act(obs, (), None, torch.Generator())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        model.update_statistics({"policy": obs["policy"][None]}, torch.ones(1, 6, dtype=torch.bool))
        exact = model.policy.params(obs, ())[0]
    torch.testing.assert_close(engine.act(obs, (), None, torch.Generator())[2], exact, rtol=1e-12, atol=1e-12)


def test_threads_follow_torch():
    model, gradients = build()
    engine = engine_of(model, gradients)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        engine.act(observations(GROUPS, (2,), torch.float64), (), None, torch.Generator())
        assert engine._handle_threads == threads


@pytest.mark.parametrize("kind", ["parameter", "network"])
@pytest.mark.parametrize("form", STD_FORMS)
def test_forms_of_the_std(form, kind):
    model, gradients = build(std=StdConfig(kind=kind, form=form))
    raw: Any = model.actor.head.raw_std
    with torch.no_grad():
        if kind == "parameter":
            raw.copy_(torch.tensor([0.3, -0.7, 1.5] if form == "scalar" else [0.3, 0.7, 1.5]))  # one below the least
        else:
            raw.weight.mul_(0.01)
            raw.bias.copy_(torch.tensor([0.3, 0.7, 1.5]))
    batch, engine = make_batch(model, 90), engine_of(model, gradients)
    engine.gradients(engine.begin(batch), torch.arange(90), COEFS)
    for parameter, gradient in definition(PPOLoss(), model, batch, 0.01)[1].items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-10, atol=1e-10)


def test_no_memory_grows():
    model, gradients = build(dtype=torch.float32)
    batch, obs = make_batch(model, 300, torch.float32), observations(GROUPS, (8,), torch.float32)
    engine, rng = engine_of(model, gradients, threads=2), torch.Generator()

    def work(times):
        for _ in range(times):
            rows = engine.begin(batch)
            for index in torch.randperm(300).split(60):
                engine.gradients(rows, index, COEFS)
            engine.act(obs, (), None, rng)
            engine_of(model, gradients, threads=2).act(obs, (), None, rng)

    work(50)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(400)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # kilobytes; one leaked model has 250


def test_samples_keep_their_tensors_and_their_model():
    model, gradients = build(dtype=torch.float32)
    rows = engine_of(model, gradients).begin(make_batch(model, 50, torch.float32))
    gc.collect()
    noise = [torch.full((50, 7), torch.nan) for _ in range(50)]
    means = means_of(engine_of(model, gradients).gradients(rows, torch.arange(50), COEFS))
    assert all(torch.isfinite(mean) for mean in means.values()) and len(noise) == 50


@pytest.mark.parametrize("index", [[50], [-1]])
def test_indices_out_of_range_are_refused(index):
    model, gradients = build()
    engine = engine_of(model, gradients)
    rows = engine.begin(make_batch(model, 50))
    with pytest.raises(IndexError):
        engine.gradients(rows, torch.tensor(index), COEFS)


def test_actions_that_do_not_exist_are_refused():
    model, gradients = build("categorical")
    engine, batch = engine_of(model, gradients), make_batch(model, 50)
    batch.action[0, 7] = 5
    with pytest.raises(IndexError):
        engine.gradients(engine.begin(batch), torch.arange(50), COEFS)
    with pytest.raises(IndexError):
        engine.log_prob(batch.dist_params, batch.action)


def test_wrong_shapes_and_dtypes_are_refused():
    model, gradients = build(dtype=torch.float32)
    engine, rng = engine_of(model, gradients), torch.Generator()
    with pytest.raises(ValueError, match="bytes"):
        engine.act({"policy": torch.zeros(3, 6)}, (), None, rng)
    with pytest.raises(TypeError, match="float64"):
        engine.act({"policy": torch.zeros(3, 7, dtype=torch.float64)}, (), None, rng)


def altered(fields, path, change):
    """A copy of a description with another dictionary at a path."""
    if not path:
        return change(dict(fields))
    copied = list(fields) if isinstance(fields, list) else dict(fields)
    copied[path[0]] = altered(fields[path[0]], path[1:], change)
    return copied


LAYER = ("towers", 0, "hidden", 0)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ((), lambda fields: fields | {"entropy": 1.0}, "the model has an unknown field 'entropy'"),
        ((), lambda fields: {"towers": fields["towers"], "policy": fields["policy"]}, "the model has no field 'loss'"),
        ((), lambda fields: fields | {"towers": 3}, "the model.towers is not a list"),
        ((), lambda fields: fields | {"loss": 3}, "the loss is not a dictionary"),
        (LAYER, lambda fields: fields | {"dropout": 0.1}, "a layer has an unknown field 'dropout'"),
        (LAYER, lambda fields: fields | {"activation": "selu"}, "a layer.activation has an unknown value"),
        (LAYER, lambda fields: fields | {"outputs": -1}, "a layer.outputs is out of range"),
        (LAYER, lambda fields: fields | {"bias": 3}, "a layer.bias is not a pair"),
        (LAYER, lambda fields: fields | {"bias": None}, "a layer lacks parameters"),
        (LAYER, lambda fields: fields | {"role": "value"}, "a layer has the role"),
        (LAYER, lambda fields: fields | {"outputs": 3}, "bytes"),
        (("towers", 0, "groups", 0), lambda fields: fields | {"shift": None}, "shift and inverse_scale"),
        (("towers", 0), lambda fields: fields | {"heads": []}, "do not fit the policy"),
        (("policy",), lambda fields: fields | {"std_mid": "wide"}, "the policy.std_mid is not a number"),
        (("policy",), lambda fields: fields | {"low": None}, "the policy.low is missing"),
        (("loss",), lambda fields: fields | {"surrogate": "spo"}, "the loss.surrogate has an unknown value"),
    ],
)
def test_an_error_of_a_description_names_the_field(path, change, message):
    model, gradients = build(dtype=torch.float32)
    fields = engine_of(model, gradients)._description.fields
    compiled().model(False, 1, 0, 0, fields)
    with pytest.raises(ValueError, match=message):
        compiled().model(False, 1, 0, 0, altered(fields, path, change))


@pytest.mark.parametrize(
    ("length", "change", "message"),
    [
        (1, {"cell": "rnn"}, "a recurrent layer.cell has an unknown value"),
        (1, {"dropout": 0.1}, "a recurrent layer has an unknown field 'dropout'"),
        (1, {"state_bias": None}, "a recurrent layer lacks parameters"),
        (1, {"outputs": 3}, "bytes"),
        (1, {"cell": "gru"}, "bytes"),
        (0, {}, "do not fit the length of sequences"),
    ],
)
def test_an_error_of_a_recurrent_layer_names_the_field(length, change, message):
    network = NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6))
    model, gradients = build(network=network, dtype=torch.float32)
    fields = engine_of(model, gradients)._description.fields
    compiled().model(False, 1, 0, 1, fields)
    with pytest.raises(ValueError, match=message):
        compiled().model(False, 1, 0, length, altered(fields, LAYER, lambda layer: layer | change))


def test_observations_need_not_be_contiguous():
    model, gradients = build(dtype=torch.float32)
    engine, wide = engine_of(model, gradients), torch.randn(9, 14)
    a = engine.act({"policy": wide[:, ::2]}, (), None, torch.Generator().manual_seed(0))
    b = engine.act({"policy": wide[:, ::2].contiguous()}, (), None, torch.Generator().manual_seed(0))
    assert torch.equal(a[0], b[0])


def _in_a_child(engine, rows, results):
    results.put(float(engine.gradients(rows, torch.arange(3000), COEFS).metrics["loss/policy"]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_its_own_threads():
    model, gradients = build(network=NetworkConfig(hidden=(96, 64)), dtype=torch.float32)
    engine = engine_of(model, gradients, threads=2)
    rows = engine.begin(make_batch(model, 3000, torch.float32))
    wanted = float(engine.gradients(rows, torch.arange(3000), COEFS).metrics["loss/policy"])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_a_child, args=(engine, rows, results))
    child.start()
    assert results.get(timeout=60) == wanted
    child.join()


def test_several_python_threads_with_engines_of_their_own():
    model, _ = build(network=NetworkConfig(hidden=(96, 64)), dtype=torch.float32)
    batch, found = make_batch(model, 3000, torch.float32), []

    def work():
        own = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        engine = engine_of(model, own, threads=2)
        rows = engine.begin(batch)
        for _ in range(5):
            engine.gradients(rows, torch.arange(3000), COEFS)
        found.append(torch.cat([view.reshape(-1) for view in own.values()]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.equal(found[0], other) for other in found)


def test_a_mask_is_needed_where_the_model_has_one():
    model, gradients = build("categorical", masked=True)
    assert ACTION_MASK in model.policy.spec.obs and refusal(PPOLoss(), model) is None
    with pytest.raises(KeyError):
        engine_of(model, gradients).act({"policy": torch.zeros(2, 7, dtype=torch.float64)}, (), None, torch.Generator())


def test_groups_of_several_axes_are_read_flat():
    groups = {"policy": TensorSpec((5, 2))}
    model, gradients = build(groups=groups)
    obs = observations(groups, (4,), torch.float64)
    with torch.no_grad():
        exact = model.policy.params(obs, ())[0]
    params = engine_of(model, gradients).act(obs, (), None, torch.Generator())[2]
    torch.testing.assert_close(params, exact, rtol=1e-12, atol=1e-12)

"""The native engine with LSTM and GRU networks: gradients, values and acting against the definition, and equal bits."""

import copy
import random
from functools import partial

import pytest
import torch
from native_cases import (
    ACTIONS,
    PPOLoss,
    build,
    coefs,
    definition,
    definition_engine,
    engine_of,
    means_of,
    recurrent_batch,
    refusal,
)
from torch import nn

from canter.core import distributed
from canter.core.specs import TensorSpec
from canter.core.struct import tree_leaves, tree_map
from canter.engines.native import AVAILABLE, compiled
from canter.functional.optimization import take_sequences
from canter.nn.heads import StdConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNN, RNNConfig
from covering import covering_array

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there was no C compiler")
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
GROUPS = {"policy": TensorSpec((7,)), "critic": TensorSpec((4, 2))}
OPTIONS = {
    "cell": ("lstm", "gru"),
    "hidden": (1, 9, 33),
    "layers": (1, 2, 3),
    "position": ("before_mlp", "after_mlp"),
    "layer_norm": (False, True),
    "reset_on_end": (True, False),
    "mlp": ((), (17,), (16, 9)),
    "layout": ("separate", "trunk", "critic_alone", "policy_alone", "other_critic"),
    "action": ("gaussian", "categorical", "multi_categorical"),
    "std": ("parameter", "network"),
    "surrogate": ("clipped", "vanilla", None),
    "value_loss": ("mse", "clipped", None),
    "advantage": ("given", "minibatch"),
    "valid": ("all", "some", "none"),
    "length": (1, 2, 16),
    "sequences": (1, 6, 53),
}


def random_case(seed):
    picker = random.Random(seed)
    case = {name: picker.choice(values) for name, values in OPTIONS.items()}
    if case["surrogate"] is None and case["value_loss"] is None:
        case["value_loss"] = "mse"
    return case


# Between them they have every two options together that a random case ever has.
CASES = [dict(row) for row in covering_array([tuple(random_case(seed).items()) for seed in range(500)])]


def case_id(case):
    return "-".join(str(value) for value in case.values())


def network_of(case):
    names = ("cell", "hidden", "layers", "position", "layer_norm", "reset_on_end")
    return NetworkConfig(hidden=case["mlp"], rnn=RNNConfig(**{name: case[name] for name in names}))


def of_case(case, dtype):
    network = network_of(case)
    feedforward = NetworkConfig(hidden=case["mlp"])
    settings = {"network": network, "shared_trunk": case["layout"] == "trunk"}
    match case["layout"]:
        case "critic_alone":
            settings |= {"network": feedforward, "critic": network}
        case "policy_alone":
            settings |= {"critic": feedforward}
        case "other_critic":
            rnn = RNNConfig(cell="gru" if case["cell"] == "lstm" else "lstm", hidden=5)
            settings |= {"critic": NetworkConfig(hidden=(12,), rnn=rnn, obs_groups=("critic", "policy"))}
    std = StdConfig(kind=case["std"])
    model, gradients = build(case["action"], GROUPS, dtype=dtype, std=std, **settings)
    loss = PPOLoss(surrogate=case["surrogate"], value_loss=case["value_loss"], advantage=case["advantage"])
    return loss, model, gradients, recurrent_batch(model, case["length"], case["sequences"], dtype, case["valid"])


def spoil_invalid(batch):
    """The batch with NaN, and actions that do not exist, in invalid samples; their observations stay."""
    spoilt = copy.copy(batch)
    for name in ("action", "log_prob", "dist_params", "value", "return_", "advantage"):
        x = getattr(batch, name)
        bad = (~batch.valid).reshape(batch.valid.shape + (1,) * (x.ndim - 2))
        setattr(spoilt, name, torch.where(bad, torch.nan if x.is_floating_point() else 10**9, x))
    return spoilt


def run(loss, model, gradients, batch, index=None, threads=1):
    engine = engine_of(model, gradients, threads, loss)
    index = torch.arange(batch.valid.shape[1]) if index is None else index
    return means_of(engine.gradients(engine.begin(batch), index, coefs(0.02, engine.dtype)))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_metrics_and_gradients_in_float64(case):
    loss, model, gradients, batch = of_case(case, torch.float64)
    index = torch.randperm(case["sequences"])[: max(1, case["sequences"] - 3)]
    means = run(loss, model, gradients, spoil_invalid(batch), index, threads=2)
    exact, wanted = definition(loss, model, take_sequences(batch, index), 0.02)
    assert set(means) == set(exact)
    for name, mean in exact.items():
        assert_close(means[name], mean)
    for parameter, gradient in wanted.items():
        assert_close(gradients[parameter], gradient)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_metrics_and_gradients_in_float32(case):
    """Held against float64: as near as autograd in float32 is, up to a factor and a few dozen roundings."""
    loss, model, gradients, batch = of_case(case, torch.float32)
    means = run(loss, model, gradients, batch)
    plain, plain_gradients = definition(loss, model, batch, 0.02)
    double = batch.map(lambda x: x.double() if x.is_floating_point() else x)
    exact, exact_gradients = definition(loss, copy.deepcopy(model).double(), double, 0.02)
    rows = case["length"] * case["sequences"]
    for name, mean in exact.items():
        error = float((plain[name] - mean).abs())
        atol = 1.5 / rows if name == "policy/clip_fraction" else 1e-6 + 4.0 * error
        torch.testing.assert_close(means[name].double(), mean, rtol=2e-6, atol=atol)
    for (parameter, rounded), gradient in zip(plain_gradients.items(), exact_gradients.values(), strict=True):
        error = float((rounded - gradient).abs().max())
        atol = 4e-6 * (1.0 + float(gradient.abs().max())) + 4.0 * error
        torch.testing.assert_close(gradients[parameter].double(), gradient, rtol=0.0, atol=atol)


def two_layers(cell, **settings):
    return NetworkConfig(hidden=(16,), rnn=RNNConfig(cell=cell, hidden=17, layers=2, layer_norm=True, **settings))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_long_sequences_share_a_block_with_fewer_others(cell):
    model, gradients = build(network=NetworkConfig(hidden=(3,), rnn=RNNConfig(cell=cell, hidden=5)))
    batch = recurrent_batch(model, 600, 9)
    run(PPOLoss(), model, gradients, batch, threads=1)
    for parameter, gradient in definition(PPOLoss(), model, batch, 0.02)[1].items():
        assert_close(gradients[parameter], gradient)


@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_values_and_states_are_those_of_the_critic(cell, trunk):
    model, gradients = build(network=two_layers(cell), shared_trunk=trunk)
    model.critic.head.update_statistics(torch.randn(5, 6).double() * 3 + 1, torch.ones(5, 6, dtype=torch.bool))
    batch = recurrent_batch(model, 150, 5)  # longer than a block holds
    state = tree_map(lambda x: x[0], batch.policy_state if trunk else batch.critic_state)
    values, states = engine_of(model, gradients).values(batch.obs, state, batch.reset)
    exact, exact_states = definition_engine(model).values(batch.obs, state, batch.reset)
    assert_close(values, exact)
    for found, wanted in zip(tree_leaves(states), tree_leaves(exact_states), strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_values_of_some_samples_with_states_of_their_own(cell):
    model, gradients = build(network=two_layers(cell))
    batch = recurrent_batch(model, 1, 200)
    state = tree_map(lambda x: x[0], batch.critic_state)
    needed = torch.rand(1, 200) < 0.3
    engine = engine_of(model, gradients)
    some, states = engine.values(batch.obs, state, None, needed)
    exact, _ = definition_engine(model).values(batch.obs, state, None)
    assert_close(some, torch.where(needed, exact, 0.0))
    assert states == ()
    none, _ = engine.values(batch.obs, state, None, torch.zeros_like(needed))
    assert (none == 0).all()


@pytest.mark.parametrize("count", [1, 65, 200])
@pytest.mark.parametrize("layout", ["separate", "critic_alone"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_actions_and_states_are_those_of_the_policy(cell, layout, count):
    critic = None if layout == "separate" else two_layers(cell)
    model, gradients = build(network=two_layers(cell) if critic is None else NetworkConfig(), critic=critic)
    batch = recurrent_batch(model, 1, count)
    obs, reset = {name: x[0] for name, x in batch.obs.items()}, batch.reset[0]
    state = tree_map(lambda x: x[0], batch.policy_state)
    found = engine_of(model, gradients).act(obs, state, reset, torch.Generator().manual_seed(1))
    exact = definition_engine(model).act(obs, state, reset, torch.Generator().manual_seed(1))
    for part, wanted in zip(tree_leaves(found), tree_leaves(exact), strict=True):
        assert_close(part, wanted)


@pytest.mark.parametrize("action", ["gaussian", "categorical"])
@pytest.mark.parametrize("position", ["before_mlp", "after_mlp"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_first_ratio_is_exactly_one(cell, position, action):
    """Acting goes step by step, learning by sequences that begin with a stored state, in another order."""
    network = NetworkConfig(hidden=(33,), rnn=RNNConfig(cell=cell, hidden=23, position=position, layer_norm=True))
    model, gradients = build(action, network=network, dtype=torch.float32)
    engine, rng = engine_of(model, gradients, threads=2), torch.Generator().manual_seed(3)
    batch = recurrent_batch(model, 12, 31, torch.float32)
    state = tree_map(lambda x: x[0], batch.policy_state)
    for t in range(12):
        _, drawn, params, state = engine.act({"policy": batch.obs["policy"][t]}, state, batch.reset[t], rng)
        batch.action[t] = drawn
        batch.dist_params[t] = params
    batch.log_prob = engine.log_prob(batch.dist_params, batch.action)
    batch.advantage = torch.ones_like(batch.advantage)
    means = means_of(engine.gradients(engine.begin(batch), torch.randperm(31), coefs(0.01)))
    assert means["loss/policy"] == -1.0
    assert means["policy/kl"] == 0.0


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_acting_and_values_do_not_depend_on_threads(cell):
    network = NetworkConfig(hidden=(128,), rnn=RNNConfig(cell=cell, hidden=128))
    model, gradients = build(network=network, dtype=torch.float32)
    batch = recurrent_batch(model, 40, 90, torch.float32)
    obs, state = {"policy": batch.obs["policy"][0]}, tree_map(lambda x: x[0], batch.policy_state)
    found = []
    for threads in (1, 2, 3):
        engine = engine_of(model, gradients, threads)
        acted = engine.act(obs, state, batch.reset[0], torch.Generator().manual_seed(0))
        values = engine.values(batch.obs, tree_map(lambda x: x[0], batch.critic_state), batch.reset)
        found.append([part.clone() for part in tree_leaves((acted, values))])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_equal_calls_give_equal_bits(cell, threads):
    network = NetworkConfig(hidden=(64,), rnn=RNNConfig(cell=cell, hidden=96))
    model, gradients = build(network=network, dtype=torch.float32)
    batch, index = recurrent_batch(model, 16, 70, torch.float32), torch.randperm(70)
    found = []
    for _ in range(3):
        engine = engine_of(model, gradients, threads)
        samples = engine.begin(batch)
        for _ in range(2):
            means = means_of(engine.gradients(samples, index, coefs(0.01)))
            found.append(
                torch.cat([*(view.reshape(-1) for view in gradients.values()), torch.stack([*means.values()])])
            )
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_gradients_by_rounding_alone(threads):
    network = NetworkConfig(hidden=(64,), rnn=RNNConfig(hidden=96))
    model, gradients = build(network=network)
    batch = recurrent_batch(model, 16, 70)
    run(PPOLoss(), model, gradients, batch)
    alone = {parameter: view.clone() for parameter, view in gradients.items()}
    run(PPOLoss(), model, gradients, batch, threads=threads)
    for parameter, gradient in alone.items():
        assert_close(gradients[parameter], gradient)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_nan_in_a_state_ends_where_an_episode_begins(cell):
    model, gradients = build(network=NetworkConfig(hidden=(), rnn=RNNConfig(cell=cell, hidden=6)))
    batch = recurrent_batch(model, 6, 3)
    batch.reset[:] = False
    batch.reset[0, 1] = True
    batch.policy_state, batch.critic_state = (
        tree_map(lambda x: x.index_fill(1, torch.tensor([1]), torch.nan), state)
        for state in (batch.policy_state, batch.critic_state)
    )
    means = run(PPOLoss(), model, gradients, batch)
    assert all(torch.isfinite(mean) for mean in means.values())
    assert all(torch.isfinite(view).all() for view in gradients.values())


def test_nan_in_an_observation_reaches_gradients_and_later_steps():
    model, gradients = build(network=NetworkConfig(hidden=(), rnn=RNNConfig(hidden=6), normalize_obs=False))
    batch = recurrent_batch(model, 6, 3)
    batch.reset[:] = False
    batch.obs["policy"][2, 1, 0] = torch.nan
    means = run(PPOLoss(), model, gradients, batch)
    assert torch.isnan(means["loss/policy"])
    values, _ = engine_of(model, gradients).values(batch.obs, tree_map(lambda x: x[0], batch.critic_state), None)
    assert torch.equal(torch.isnan(values[:, 1]), torch.tensor([False, False, True, True, True, True]))


def test_a_rank_shares_moments_of_its_sequences(monkeypatch):
    model, gradients = build(network=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    batch, loss = recurrent_batch(model, 8, 10, valid="some"), PPOLoss(advantage="minibatch")
    index = torch.tensor([7, 2, 5])
    alone = run(loss, model, gradients, batch, index)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "sum_", lambda tensor: tensor.mul_(4.0))
    means = run(loss, model, gradients, batch, index)
    for name, mean in alone.items():
        assert_close(means[name], mean)


def test_states_that_were_returned_stay_as_they_are():
    model, gradients = build(network=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    engine, batch = engine_of(model, gradients), recurrent_batch(model, 2, 10)
    state = tree_map(lambda x: x[0], batch.policy_state)
    *_, first = engine.act({"policy": batch.obs["policy"][0]}, state, batch.reset[0], torch.Generator())
    kept = tree_map(torch.clone, first)
    engine.act({"policy": batch.obs["policy"][1]}, first, batch.reset[1], torch.Generator())
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first), tree_leaves(kept), strict=True))


class Doubled(nn.LSTMCell):
    def forward(self, input, hx=None):
        return super().forward(2.0 * input, hx)


class Mirrored(RNN):
    pass


def put(model, what):
    network = model.actor.network
    match what:
        case "cell":
            network.memory.cells[0] = Doubled(7, 6)
        case "bias":
            network.memory.cells[0] = nn.LSTMCell(7, 6, bias=False)
        case "rnn":
            network.memory.__class__ = Mirrored
        case "norm":
            network.memory.norm = nn.LayerNorm(6, eps=1e-3)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("cell", "model.policy.rnn.cell=Doubled"),
        ("bias", "model.policy.rnn.cell=lstm without bias"),
        ("rnn", "model.policy.rnn"),
        ("norm", "the norm LayerNorm"),
    ],
)
def test_recurrent_modules_of_users_are_refused(what, named):
    model, _ = build(network=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    assert refusal(PPOLoss(), model) is None
    put(model, what)
    assert named in refusal(PPOLoss(), model)


@pytest.mark.parametrize("action", ACTIONS)
def test_recurrent_networks_are_supported_with_every_kind_of_action(action):
    assert refusal(PPOLoss(), build(action, network=two_layers("gru"))[0]) is None


@pytest.mark.parametrize("index", [[50], [-1]])
def test_sequences_that_do_not_exist_are_refused(index):
    model, gradients = build(network=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    engine = engine_of(model, gradients)
    samples = engine.begin(recurrent_batch(model, 4, 50))
    with pytest.raises(IndexError):
        engine.gradients(samples, torch.tensor(index), coefs(0.01))


def test_states_of_another_size_are_refused():
    model, gradients = build(network=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    engine, batch = engine_of(model, gradients), recurrent_batch(model, 4, 5)
    batch.policy_state = tree_map(lambda x: x[..., :5].contiguous(), batch.policy_state)
    with pytest.raises(ValueError, match="bytes"):
        engine.begin(batch)


def test_samples_that_are_not_whole_sequences_are_refused():
    model, gradients = build(network=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    handle = engine_of(model, gradients)._model(4)
    for count, steps in ((10, 4), (10, 5), (10, 0)):
        with pytest.raises(ValueError, match="sequences"):
            compiled().samples(handle, count, steps, ())

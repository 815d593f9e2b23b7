"""Engines of Triton kernels against the one that is the definition, and which of them a GPU gets."""

import copy
from dataclasses import replace

import pytest
import torch

import canter
from canter.core import dispatch
from canter.core.specs import ACTION_MASK
from canter.core.struct import tree_map
from canter.engines.autograd import AutogradEngine
from canter.engines.base import unsupported_reason
from canter.engines.choose import choose
from canter.engines.triton.kernels import load_kernels
from canter.envs.tensor import Outcome, TensorEnv, tensor_envs
from canter.nn.rnn import RNNConfig
from canter.training.collector import Collector
from triton_device import DEVICE, INTERPRETED, NEEDS_DEVICE

pytest.importorskip("triton", reason="Triton comes with the GPU builds of torch")
pytestmark = NEEDS_DEVICE
RTX = 101_376
"""Bytes of shared memory that a block can have on the RTX cards of Ampere, Ada and Blackwell."""


class Masked(TensorEnv):
    """Five actions, of which some are forbidden by turns."""

    def __init__(self, num_envs):
        obs = {"policy": canter.TensorSpec((3,)), ACTION_MASK: canter.TensorSpec((5,), torch.bool)}
        super().__init__("test:masked", num_envs, DEVICE, obs, canter.Discrete(5), max_episode_steps=5)

    def _sample_state(self):
        return {"x": self._uniform(0.0, 4.0)}

    def _advance(self, state, action):
        return Outcome({"x": 0.7 * state["x"] + 0.3 * action}, state["x"], state["x"] > 3.9)

    def _observe(self, state):
        x = state["x"][:, None]
        return {
            "policy": torch.cat([x, x.square(), x.sin()], -1),
            ACTION_MASK: x.sin() < torch.arange(5, device=DEVICE),
        }


def learned(clipping="joint", hidden=(32, 16), envs=32, model=(), nvec=(), mask=False, rnn=None, **settings):
    """An algorithm after an update, and rows to learn from that its policy has moved away from."""
    env = tensor_envs["pendulum"](envs, DEVICE)
    if nvec:
        env = tensor_envs["null"](envs, DEVICE, obs_dim=3, nvec=nvec, max_episode_steps=5)
    if mask:
        env = Masked(envs)
    model = canter.ModelConfig(policy=canter.NetworkConfig(hidden=hidden, activation="elu", rnn=rnn), **dict(model))
    config = canter.PPOConfig(
        horizon=8, epochs=2, num_minibatches=2, model=model, gradient_clipping=clipping, **settings
    )  # fmt: skip
    algorithm = canter.PPO(config, env.spec, 0)
    algorithm.use_engine("autograd")
    collector = Collector(env, algorithm, 0)
    algorithm.update(collector.collect())
    batch, _ = algorithm.prepare_batch(collector.collect())
    with torch.no_grad():
        for parameter in algorithm.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return algorithm, batch


def gradients(engine, batch, index, coefs):
    """Metrics, and the gradients of all parameters in one vector."""
    metrics, kl = engine.gradients(engine.begin(batch), index, coefs)
    return metrics | {"policy/kl": kl}, torch.cat(
        [gradient.flatten() for gradient in engine.optimizer.gradients.values()]
    )


def compare(ours, exact, tolerance):
    (metrics, gradient), (plain, expected) = ours, exact
    assert expected.norm() > 0
    assert (gradient - expected).norm() <= tolerance * expected.norm()
    for name, value in metrics.items():
        torch.testing.assert_close(value, plain[name], rtol=tolerance, atol=1e-5)


@pytest.fixture
def all_kernels(monkeypatch):
    """With the interpreter, kernels stand for their plain functions on a CPU too."""
    load_kernels()
    if not INTERPRETED:
        return
    from canter.functional import densities, layers
    from canter.functional import optimization as order

    plain = (densities.gaussian_params, layers.linear_layers, layers.recurrent_layer, order.take_sequences)
    for function in plain:
        entered = [(lambda *args, **named: True, kernel) for _, kernel in function.kernels]
        monkeypatch.setattr(function, "kernels", entered)


def std(form):
    return {"std": canter.StdConfig(form=form, initial=0.8)}


TANH = {"distribution": "tanh_gaussian"}
SETTINGS = {
    "plain": {},
    "clipped value": {"value_loss": "clipped"},
    "a norm for each network": {"clipping": "per_network"},
    "std log": {"model": std("log")},
    "std scalar": {"model": std("scalar")},
    "soft bound": {"bound_loss": canter.BoundLossConfig(coef=0.3, limit=0.2)},
    "regularisation": {"bound_loss": canter.BoundLossConfig(form="regularisation", coef=0.3)},
    "bound in units of the action": {
        "bound_loss": canter.BoundLossConfig(coef=0.3, limit=0.1),
        "model": {"bounds": "clip"},
    },
    "shared trunk": {"model": {"shared_trunk": True}},
    "shared trunk, two norms, bound, scalar, clipped value": {
        "clipping": "per_network",
        "value_loss": "clipped",
        "bound_loss": canter.BoundLossConfig(coef=0.3, limit=0.2),
        "model": {"shared_trunk": True} | std("scalar"),
    },
    "discrete": {"nvec": (5,)},
    "multi-discrete": {"nvec": (2, 3, 4), "value_loss": "clipped"},
    "discrete, shared trunk, two norms": {"nvec": (5,), "clipping": "per_network", "model": {"shared_trunk": True}},
    "tanh": {"model": TANH},
    "tanh, shared trunk, scalar": {"model": TANH | {"shared_trunk": True} | std("scalar")},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["triton", "triton_layers"])
def test_an_engine_computes_the_gradients_of_the_definition(all_kernels, monkeypatch, name, settings):
    from canter.engines.triton.engine import LayersEngine, NetworksEngine

    algorithm, batch = learned(**settings)
    index = torch.randperm(batch.valid.shape[1], device=DEVICE)[5:170]
    loss, optimizer = algorithm.losses["policy"], algorithm.optimizers["policy"]
    engine = {"triton": NetworksEngine, "triton_layers": LayersEngine}[name](loss, algorithm.model, optimizer)
    ours = gradients(engine, batch, index, algorithm.coefs)
    with monkeypatch.context() as context:
        context.setattr(dispatch.Dispatched, "__call__", lambda self, *args, **named: self.plain(*args, **named))
        exact = gradients(AutogradEngine(loss, algorithm.model, optimizer), batch, index, algorithm.coefs)
    compare(ours, exact, 1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": "rl_games"},
        {"obs_statistics": "minibatch"},
        {"kl": "rl_games", "obs_statistics": "minibatch"},
        {"kl": "rl_games", "nvec": (5,)},
        {"kl": "rl_games", "model": TANH},
    ],
    ids=str,
)
def test_rl_games_kl_and_updated_statistics_with_the_kernels(all_kernels, monkeypatch, settings):
    """Two minibatches with rows in common: the second KL is measured from what the first one saw."""
    from canter.engines.triton.engine import LayersEngine

    algorithm, batch = learned(**settings)
    order = torch.randperm(batch.valid.shape[1], device=DEVICE)
    loss, model, optimizer = algorithm.losses["policy"], algorithm.model, algorithm.optimizers["policy"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def second(engine):
        model.load_state_dict(before)
        rows = engine.begin(batch)
        engine.gradients(rows, order[:120], algorithm.coefs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        metrics, kl = engine.gradients(rows, order[60:170], algorithm.coefs)
        return metrics | {"policy/kl": kl}, torch.cat([gradient.flatten() for gradient in optimizer.gradients.values()])

    ours = second(LayersEngine(loss, model, optimizer))
    with monkeypatch.context() as context:
        context.setattr(dispatch.Dispatched, "__call__", lambda self, *args, **named: self.plain(*args, **named))
        exact = second(AutogradEngine(loss, model, optimizer))
    assert ours[0]["policy/kl"] > 1e-4
    compare(ours, exact, 1e-4)


@pytest.mark.parametrize(("cell", "layers", "position"), [("lstm", 1, "before_mlp"), ("gru", 2, "after_mlp")])
def test_recurrent_networks_learn_as_by_the_definition_and_act_with_the_same_bits(
    all_kernels, monkeypatch, cell, layers, position
):
    from canter.engines.triton.engine import LayersEngine

    torch.set_float32_matmul_precision("high")
    rnn = RNNConfig(cell=cell, hidden=20, layers=layers, position=position)
    with dispatch.plain_functions():  # faster than the interpreter
        algorithm, batch = learned(hidden=(16,), envs=8, nvec=(5,), sequence_length=4, rnn=rnn)
    assert batch.reset[1:].any()
    loss, optimizer = algorithm.losses["policy"], algorithm.optimizers["policy"]
    index = torch.randperm(batch.valid.shape[1], device=DEVICE)[:9]
    ours = gradients(LayersEngine(loss, algorithm.model, optimizer), batch, index, algorithm.coefs)
    before = tree_map(lambda x: x[0], batch.policy_state)
    with torch.no_grad():
        whole = algorithm.model.actor(batch.obs, before, batch.reset)[0]
        for t, expected in enumerate(whole):
            obs = {name: steps[t] for name, steps in batch.obs.items()}
            params, before = algorithm.model.policy.params(obs, before, batch.reset[t])
            assert torch.equal(params, expected)
    with monkeypatch.context() as context:
        context.setattr(dispatch.Dispatched, "__call__", lambda self, *args, **named: self.plain(*args, **named))
        exact = gradients(AutogradEngine(loss, algorithm.model, optimizer), batch, index, algorithm.coefs)
    compare(ours, exact, 5e-3)


def test_too_little_shared_memory_of_a_block_is_refused(monkeypatch):
    from canter.engines.triton import engine as networks

    algorithm, _ = learned()
    loss, asked = algorithm.losses["policy"], []
    monkeypatch.setattr(networks, "shared_memory", lambda device: asked.append(device) or RTX)
    capabilities = networks.NetworksEngine.capabilities
    assert unsupported_reason(capabilities, loss, algorithm.model) == (
        "it needs 232448 bytes of shared memory a block, this GPU has 101376"
    )
    monkeypatch.setattr(networks, "shared_memory", lambda device: networks.SHARED_MEMORY)
    torch.set_float32_matmul_precision("high")
    assert unsupported_reason(capabilities, loss, algorithm.model) is None
    assert asked == [next(algorithm.model.parameters()).device]


@pytest.mark.parametrize(
    ("settings", "whole", "by_layers"),
    [
        ({"model": std("softplus")}, "model.std.form=softplus", None),
        ({"model": {"std": canter.StdConfig(kind="network", form="log")}}, "model.std.kind=network", None),
        (
            {"advantage_normalization": "minibatch", "advantage_std": "sample"},
            "advantage_normalization=minibatch",
            "advantage_normalization",
        ),
        ({"kl": "rl_games"}, "kl=rl_games", None),
        ({"obs_statistics": "minibatch"}, "obs_statistics=minibatch", None),
        ({"surrogate": "smooth_clipped"}, "smooth_clipped", "smooth_clipped"),
        ({"model": {"shared_trunk": True}, "hidden": (300, 300, 100)}, "too wide", None),
        ({"hidden": ()}, "model.policy.hidden", None),
        ({"model": {"distribution": "beta"}}, "model.distribution=beta", "model.distribution=beta"),
        ({"nvec": (200,)}, "the actions are too many", None),
        ({"nvec": (2,) * 33}, "more than 32 discrete actions", "more than 32 discrete actions"),
    ],
    ids=str,
)
def test_losses_and_models_that_the_kernels_do_not_support_are_refused(monkeypatch, settings, whole, by_layers):
    from canter.engines.triton import engine as networks

    algorithm, _ = learned(envs=2, **settings)
    monkeypatch.setattr(networks, "shared_memory", lambda device: networks.SHARED_MEMORY)
    torch.set_float32_matmul_precision("high")
    loss = algorithm.losses["policy"]
    assert whole in unsupported_reason(networks.NetworksEngine.capabilities, loss, algorithm.model)
    reason = unsupported_reason(networks.LayersEngine.capabilities, loss, algorithm.model)
    assert reason is None if by_layers is None else by_layers in reason


def test_a_shared_trunk_acts_and_values_by_the_network_that_learns(all_kernels):
    from canter.engines.triton.engine import NetworksEngine

    algorithm, batch = learned(model={"shared_trunk": True} | std("log"))
    engine = NetworksEngine(algorithm.losses["policy"], algorithm.model, algorithm.optimizers["policy"])
    obs = {name: rows[0] for name, rows in batch.obs.items()}
    _, action, params, _ = engine.act(obs, (), torch.zeros(len(action_of(batch)), dtype=torch.bool), rng())
    exact, value = algorithm.model(batch.obs, (), (), None)
    torch.testing.assert_close(params, exact[0], rtol=1e-4, atol=1e-5)
    assert action.shape == action_of(batch).shape
    found, _ = engine.values(batch.obs, (), None)
    expected = algorithm.model.critic.head.normalizer.inverse(value)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "highest"),
        ({}, "high"),
        ({"model": TANH}, "highest"),
        ({"nvec": (5,)}, "high"),
        ({"nvec": (2, 3), "model": {"shared_trunk": True}}, "highest"),
    ],
    ids=str,
)
def test_the_first_ratio_is_exactly_one_and_equal_seeds_act_alike(all_kernels, settings, precision):
    from canter.engines.triton.engine import NetworksEngine

    torch.set_float32_matmul_precision(precision)
    algorithm, batch = learned(entropy_coef=canter.Constant(0.01), **settings)
    loss = replace(algorithm.losses["policy"], clip_ratio=0.0)  # clipped is every ratio but 1
    engine = NetworksEngine(loss, algorithm.model, algorithm.optimizers["policy"])
    obs, starts = {name: rows[0] for name, rows in batch.obs.items()}, torch.zeros(batch.valid.shape[1:]).bool()
    for_env, action, params, _ = engine.act(obs, (), starts, rng())
    assert torch.equal(action, engine.act(obs, (), starts, rng())[1])
    distribution = algorithm.distribution
    torch.testing.assert_close(for_env, distribution.to_env(action))
    tolerance = 1e-4 if precision == "highest" else 1e-2
    torch.testing.assert_close(params, algorithm.model.actor(batch.obs, (), None)[0][0], rtol=tolerance, atol=tolerance)
    if settings.get("nvec"):
        assert torch.equal(action, distribution.sample(params, rng()))
    batch = replace(batch, action=action[None], dist_params=params[None])
    index = torch.randperm(batch.valid.shape[1], device=DEVICE)[:170]
    metrics, kl = engine.gradients(engine.begin(batch), index, algorithm.coefs)
    assert (kl.item(), metrics["policy/clip_fraction"].item()) == (0.0, 0.0)
    with torch.no_grad():
        algorithm.model.actor.network.hidden.weights[0].mul_(1.01)
    metrics, kl = engine.gradients(engine.begin(batch), index, algorithm.coefs)
    assert kl > 0
    assert metrics["policy/clip_fraction"] > 0.5


def test_action_masks_are_left_to_the_engine_of_layers(all_kernels, monkeypatch):
    from canter.engines.triton import engine as networks

    algorithm, batch = learned(nvec=(5,), mask=True)
    monkeypatch.setattr(networks, "shared_memory", lambda device: networks.SHARED_MEMORY)
    torch.set_float32_matmul_precision("high")
    loss, model, optimizer = algorithm.losses["policy"], algorithm.model, algorithm.optimizers["policy"]
    reason = unsupported_reason(networks.NetworksEngine.capabilities, loss, model)
    assert reason == "an action mask of torch.bool is not supported"
    assert unsupported_reason(networks.LayersEngine.capabilities, loss, model) is None
    torch.set_float32_matmul_precision("highest")
    index = torch.randperm(batch.valid.shape[1], device=DEVICE)[:170]
    ours = gradients(networks.LayersEngine(loss, model, optimizer), batch, index, algorithm.coefs)
    with monkeypatch.context() as context:
        context.setattr(dispatch.Dispatched, "__call__", lambda self, *args, **named: self.plain(*args, **named))
        exact = gradients(AutogradEngine(loss, model, optimizer), batch, index, algorithm.coefs)
    compare(ours, exact, 1e-4)


def action_of(batch):
    return batch.action[0]


def rng():
    return torch.Generator(DEVICE).manual_seed(0)


@pytest.mark.skipif(INTERPRETED, reason="engines are chosen by the device, which is a CPU to the interpreter")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_gpu_with_little_shared_memory_learns_by_layers(monkeypatch, precision):
    from canter.engines.triton import engine as networks

    torch.set_float32_matmul_precision(precision)
    monkeypatch.setattr(networks, "shared_memory", lambda device: RTX)
    algorithm, batch = learned(hidden=(256, 128, 64), envs=512)
    index = torch.randperm(batch.valid.shape[1], device=DEVICE)[:2000]
    loss, optimizer = algorithm.losses["policy"], algorithm.optimizers["policy"]
    choice = choose(loss, algorithm.model, optimizer)
    assert choice.engine.name == "triton_layers"
    assert "shared memory" in choice.unsupported["triton"]
    ours = copy.deepcopy(gradients(choice.engine, batch, index, algorithm.coefs))
    exact = gradients(choose(loss, algorithm.model, optimizer, "autograd").engine, batch, index, algorithm.coefs)
    compare(ours, exact, 1e-4 if precision == "highest" else 5e-3)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no streams")
def test_a_minibatch_is_gathered_in_one_launch_that_a_graph_can_hold():
    from canter.functional.optimization import take_sequences

    _, batch = learned()
    load_kernels()
    index = torch.randperm(batch.valid.shape[1], device=DEVICE)[:100].clone()
    take_sequences(batch, index)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        take_sequences(batch, index)
        torch.cuda.synchronize()
    assert sum(event.count for event in profile.key_averages() if "_gather" in event.key) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = take_sequences(batch, index)
    index.copy_(torch.randperm(batch.valid.shape[1], device=DEVICE)[:100])
    graph.replay()
    exact = take_sequences.plain(batch, index)
    assert torch.equal(taken.obs["policy"], exact.obs["policy"])
    assert torch.equal(taken.valid, exact.valid)
    assert torch.equal(taken.advantage, exact.advantage)

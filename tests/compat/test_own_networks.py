"""Networks that users wrote for rl_games and RSL-RL train here, and their files go back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_rl_games_runner import OBS, points, settings  # noqa: F401
from test_rsl_rl_runner import OBS as PLACE
from test_rsl_rl_runner import Robots
from test_rsl_rl_runner import settings as rsl_settings
from torch import nn

from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import Runner, model_builder
from canter.compat.rsl_rl import OnPolicyRunner
from canter.core.plain import ConfigError


class Builder:
    """A NetworkBuilder in rl_games' form."""

    def load(self, params):
        self.params = params

    def build(self, name, **kwargs):
        return Net(self.params, **kwargs)


class Net(nn.Module):
    def __init__(self, params, actions_num, input_shape, num_seqs=1, **options):
        super().__init__()
        self.cell, self.discrete, self.num_seqs = params.get("cell"), params.get("discrete"), num_seqs
        width = params["width"]
        self.first = nn.Linear(input_shape[0], width)
        if self.cell:
            self.rnn = nn.GRU(width, width, 1)
        self.mu = nn.Linear(width, actions_num)
        self.value = nn.Linear(width, 1)
        if not self.discrete:
            self.sigma = nn.Parameter(torch.zeros(actions_num))

    def is_rnn(self):
        return bool(self.cell)

    def get_default_rnn_state(self):
        return (torch.zeros(1, self.num_seqs, self.mu.in_features),)

    def forward(self, obs_dict):
        x, states = torch.tanh(self.first(obs_dict["obs"])), obs_dict.get("rnn_states")
        if self.cell:
            x, after = self.rnn(x.unsqueeze(0), states[0].contiguous())
            x, states = x[0], (after,)
        if self.discrete:
            return self.mu(x), self.value(x), states
        return self.mu(x), self.sigma, self.value(x), states


def own(tmp_path, **network):
    """Settings of a run with the user's network."""
    model_builder.register_network("own_net", Builder)
    changes: dict[str, Any] = {"network": {"name": "own_net", "width": 6, **network}}
    if network.get("discrete"):
        changes |= {"algo__name": "a2c_discrete", "model__name": "discrete_a2c"}
        changes |= {"config__env_config": {"discrete": True}}
    return settings(tmp_path, **changes)


@pytest.mark.parametrize("network", [{}, {"cell": "gru"}, {"discrete": True}])
def test_a_network_builder_trains_saves_loads_and_plays(tmp_path, points, network, caplog):  # noqa: F811
    runner = Runner()
    runner.load(own(tmp_path, **network))
    runner.run({"train": True})
    agent = runner.agent
    report = agent.imported.report.text()
    assert "params.network.name='own_net'" in report and "gradients are those of the engine autograd" in report
    assert "params.network.name=own_net: your NetworkBuilder, called as in rl_games" in caplog.text
    assert agent.is_rnn == bool(network.get("cell"))
    module = agent.algorithm.model.actor.network.module
    file = next((tmp_path / "exp" / "nn").glob("last_small_ep_2_*.pth"))
    tree = read_pickled(file)
    names = [name for name in tree["model"] if "mean_std" not in name]
    assert names == [f"a2c_network.{name}" for name, _ in module.named_parameters()], "as rl_games' file of the module"
    fresh = Builder()
    fresh.load({"width": 6, **network})
    reference = fresh.build("a2c", actions_num=module.mu.out_features, input_shape=(OBS,))
    reference.load_state_dict({name.removeprefix("a2c_network."): tree["model"][name] for name in names})
    moments = tree["optimizer"]["state"]
    assert all(bool(moments[i]["exp_avg_sq"].sum() > 0) for i in range(len(names))), "every parameter learned"
    again = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
    again.restore(str(file))
    obs = {"policy": torch.randn(8, OBS)}
    state = agent.algorithm.policy.initial_state(8)
    ours, theirs = (each.algorithm.policy.act(obs, state)[0] for each in (agent, again))
    assert torch.equal(ours, theirs)
    assert isinstance(runner.run({"play": True, "checkpoint": str(file)}), float)


def test_the_wrapped_module_computes_what_it_computes_alone(tmp_path, points):  # noqa: F811
    runner = Runner()
    runner.load(own(tmp_path, cell="gru"))
    runner.run({"train": True})
    network = runner.agent.algorithm.model.actor.network
    obs, reset = torch.randn(5, 2, OBS), torch.zeros(5, 2, dtype=torch.bool)
    reset[3, 1] = True
    features, _ = network({"policy": obs}, network.initial_state(2), reset)
    hidden = torch.zeros(1, 2, 6)
    for t in range(5):
        hidden = hidden.masked_fill(reset[t].view(1, 2, 1), 0.0)
        given = {"obs": network.normalizers[0](obs[t]), "rnn_states": (hidden,)}
        mu, sigma, value, (hidden,) = network.module(given)
        expected = torch.cat([mu, sigma.expand_as(mu), value], -1)
        torch.testing.assert_close(features[t], expected)


def test_a_network_builder_learns_what_the_same_standard_network_learns(tmp_path, points):  # noqa: F811
    mlp = {"units": [6], "activation": "tanh", "initializer": {"name": "default"}}
    agents = []
    for config in (own(tmp_path), settings(tmp_path, network__mlp=mlp)):
        runner = Runner()
        runner.load(config)
        agents.append(runner.algo_factory.create("a2c_continuous", base_name="run", params=runner.params))
    module, model = agents[0].algorithm.model.actor.network.module, agents[1].algorithm.model
    pairs = [
        (module.first, model.actor.network.hidden[0]),
        (module.mu, model.actor.head.mean),
        (module.value, model.critic.head.linear),
    ]
    with torch.no_grad():
        for here, there in pairs:
            here.weight.copy_(there.weight)
            here.bias.copy_(there.bias)
    for agent in agents:
        torch.manual_seed(0)
        agent.train()
    for here, there in pairs:
        torch.testing.assert_close(here.weight, there.weight, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.sigma, model.actor.head.raw_std, atol=1e-5, rtol=1e-4)


def test_a_network_of_the_users_may_have_any_settings(tmp_path, points):  # noqa: F811
    runner = Runner()
    runner.load(own(tmp_path, features=128, observer="cnn"))
    agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
    assert agent.algorithm.model.actor.network.module is not None
    assert agent.imported.config.algorithm.model.policy.params["features"] == 128
    assert agent.imported.config.algorithm.model.policy.params["observer"] == "cnn"


def test_what_a_network_builder_cannot_do_here_is_refused(tmp_path, points):  # noqa: F811
    class Buffered(Builder):
        def build(self, name, **kwargs):
            net = super().build(name, **kwargs)
            net.register_buffer("grid", torch.zeros(2))
            return net

    runner = Runner()
    runner.load(own(tmp_path))
    model_builder.register_network("own_net", Buffered)
    with pytest.raises(ConfigError, match=r"own_net.*buffers grid would be in no file.*persistent=False"):
        runner.run({"train": True})


class Model(nn.Module):
    """A model in RSL-RL's form: own normalizer, grid and std."""

    is_recurrent = False

    def __init__(self, obs, obs_groups, obs_set, output_dim, width=8, distribution_cfg=None):
        super().__init__()
        self.groups = obs_groups[obs_set]
        self.register_buffer("mean", torch.zeros(PLACE))
        self.mlp = nn.Sequential(nn.Linear(sum(obs[name].shape[-1] for name in self.groups), width), nn.ELU())
        self.last = nn.Linear(width, output_dim)
        if distribution_cfg:
            self.std_param = nn.Parameter(distribution_cfg["init_std"] * torch.ones(output_dim))

    def forward(self, obs, masks=None, hidden_state=None, stochastic_output=False):
        out = self.last(self.mlp(torch.cat([obs[name] for name in self.groups], -1) - self.mean))
        if stochastic_output:
            self.normal = torch.distributions.Normal(out, self.std_param)
            return self.normal.sample()
        return out

    output_mean = property(lambda self: self.normal.mean)
    output_std = property(lambda self: self.normal.stddev)

    def update_normalization(self, obs):
        self.mean.copy_(obs["policy"].mean(0))


class Recurrent(Model):
    """A model of the user's with a GRU that keeps its state between calls, as in RSL-RL."""

    is_recurrent = True

    def __init__(self, obs, obs_groups, obs_set, output_dim, width=8, distribution_cfg=None):
        super().__init__(obs, obs_groups, obs_set, output_dim, width, distribution_cfg)
        self.gru, self.hidden = nn.GRU(PLACE, PLACE), None

    def forward(self, obs, masks=None, hidden_state=None, stochastic_output=False):
        x, self.hidden = self.gru(obs["policy"].unsqueeze(0), self.hidden)
        return super().forward({"policy": x[0]}, stochastic_output=stochastic_output)

    def reset(self, dones=None, hidden_state=None):
        self.hidden = hidden_state

    def get_hidden_state(self):
        return self.hidden


class SaysItLate(Recurrent):
    is_recurrent = False

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.is_recurrent = True


def rsl_own(name="test_own_networks:Model", roles=("actor", "critic")):
    cfg = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "scalar"}
    sections = {"actor": {"class_name": name, "width": 6, "distribution_cfg": cfg}}
    sections["critic"] = {"class_name": Model}
    return rsl_settings(**{role: sections[role] for role in roles})


@pytest.mark.parametrize("name", ["Model", "Recurrent"])
@pytest.mark.parametrize("roles", [("actor", "critic"), ("actor",), ("critic",)])
def test_a_model_of_rsl_rl_trains_saves_and_loads(tmp_path, caplog, roles, name):
    settings = rsl_own(f"test_own_networks:{name}", roles)
    runner = OnPolicyRunner(Robots(), settings, log_dir=str(tmp_path), device="cpu")
    runner.learn(2)
    for role in roles:
        cls = name if role == "actor" else "Model"
        assert f"{role}.class_name={cls}: your model, called as in RSL-RL" in caplog.text
        tree = read_pickled(tmp_path / "model_1.pt")[f"{role}_state_dict"]
        module = getattr(runner.alg.ppo.model, role).network.model
        assert set(tree) == set(module.state_dict()), "as RSL-RL's file of the module"
        assert float(tree["mean"].abs().sum()) > 0, "the model's own statistics were updated"
    tree = read_pickled(tmp_path / "model_1.pt")
    moments = tree["optimizer_state_dict"]["state"]
    assert all(bool(entry["exp_avg_sq"].sum() > 0) for entry in moments.values()), "every parameter learned"
    again = OnPolicyRunner(Robots(), settings, device="cpu")
    again.load(str(tmp_path / "model_1.pt"))
    policies = again.get_inference_policy(), runner.get_inference_policy()
    for _ in range(2):
        obs = {"policy": torch.randn(3, PLACE)}
        torch.testing.assert_close(*(policy(obs) for policy in policies))
    saved = again.alg.save()["optimizer_state_dict"]["state"]
    for i, entry in moments.items():
        torch.testing.assert_close(saved[i]["exp_avg"], entry["exp_avg"])
    again.learn(1)


class Exports(Model):
    """A model with its own exports, as RSL-RL's have."""

    def as_jit(self):
        return nn.Sequential(self.mlp, self.last)

    def as_onnx(self, verbose=False):
        return SimpleNamespace(input_names=["joints"], of=self)


def test_a_model_of_the_users_exports_itself(tmp_path):
    runner = OnPolicyRunner(Robots(), rsl_own("test_own_networks:Exports"), device="cpu")
    model = runner.alg.ppo.model.actor.network.model
    runner.export_policy_to_jit(str(tmp_path))
    obs = torch.randn(3, PLACE)
    torch.testing.assert_close(torch.jit.load(tmp_path / "policy.pt")(obs), model({"policy": obs}))
    onnx = runner.alg.get_policy().as_onnx()
    assert onnx.input_names == ["joints"] and onnx.of is model


def test_a_recurrent_model_of_rsl_rl_computes_what_it_computes_alone():
    runner = OnPolicyRunner(Robots(), rsl_own("test_own_networks:Recurrent"), device="cpu")
    network = runner.alg.ppo.model.actor.network
    assert runner.alg.ppo.config.shuffle == "none" and runner.alg.ppo.config.sequence_length > 1
    assert not runner.alg.ppo.model.critic.network.is_recurrent
    obs, reset = torch.randn(5, 2, PLACE), torch.zeros(5, 2, dtype=torch.bool)
    reset[3, 1] = True
    features, _ = network({"policy": obs}, network.initial_state(2), reset)
    assert network.model.hidden is None, "Canter keeps the state"
    hidden = torch.zeros(1, 2, PLACE)
    for t in range(5):
        x, hidden = network.model.gru(obs[t].unsqueeze(0), hidden.masked_fill(reset[t].view(1, 2, 1), 0.0))
        mean = network.model.last(network.model.mlp(x[0] - network.model.mean))
        std = network.model.std_param.log().expand_as(mean)
        torch.testing.assert_close(features[t], torch.cat([mean, std], -1))


class RNNModel(Model):
    """A class of the user's with a name of RSL-RL's."""


def test_a_class_of_the_user_with_a_name_of_rsl_rls_is_the_users():
    runner = OnPolicyRunner(Robots(), rsl_own("test_own_networks:RNNModel"), device="cpu")
    assert isinstance(runner.alg.ppo.model.actor.network.model, RNNModel)


def test_a_recurrent_class_of_rsl_rl_builds_canters_network():
    theirs = type("RNNModel", (nn.Module,), {"__module__": "rsl_rl.models.rnn_model"})
    built = []
    for name in ("rsl_rl.models:RNNModel", theirs):
        memory: dict[str, Any] = {"class_name": name, "rnn_type": "gru", "rnn_hidden_dim": 4, "rnn_num_layers": 1}
        own = {f"{part}__{key}": value for part in ("actor", "critic") for key, value in memory.items()}
        runner = OnPolicyRunner(Robots(), rsl_settings(5, **own), device="cpu")
        runner.learn(1)
        built.append(runner.alg.ppo.config)
    assert built[0] == built[1] and built[0].model.policy.rnn.hidden == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_own_networks:SaysItLate", r"actor\.class_name=SaysItLate: is_recurrent must be an attribute"),
        ("test_own_networks:Absent", r"actor\.class_name='test_own_networks:Absent': test_own_networks has no Absent"),
        ("nowhere.models:Net", r"actor\.class_name='nowhere.models:Net': import nowhere before the runner"),
    ],
)
def test_models_that_cannot_be_used_are_refused_by_name(name, words):
    with pytest.raises(ConfigError, match=words):
        OnPolicyRunner(Robots(), rsl_own(name), device="cpu")


def test_a_model_with_another_distribution_is_refused():
    tree = rsl_own()
    tree["actor"]["distribution_cfg"] = {"class_name": "BetaDistribution"}
    with pytest.raises(ConfigError, match=r"actor\.distribution_cfg\.class_name.*Gaussian"):
        OnPolicyRunner(Robots(), tree, device="cpu")

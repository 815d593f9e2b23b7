"""Networks that users wrote for rl_games and RSL-RL train here, and their files go back."""

from typing import Any

import pytest
import torch
from test_rl_games_runner import OBS, points, settings  # noqa: F401
from torch import nn

from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import Runner, model_builder
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

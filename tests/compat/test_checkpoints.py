"""Checkpoints in the source libraries' layouts, made here by hand: read, and written back.

With the real libraries: `benchmarks/parity/checkpoints.py`.
"""

import copy
from itertools import pairwise

import pytest
import torch
from theirs import GENERATIONS, RSL_RL, changed
from theirs import rl_games as rl_games_settings
from torch import nn

from canter import Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.compat import import_config
from canter.compat.pickled_file import CheckpointRefused, read_pickled
from canter.compat.rl_games import checkpoint as rl_games
from canter.compat.rsl_rl import checkpoint as rsl_rl
from canter.compat.weights import moments_in as moments_of
from canter.core.plain import ConfigError

OBS, ACTIONS = 5, 2
BOX = Continuous((-1.0,) * ACTIONS, (1.0,) * ACTIONS)


def read(library, path):
    """The weights of a file, by the names of its library."""
    return library.weights_in(read_pickled(path), path)


def spec_of(action=BOX, **groups):
    groups = groups or {"policy": OBS}
    return EnvSpec({name: TensorSpec((width,)) for name, width in groups.items()}, action, 4, final_obs="unknown")


def layers(*widths):
    """Linear layers with ELU between them, as in all source libraries."""
    pairs = [(nn.Linear(a, b), nn.ELU()) for a, b in pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def prefixed(name, module):
    return {f"{name}.{key}": tensor.clone() for key, tensor in module.state_dict().items()}


def adam_state(tensors, rate=3e-4, steps=7):
    """The state of an optimiser over these tensors, in this order, with moments that tell them apart."""
    state = {
        i: {"step": torch.tensor(float(steps)), "exp_avg": t * 0 + i, "exp_avg_sq": t * 0 + 100 + i}
        for i, t in enumerate(tensors)
    }
    return {"state": state, "param_groups": [{"lr": rate, "params": [*range(len(state))]}]}


def moments_in(ppo):
    """The mean of each parameter's first moment, by name."""
    found = {}
    for group in groups_of(ppo):
        moments = moments_of(group, ppo.model.named_parameters())
        found |= {name: mean.mean().item() for name, (mean, _) in moments.items()}
    return found


def groups_of(ppo):
    return [group for optimizer in ppo.optimizers.values() for group in optimizer.groups.values()]


class Rsl:
    """A policy in RSL-RL's form, and its files."""

    def __init__(self, normalize):
        torch.manual_seed(0)
        self.actor, self.critic = layers(OBS, 32, 16, ACTIONS), layers(OBS, 24, 1)
        self.std = torch.tensor([0.3, 0.7])
        self.mean, self.variance, self.normalize = torch.randn(1, OBS), torch.rand(1, OBS) + 0.5, normalize
        self.obs = torch.randn(4, OBS) * 3

    def act(self):
        obs = (self.obs - self.mean) / (self.variance.sqrt() + 0.01) if self.normalize else self.obs
        return self.actor(obs)

    def normalizer(self, name):
        values = {"_mean": self.mean, "_var": self.variance, "_std": self.variance.sqrt(), "count": torch.tensor(900)}
        return {f"{name}{key}": value for key, value in values.items()} if self.normalize else {}

    def file(self, generation, log=False):
        std = self.std.log() if log else self.std
        if generation >= 4:
            name = ("distribution.log_std_param" if log else "distribution.std_param") if generation > 4 else "std"
            actor = {**self.normalizer("obs_normalizer."), name: std, **prefixed("mlp", self.actor)}
            critic = prefixed("mlp", self.critic)
            tensors = [t for key, t in (*actor.items(), *critic.items()) if "obs_normalizer" not in key]
            tree = {"actor_state_dict": actor, "critic_state_dict": critic}
        else:
            inside = self.normalizer("actor_obs_normalizer.") if generation == 3 else {}
            both = self.normalizer("critic_obs_normalizer.") if generation == 3 else {}
            std = {"log_std" if log else "std": std}
            tensors = [
                *std.values(),
                *prefixed("actor", self.actor).values(),
                *prefixed("critic", self.critic).values(),
            ]
            model = {**std, **prefixed("actor", self.actor), **prefixed("critic", self.critic), **inside, **both}
            tree = {"model_state_dict": model}
            if generation == 2:
                tree |= {
                    "obs_norm_state_dict": self.normalizer(""),
                    "privileged_obs_norm_state_dict": self.normalizer(""),
                }
        return tree | {"optimizer_state_dict": adam_state(tensors), "iter": 42, "infos": None}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_of_rsl_rl_acts_as_it_did(generation, tmp_path):
    theirs = Rsl(normalize=generation != 1)
    log = generation == 3
    torch.save(theirs.file(generation, log), tmp_path / "model_42.pt")
    settings = changed(GENERATIONS[generation], {"critic.activation": "elu"} if generation == 5 else {})
    ppo = import_config(settings, parity=True).config.algorithm.build(spec_of(), 0)
    weights = read(rsl_rl, tmp_path / "model_42.pt")
    rsl_rl.load(ppo, weights)
    action, _ = ppo.policy.act({"policy": theirs.obs})
    torch.testing.assert_close(action, theirs.act().detach(), atol=1e-6, rtol=0)
    assert weights.iteration == 42
    torch.testing.assert_close(ppo.distribution.std(ppo.policy.params({"policy": theirs.obs}, ())[0])[0], theirs.std)
    moments = moments_in(ppo)
    assert moments["actor.head.raw_std"] == 0 and moments["actor.network.hidden.0.weight"] == 1, "the order of the file"
    assert moments["actor.head.mean.bias"] == 6 and moments["critic.head.linear.bias"] == 10
    for group in groups_of(ppo):
        assert group.adam.step.item() == 7 and group.learning_rate.item() == pytest.approx(3e-4)


def test_a_std_in_another_parameterisation_keeps_its_value_and_loses_its_moments(tmp_path):
    theirs = Rsl(normalize=False)
    settings = changed(RSL_RL, {"actor.obs_normalization": False, "critic.activation": "elu"})
    ppo = import_config(settings).config.algorithm.build(spec_of(), 0)
    torch.save(theirs.file(5), tmp_path / "model_1.pt")
    rsl_rl.load(ppo, read(rsl_rl, tmp_path / "model_1.pt"))
    params, _ = ppo.policy.params({"policy": theirs.obs}, ())
    torch.testing.assert_close(ppo.distribution.std(params)[0], theirs.std)
    assert moments_in(ppo)["actor.head.raw_std"] == 0


def test_a_fixed_std_comes_from_the_file_and_goes_back():
    theirs = Rsl(normalize=False)
    changes = {"actor.distribution_cfg.learn_std": False, "actor.obs_normalization": False, "critic.activation": "elu"}
    ppo = import_config(changed(RSL_RL, changes), parity=True).config.algorithm.build(spec_of(), 0)
    tree = theirs.file(5)
    del tree["optimizer_state_dict"]["state"][0]  # torch keeps no moments of what has no gradient
    rsl_rl.load(ppo, rsl_rl.weights_in(tree, None))
    assert torch.equal(ppo.model.actor.head.raw_std, theirs.std)
    written = rsl_rl.dump(ppo, 1)
    assert torch.equal(written["actor_state_dict"]["distribution.std_param"], theirs.std)
    assert written["optimizer_state_dict"]["state"].keys() == tree["optimizer_state_dict"]["state"].keys()


def test_recurrent_layers_and_a_std_from_the_network():
    torch.manual_seed(1)
    rnn, mlp = nn.LSTM(OBS, 6, num_layers=2), layers(6, 8, 2 * ACTIONS)
    actor = {**prefixed("rnn.rnn", rnn), **prefixed("mlp", mlp)}
    critic = prefixed("mlp", layers(OBS, 24, 1))
    own = {"class_name": "RNNModel", "rnn_type": "lstm", "rnn_hidden_dim": 6, "rnn_num_layers": 2, "hidden_dims": [8]}
    own |= {"obs_normalization": False, "distribution_cfg.class_name": "HeteroscedasticGaussianDistribution"}
    settings = changed(RSL_RL, {f"actor.{key}": value for key, value in own.items()})
    ppo = import_config(settings, parity=True).config.algorithm.build(spec_of(), 0)
    tree = {"actor_state_dict": actor, "critic_state_dict": critic, "iter": 0}
    rsl_rl.load(ppo, rsl_rl.weights_in(tree, None))
    obs, state = torch.randn(3, 4, OBS), ppo.policy.initial_state(4)
    expected = mlp(rnn(obs)[0]).detach()
    for t in range(3):
        params, state = ppo.policy.params({"policy": obs[t]}, state)
        torch.testing.assert_close(params[:, :ACTIONS], expected[t, :, :ACTIONS], atol=1e-6, rtol=0)
        std = expected[t, :, ACTIONS:].clamp(min=1e-6)
        torch.testing.assert_close(ppo.distribution.std(params), std, atol=1e-6, rtol=0)
    written = rsl_rl.dump(ppo, 3)
    for name, tensor in actor.items():
        assert torch.equal(written["actor_state_dict"][name], tensor), name


def test_observation_groups_are_cut_out_of_one_normaliser():
    theirs = Rsl(normalize=True)
    settings = changed(RSL_RL, {"obs_groups": {"actor": ["a", "b"], "critic": ["b", "a"]}, "critic.activation": "elu"})
    ppo = import_config(settings, parity=True).config.algorithm.build(spec_of(a=2, b=3), 0)
    rsl_rl.load(ppo, rsl_rl.weights_in(theirs.file(5), None))
    action, _ = ppo.policy.act({"a": theirs.obs[:, :2], "b": theirs.obs[:, 2:]})
    torch.testing.assert_close(action, theirs.act().detach(), atol=1e-6, rtol=0)


def rl_games_model(separate=False, central=False, heads=None):
    """The state of a model in rl_games' form, and what computes its deterministic output."""
    torch.manual_seed(2)
    trunk, own, value = layers(OBS, 32, 16), layers(OBS, 32, 16), nn.Linear(16, 1)
    trunk.append(nn.ELU()), own.append(nn.ELU())
    mean, variance = torch.randn(OBS).double(), torch.rand(OBS).double() + 0.5
    model = {
        "value_mean_std.running_mean": torch.tensor([2.0]).double(),
        "value_mean_std.running_var": torch.tensor([9.0]).double(),
        "value_mean_std.count": torch.tensor(50.0).double(),
        "running_mean_std.running_mean": mean,
        "running_mean_std.running_var": variance,
        "running_mean_std.count": torch.tensor(300.0).double(),
    }
    head = [nn.Linear(16, n) for n in heads] if heads else [nn.Linear(16, ACTIONS)]
    parameters = {} if heads else {"a2c_network.sigma": torch.tensor([-0.5, 0.2])}
    parameters |= prefixed("a2c_network.actor_mlp", trunk)
    parameters |= prefixed("a2c_network.critic_mlp", own) if separate else {}
    parameters |= prefixed("a2c_network.value", value)
    for i, each in enumerate(head):
        name = "mu" if not heads else "logits" if len(heads) == 1 else f"logits.{i}"
        parameters |= prefixed(f"a2c_network.{name}", each)

    def normalized(obs):
        return ((obs - mean.float()) / (variance.float() + 1e-5).sqrt()).clamp(-5, 5)

    def output(obs):
        features = trunk(normalized(obs))
        return torch.cat([each(features) for each in head], -1).detach()

    def values(obs):
        raw = value((own if separate else trunk)(normalized(obs)))
        return (raw.clamp(-5, 5) * (9.0 + 1e-5) ** 0.5 + 2.0).squeeze(-1).detach()

    tree = {"model": model | parameters, "epoch": 12, "frame": 99, "last_mean_rewards": -3.0, "env_state": None}
    return tree | {"optimizer": adam_state(parameters.values())}, output, values


SPACES = {"discrete": Discrete(4), "multi_discrete": MultiDiscrete((3, 2))}


@pytest.mark.parametrize("action", ["continuous", "discrete", "multi_discrete"])
@pytest.mark.parametrize("separate", [False, True])
def test_rl_games_acts_and_values_as_it_did(action, separate, tmp_path):
    heads = {"discrete": (4,), "multi_discrete": (3, 2)}.get(action)
    tree, output, values = rl_games_model(separate, heads=heads)
    changes = {} if action == "continuous" else {"algo__name": "a2c_discrete", "model__name": f"{action}_a2c"}
    changes |= {} if action == "continuous" else {"network__space": {action: None}}
    config = import_config(rl_games_settings(network__separate=separate, **changes), parity=True).config
    ppo = config.algorithm.build(spec_of(SPACES.get(action, BOX)), 0)
    compiled = {
        f"_orig_mod.{name}" if i % 2 else name: tensor for i, (name, tensor) in enumerate(tree["model"].items())
    }
    torch.save(tree | {"model": compiled}, tmp_path / "small.pth")
    weights = read(rl_games, tmp_path / "small.pth")
    rl_games.load(ppo, weights)
    obs = torch.randn(4, OBS) * 3
    params, _ = ppo.policy.params({"policy": obs}, ())
    wanted = output(obs)
    torch.testing.assert_close(params[:, : wanted.shape[1]], wanted, atol=1e-6, rtol=0)
    features, _ = ppo.model.critic.unroll({"policy": obs[None]}, (), None)
    torch.testing.assert_close(features[0], values(obs), atol=2e-6, rtol=0)
    assert weights.iteration == 12 and weights.optimizers["policy"].steps == 7
    if action == "continuous":
        torch.testing.assert_close(ppo.distribution.std(params)[0], torch.tensor([-0.5, 0.2]).exp())
    written = rl_games.dump(ppo, 12, 99, -3.0)
    for name, tensor in tree["model"].items():
        torch.testing.assert_close(written["model"][name].reshape(-1), tensor.reshape(-1), atol=1e-6, rtol=0)
    for i, entry in tree["optimizer"]["state"].items():
        assert torch.equal(written["optimizer"]["state"][i]["exp_avg"], entry["exp_avg"])


@pytest.mark.parametrize(
    ("form", "of"),
    [
        ("exp", torch.exp),
        ("softplus", nn.functional.softplus),
        ("linear", lambda raw: nn.functional.softplus(raw - 0.15)),
    ],
)
def test_rl_games_parameterisation_of_the_std_and_its_floor_are_kept(form, of):
    tree, _, _ = rl_games_model()
    at = "network__space__continuous__"
    settings = rl_games_settings(**{f"{at}sigma_parametrization": form, f"{at}min_sigma": 0.15})
    ppo = import_config(settings, parity=True).config.algorithm.build(spec_of(), 0)
    rl_games.load(ppo, rl_games.weights_in(tree, None))
    params, _ = ppo.policy.params({"policy": torch.zeros(1, OBS)}, ())
    torch.testing.assert_close(ppo.distribution.std(params)[0], 0.15 + of(torch.tensor([-0.5, 0.2])))
    assert torch.equal(rl_games.dump(ppo, 1, 1, 0.0)["model"]["a2c_network.sigma"], torch.tensor([-0.5, 0.2]))


def test_what_is_written_is_read_without_running_anything_and_by_another_algorithm(tmp_path):
    config = import_config(RSL_RL, parity=True).config.algorithm
    first, second = config.build(spec_of(), 0), config.build(spec_of(), 1)
    torch.save(rsl_rl.dump(first, 5), tmp_path / "model_5.pt")
    assert read_pickled(tmp_path / "model_5.pt")["iter"] == 5
    rsl_rl.load(second, read(rsl_rl, tmp_path / "model_5.pt"))
    for (name, one), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_files_that_do_not_fit_change_nothing_and_say_why():
    theirs = Rsl(normalize=True)
    settings = changed(RSL_RL, {"critic.activation": "elu"})
    ppo = import_config(settings, parity=True).config.algorithm.build(spec_of(), 0)
    before = copy.deepcopy(ppo.model.state_dict())
    for change, words in {
        "width": "32, 5.*by the settings|by the settings",
        "missing": "the file has no actor.mlp.0.weight",
        "extra": "no place for the file's actor.mlp.9.weight",
        "statistics": "has no statistics",
        "no_effect": "not above 0",
    }.items():
        tree = theirs.file(5)
        actor = tree["actor_state_dict"]
        if change == "width":
            actor["mlp.0.weight"] = torch.zeros(31, OBS)
        elif change == "missing":
            del actor["mlp.0.weight"]
        elif change == "extra":
            actor["mlp.9.weight"] = torch.zeros(2)
        elif change == "statistics":
            tree["actor_state_dict"] = {k: v for k, v in actor.items() if "normalizer" not in k}
        else:
            actor["distribution.std_param"] = torch.tensor([0.1, -0.2])
        with pytest.raises(ConfigError, match=words):
            rsl_rl.load(ppo, rsl_rl.weights_in(tree, None))
    for name, tensor in ppo.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_other_files_are_named_for_what_they_are(tmp_path):
    torch.save({"policy": torch.ones(2)}, tmp_path / "other.pt")
    for reader in (rsl_rl, rl_games):
        with pytest.raises(CheckpointRefused, match="it has policy"):
            read(reader, tmp_path / "other.pt")

"""The updates of `tests/parity/update_cases.py` by the released source libraries: RSL-RL 5.5.1 and rl_games 1.6.5.

    python benchmarks/parity/parents.py OUT.json [RELEASE [PART_OF_A_NAME]]

needs `rsl-rl-lib`, `rl_games` and torch, but not Canter. RELEASE, 1.6.1 or 2.0, runs the cases of that release of
rl_games, whose sources must be first on the path. RSL-RL runs through `PPO.act`, `process_env_step`,
`compute_returns` and `update`, rl_games through `train_epoch` of its agents. Replaced are the random numbers (samples
and the order of rows) and the environment.
"""

# pyright: reportMissingImports=false

import contextlib
import io
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import torch

sys.modules |= {"gym": gymnasium, "ray": mock.MagicMock()}  # rl_games up to 1.6.1 imports the old names
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))
from update_cases import (  # noqa: E402
    ACTIONS,
    CASES,
    CHOICES,
    HIDDEN,
    ITERATIONS,
    MEMORY,
    OBS,
    STATES,
    N,
    T,
    first_value,
    order,
    rollouts,
)

Named = dict[str, Any]
"""Parameters, or lists of parts of one, by the names that all libraries share."""
Numbers = dict[str, list[float]]
Case = dict[str, Any]
PARTS = ("weight", "bias")


def mlp_parameters(layers: Any, name: str) -> Named:
    """Weights and biases of linear layers in a row, by `name.0.weight` and so on."""
    linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    pairs = [(f"{name}.{i}", layer) for i, layer in enumerate(linear)]
    return {f"{n}.{part}": getattr(layer, part) for n, layer in pairs for part in ("weight", "bias")}


def rnn_parameters(rnn: Any, name: str) -> Named:
    kinds = [f"{kind}_{side}" for kind in ("weight", "bias") for side in ("ih", "hh")]
    return {f"{name}.rnn.{i}.{k}": getattr(rnn, f"{k}_l{i}") for i in range(rnn.num_layers) for k in kinds}


@torch.no_grad()
def begin(parameters: Named) -> None:
    """Fill them with the values that they begin with in every library."""
    for name, parameter in parameters.items():
        parts = parameter if isinstance(parameter, list) else [parameter]
        whole = first_value(name, (sum(len(part) for part in parts), *parts[0].shape[1:]))
        for part, rows in zip(parts, np.split(whole, np.cumsum([len(part) for part in parts])[:-1]), strict=True):
            part.copy_(torch.from_numpy(rows))


def values(parameters: Named) -> Numbers:
    """All of them as lists."""
    joined = {n: torch.cat(p) if isinstance(p, list) else p for n, p in parameters.items()}
    return {name: np.asarray(p.detach().double()).ravel().tolist() for name, p in joined.items()}


# RSL-RL


def rsl_rl(case: Case) -> Numbers:
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import MLPModel, RNNModel
    from rsl_rl.storage import RolloutStorage
    from tensordict import TensorDict

    data, settings = rollouts(case), dict(case["theirs"])
    noise = torch.from_numpy(data["noise"])
    normalize, distribution_cfg = settings.pop("obs_normalization", False), distribution_settings(settings)
    rnn = {"rnn_type": settings.pop("rnn_type", None), "rnn_num_layers": settings.pop("rnn_num_layers", 1)}
    kind, own = (RNNModel, rnn | {"rnn_hidden_dim": MEMORY}) if rnn["rnn_type"] else (MLPModel, {})

    def at(t: int) -> TensorDict:
        groups = {"policy": torch.from_numpy(data["obs"][t]), "critic": torch.from_numpy(data["states"][t])}
        return TensorDict(groups, batch_size=[N])

    own |= {"hidden_dims": HIDDEN, "activation": "elu", "obs_normalization": normalize}
    groups = {"actor": ["policy"], "critic": ["critic"]}
    actor = kind(at(0), groups, "actor", ACTIONS, distribution_cfg=distribution_cfg, **own)
    critic = kind(at(0), groups, "critic", 1, **own)
    parameters = rsl_rl_parameters(actor, critic)
    ppo = PPO(actor, critic, RolloutStorage("rl", N, T, at(0), [ACTIONS]), **settings)
    for name in ("predictor", "target") if ppo.rnd else ():
        parameters |= mlp_parameters(getattr(ppo.rnd, name), f"rnd_{name}")
    begin(parameters)
    curiosity = {"rnd_loss": [], "rnd_bonus": []} if ppo.rnd else {}
    step = 0
    distribution = actor.distribution
    distribution.sample = lambda: drawn_by(distribution, noise[step]) if acting else distribution.mean
    for iteration in range(ITERATIONS):
        acting, bonuses = True, []
        with torch.inference_mode():
            for _ in range(T):
                ppo.act(at(step))
                ended = torch.from_numpy(data["terminated"][step] | data["truncated"][step])
                reward, cut = torch.from_numpy(data["reward"][step]), torch.from_numpy(data["truncated"][step])
                step += 1
                ppo.process_env_step(at(step), reward, ended.long(), {"time_outs": cut})
                bonuses.append(ppo.intrinsic_rewards if ppo.rnd else torch.zeros(()))
            ppo.compute_returns(at(step))
        acting = False
        rows = settings["num_mini_batches"] * (T * N // settings["num_mini_batches"])
        drawn = torch.from_numpy(order(iteration, rows))
        with mock.patch("torch.randperm", lambda count, drawn=drawn, **_: drawn[:count]):
            losses = ppo.update()
        for name, number in (("rnd_loss", losses.get("rnd")), ("rnd_bonus", torch.stack(bonuses).mean().item())):
            curiosity.get(name, []).append(number)
    found = values(parameters) | curiosity
    if normalize:
        for name, model in (("policy", actor), ("critic", critic)):
            found[f"{name}.obs_mean"] = model.obs_normalizer._mean.ravel().tolist()
            found[f"{name}.obs_variance"] = model.obs_normalizer._var.ravel().tolist()
    return found | {"learning_rate": [ppo.learning_rate]}


def distribution_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of the distribution out of those of a case."""
    own = {"std_type": settings.pop("std_type", "scalar"), "learn_std": settings.pop("learn_std", True)}
    if "action_range" in settings:
        return {"class_name": "BetaDistribution", "action_range": settings.pop("action_range")}
    return {"class_name": "GaussianDistribution", "init_std": 1.0, **own}


def drawn_by(distribution: Any, noise: torch.Tensor) -> torch.Tensor:
    """The action that recorded noise stands for."""
    if not hasattr(distribution, "action_range"):
        return distribution.mean + distribution.std * noise
    low, high = distribution.action_range
    return low + (high - low) * torch.sigmoid(noise)


def rsl_rl_parameters(actor: Any, critic: Any) -> Named:
    stds = [*actor.distribution.parameters()]  # a beta has none
    found = {"std": stds[0]} if stds else {}
    for name, model in (("policy", actor), ("critic", critic)):
        found |= mlp_parameters(model.mlp, name)
        found |= rnn_parameters(model.rnn.rnn, name) if model.is_recurrent else {}
    last = len(HIDDEN)
    for name, head in (("policy", "head"), ("critic", "value")):
        found |= {f"{head}.{part}": found.pop(f"{name}.{last}.{part}") for part in ("weight", "bias")}
    return found


# rl_games


class Player:
    """An environment that plays what was recorded."""

    def __init__(self, case: Case) -> None:
        self.case, self.data, self.step_number = case, rollouts(case), 0

    def _obs(self) -> dict[str, torch.Tensor]:
        obs = {name: torch.from_numpy(self.data[name][self.step_number]) for name in ("obs", "states")}
        return obs | {"states": obs["states"][:: self.case["theirs"].get("agents", 1)]}

    def reset(self) -> dict[str, torch.Tensor]:
        """The first observation."""
        return self._obs()

    def step(self, action: Any) -> tuple[Any, ...]:
        """The next row, whatever the action."""
        t = self.step_number
        reward, cut = torch.from_numpy(self.data["reward"][t]), torch.from_numpy(self.data["truncated"][t])
        ended = torch.from_numpy(self.data["terminated"][t]) | cut
        self.step_number += 1
        return self._obs(), reward.clone(), ended, {"time_outs": cut}

    def get_action_masks(self) -> np.ndarray:
        """Those of this step."""
        return self.now("mask")

    def set_train_info(self, frame: int, *args: Any) -> None:
        """Nothing."""

    def now(self, name: str) -> np.ndarray:
        """What was recorded for this step; after the last one the agent draws once more, for a value only."""
        return self.data[name][min(self.step_number, ITERATIONS * T - 1)]


def rl_games(case: Case) -> Numbers:
    from rl_games.algos_torch import a2c_continuous, a2c_discrete
    from rl_games.common import tr_helpers
    from rl_games.common.algo_observer import DefaultAlgoObserver

    settings = {key: value for key, value in case["theirs"].items() if (key, value) != ("value_bootstrap", None)}
    settings.pop("release", None)
    env = Player(case)
    network = {"name": "actor_critic", "separate": settings.pop("separate")}
    network |= {"mlp": {"units": HIDDEN, "activation": "elu", "initializer": {"name": "default"}}}
    network |= {"rnn": settings.pop("rnn")} if "rnn" in settings else {}
    if "central_value_config" in settings:
        plain = {key: network[key] for key in ("name", "mlp")} | settings.pop("central_network", {})
        settings["central_value_config"] = settings["central_value_config"] | {
            "network": plain | {"central_value": True}
        }
    network["space"], model, space = rl_games_space(case["action"], settings.pop("fixed_sigma", True))
    box = gymnasium.spaces.Box
    info = {"observation_space": box(-9, 9, (OBS,)), "state_space": box(-9, 9, (STATES,)), "action_space": space}
    agents = settings.pop("agents", 1)
    info |= {"agents": agents}
    settings |= {
        "name": "parity", "env_name": "parity", "num_actors": N // agents, "env_info": info, "vec_env": env,
        "device": "cpu", "features": {"observer": DefaultAlgoObserver()}, "train_dir": tempfile.mkdtemp(),
        "reward_shaper": tr_helpers.DefaultRewardsShaper(), "print_stats": False,
    }  # fmt: skip
    params = {"config": settings, "model": {"name": model}, "network": network, "algo": {"name": ""}}
    agent = a2c_continuous if case["action"] == "continuous" else a2c_discrete
    agent = getattr(agent, "A2CAgent" if case["action"] == "continuous" else "DiscreteA2CAgent")("parity", params)
    parameters = rl_games_parameters(agent)
    begin(parameters)
    agent.init_tensors()
    agent.obs = agent.env_reset()
    head = 0

    def normal(self: Any, *_: Any) -> torch.Tensor:
        return self.loc + self.scale * torch.from_numpy(env.now("noise"))

    def choice(self: Any, *_: Any) -> torch.Tensor:
        nonlocal head
        drawn = env.now("choices")
        head += 1
        return torch.from_numpy(drawn[:, (head - 1) % drawn.shape[1]])

    for _ in range(ITERATIONS):
        agent.update_epoch()
        with (
            mock.patch("torch.distributions.Normal.sample", normal),
            mock.patch("torch.distributions.Categorical.sample", choice),
        ):
            agent.train_epoch()
    return values(parameters) | rl_games_statistics(agent) | {"learning_rate": [agent.last_lr]}


def rl_games_space(action: str, fixed_sigma: bool) -> tuple[dict[str, Any], str, gymnasium.Space]:
    """The section `space` of a network, the model's name and the action space."""
    init = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}}
    sigma = {"sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": fixed_sigma}
    if action == "continuous":
        space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,))
        return {"continuous": init | sigma}, "continuous_a2c_logstd", space
    parts = [gymnasium.spaces.Discrete(n) for n in CHOICES[action]]
    if action == "discrete":
        return {"discrete": None}, "discrete_a2c", parts[0]
    return {"multi_discrete": None}, "multi_discrete_a2c", gymnasium.spaces.Tuple(parts)


def rl_games_parameters(agent: Any) -> Named:
    net = agent.model.a2c_network
    found = mlp_parameters(net.actor_mlp, "policy")
    found |= mlp_parameters(net.critic_mlp, "critic") if net.separate else {}
    if net.has_rnn:
        rnns = {"policy": net.a_rnn, "critic": net.c_rnn} if net.separate else {"policy": net.rnn}
        for name, rnn in rnns.items():
            found |= rnn_parameters(rnn.rnn, name)
        norms = {"policy": net.layer_norm} if net.rnn_ln else {}
        found |= {f"{name}.rnn.norm.{part}": getattr(n, part) for name, n in norms.items() for part in PARTS}
    heads = net.mu if net.is_continuous else net.logits
    for part in PARTS:
        parts = heads if isinstance(heads, torch.nn.ModuleList) else [heads]
        found[f"head.{part}"] = [getattr(head, part) for head in parts]
    if net.is_continuous and net.fixed_sigma:
        found["std"] = net.sigma
    elif net.is_continuous:
        found |= {f"std_head.{part}": getattr(net.sigma, part) for part in PARTS}
    own = "trunk_value" if agent.has_central_value else "value"
    found |= {f"{own}.{part}": getattr(net.value, part) for part in ("weight", "bias")}
    if agent.has_central_value:
        central = agent.central_value_net.model.a2c_network
        found |= mlp_parameters(central.actor_mlp, "critic")
        found |= rnn_parameters(central.rnn.rnn, "critic") if central.has_rnn else {}
        found |= {f"value.{part}": getattr(central.value, part) for part in ("weight", "bias")}
        found = found if agent.has_value_loss else {k: v for k, v in found.items() if not k.startswith(own)}
    return found


def rl_games_statistics(agent: Any) -> Numbers:
    models = {"policy": agent.model}
    if agent.has_central_value:
        models["critic"] = agent.central_value_net.model
    found = {}
    for name, model in models.items():
        if model.normalize_input:
            found[f"{name}.obs_mean"] = model.running_mean_std.running_mean.tolist()
            found[f"{name}.obs_variance"] = model.running_mean_std.running_var.tolist()
    if agent.normalize_value:
        found["value_mean"] = agent.value_mean_std.running_mean.tolist()
        found["value_variance"] = agent.value_mean_std.running_var.tolist()
    return found


def main(path: str, release: str = "", only: str = "") -> None:
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        if case["theirs"].get("release", "") != release or only not in name:
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            found[name] = (rsl_rl if case["parent"] == "rsl_rl" else rl_games)(case)
    versions = {name: version(name) for name in ("rsl-rl-lib", "rl_games", "torch")}
    Path(path).write_text(json.dumps({"versions": versions, "cases": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

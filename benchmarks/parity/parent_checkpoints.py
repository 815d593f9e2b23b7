"""Write and read checkpoints with the source library itself. Needs the library and torch, not Canter.

    python benchmarks/parity/parent_checkpoints.py make FOLDER      RSL-RL 5.5.1 and rl_games 1.6.5, all update cases
    python benchmarks/parity/parent_checkpoints.py runner FOLDER    whichever RSL-RL is on the path, by its own runner
    python benchmarks/parity/parent_checkpoints.py verify FOLDER    what Canter wrote, loaded by the parents
    python benchmarks/parity/parent_checkpoints.py reload FOLDER    the same by whichever RSL-RL's runner is on the path

`benchmarks/parity/checkpoints.py` calls all four.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))
import parents
from update_cases import INSTALLED, OBS, STATES, N, T, order, rollouts


def file_name(case: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in case)


for name in ("get_env_state", "set_env_state"):
    setattr(parents.Player, name, lambda self, *_: None)


class Kept:
    """The checkpoint after the first of two updates, as the parent saves it, and the object that can load one."""

    def __init__(self, path: Path) -> None:
        self.path, self.living = path, None

    def rsl_rl(self, update: Any) -> Any:
        """`PPO.update` that saves when it is done for the first time."""

        def wrapped(ppo: Any) -> Any:
            result = update(ppo)
            if self.living is None:
                self.living = ppo
                torch.save({**ppo.save(), "iter": 1, "infos": None}, self.path)
            return result

        return wrapped

    def rl_games(self, train_epoch: Any) -> Any:
        """`train_epoch` that saves when it is done for the first time."""

        def wrapped(agent: Any) -> Any:
            result = train_epoch(agent)
            if self.living is None:
                self.living = agent
                agent.last_mean_rewards = np.float32(-3.5)
                agent.save(str(self.path.with_suffix("")))
            return result

        return wrapped


def make(folder: Path) -> None:
    found = {}
    for name, case in INSTALLED.items():
        kept = Kept(folder / f"{file_name(name)}.{'pt' if case['parent'] == 'rsl_rl' else 'pth'}")
        found[name] = run(case, kept)
    (folder / "expected.json").write_text(json.dumps(found))


def run(case: Any, kept: Kept) -> Any:
    """All numbers after both updates, with a checkpoint between them."""
    with contextlib.redirect_stdout(io.StringIO()):
        if case["parent"] == "rsl_rl":
            from rsl_rl.algorithms import PPO

            with mock.patch.object(PPO, "update", kept.rsl_rl(PPO.update)):
                return parents.rsl_rl(case)
        from rl_games.common.a2c_common import ContinuousA2CBase, DiscreteA2CBase

        base = ContinuousA2CBase if case["action"] == "continuous" else DiscreteA2CBase
        with mock.patch.object(base, "train_epoch", kept.rl_games(base.train_epoch)):
            return parents.rl_games(case)


def verify(folder: Path) -> None:
    """Load what Canter wrote by the parent's own functions and compare every tensor of its state with the parent's."""
    worst = {}
    for name, case in INSTALLED.items():
        suffix = "pt" if case["parent"] == "rsl_rl" else "pth"
        kept = Kept(folder / f"scratch.{suffix}")
        run(case, kept)
        theirs, ours = folder / f"{file_name(name)}.{suffix}", folder / f"ours_{file_name(name)}.{suffix}"
        states = []
        for path in (theirs, ours):
            with contextlib.redirect_stdout(io.StringIO()):
                load(kept.living, path)
            states.append(state(kept.living))
        if name.endswith("without a value"):  # it is in the file, and nobody asks it
            states = [
                {key: tensor for key, tensor in each.items() if "a2c_network.value" not in key} for each in states
            ]
        worst[name] = difference(*states)
    (folder / "verified.json").write_text(json.dumps(worst))


def load(living: Any, path: Path) -> None:
    if hasattr(living, "_raw_actor"):
        tree = torch.load(path, weights_only=True)
        with torch.inference_mode():  # in which the statistics of its bonuses were made
            living.load(tree, None, strict=True)
    else:
        living.restore(str(path))


def state(living: Any) -> Any:
    """Weights, statistics and moments, as the parent has them after loading."""
    if hasattr(living, "_raw_actor"):
        tree = living.save()
    else:
        tree = living.get_full_state_weights()
    flat: dict[str, torch.Tensor] = {}
    walk(tree, "", flat)
    return {name: tensor.clone().double() for name, tensor in flat.items()}


def walk(value: Any, key: str, flat: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        flat[key] = value
    elif isinstance(value, dict):
        for name, item in value.items():
            walk(item, f"{key}/{name}", flat)


def difference(one: Any, other: Any) -> float:
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    # 1.6.5 keeps a scalar where the statistics are of one number.
    return max(float((one[name].reshape(-1) - other[name].reshape(-1)).abs().max()) for name in one)


# whole runs of whatever RSL-RL is on the path


class Env:
    """Random observations in the form of each generation."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.num_envs, self.num_actions, self.num_obs, self.num_privileged_obs = 8, 2, OBS, STATES
        self.max_episode_length, self.device, self.cfg, self.step_dt = 20, "cpu", {}, 0.02
        self.episode_length_buf = torch.zeros(8, dtype=torch.long)
        self.random = torch.Generator().manual_seed(0)
        self.unwrapped = self

    def draw(self) -> Any:
        """Observations of both groups."""
        policy = torch.randn(8, OBS, generator=self.random) * 2 + 1
        critic = torch.randn(8, STATES, generator=self.random)
        if self.generation >= 3:
            from tensordict import TensorDict

            return TensorDict({"policy": policy, "critic": critic}, batch_size=[8])
        return policy, critic

    def get_observations(self) -> Any:
        """As the generation has it."""
        drawn = self.draw()
        if self.generation == 1:
            return drawn[0]
        return (drawn[0], {"observations": self.groups(drawn)}) if self.generation == 2 else drawn

    def groups(self, drawn: Any) -> Any:
        """Return the groups of 2.x besides the policy's."""
        return {"critic": drawn[1], "rnd_state": drawn[0]}

    def get_privileged_observations(self) -> Any:
        """Of 1.x."""
        return self.draw()[1]

    def reset(self) -> Any:
        """Of 1.x."""
        return self.draw() if self.generation == 1 else self.get_observations()

    def step(self, actions: torch.Tensor) -> Any:
        """As the generation has it."""
        reward = -(actions**2).mean(-1)
        done = torch.rand(8, generator=self.random) < 0.1
        drawn, infos = self.draw(), {"time_outs": torch.zeros(8, dtype=torch.bool)}
        if self.generation == 1:
            return (*drawn, reward, done.long(), infos)
        if self.generation == 2:
            return drawn[0], reward, done.long(), infos | {"observations": self.groups(drawn)}
        return drawn, reward, done.long(), infos


RND = {"weight": 0.0, "num_outputs": 3, "predictor_hidden_dims": [6], "target_hidden_dims": [5]}
RND |= {"state_normalization": True, "reward_normalization": True}
LAYOUTS = {"mlp": 1, "lstm": 1, "gru": 1, "log": 2, "lstm_log": 2, "rnd": 2, "gru_rnd": 2, "network_std": 3}
LAYOUTS |= {"range": 5.5, "fixed": 5.5, "beta": 5.5}
"""Variants of the policy, and the first version that has each."""


def layouts(version: str) -> list[str]:
    """Return the variants that a version of RSL-RL has."""
    number = float(".".join(version.split(".")[:2]))
    return [name for name, first in LAYOUTS.items() if number >= first]


def settings(generation: int, layout: str) -> Any:
    """Return settings of a generation for a variant."""
    recurrent, std_type = layout.startswith(("lstm", "gru")), "log" if layout.endswith(("log", "range")) else "scalar"
    algorithm = {"num_learning_epochs": 2, "num_mini_batches": 2, "schedule": "adaptive", "desired_kl": 0.01}
    algorithm |= {"rnd_cfg": dict(RND)} if layout.endswith("rnd") else {}
    groups = {"rnd_state": ["policy"]} if layout.endswith("rnd") else {}
    top = {"num_steps_per_env": 8, "save_interval": 100, "max_iterations": 2}
    rnn = {"rnn_type": layout.partition("_")[0], "rnn_num_layers": 1} if recurrent else {}
    named = {"class_name": "PPO"} | algorithm
    depends = {"state_dependent_std": True} if layout == "network_std" else {}
    if generation >= 4:
        own = {"class_name": "RNNModel" if recurrent else "MLPModel", "hidden_dims": [6, 4], "activation": "elu"}
        own |= {"obs_normalization": True} | ({**rnn, "rnn_hidden_dim": 4} if recurrent else {})
        std = {"stochastic": True, "init_noise_std": 0.8, "noise_std_type": std_type, **depends}
        if generation >= 5:
            kind = "HeteroscedasticGaussianDistribution" if depends else "GaussianDistribution"
            given = {"class_name": kind, "init_std": 0.8, "std_type": std_type}
            given |= {"std_range": [0.1, 2.0]} if layout == "range" else {}
            given |= {"learn_std": False} if layout == "fixed" else {}
            given = {"class_name": "BetaDistribution", "action_range": [-2.0, 2.0]} if layout == "beta" else given
            std = {"distribution_cfg": given}
        critic = {**own} if generation >= 5 else {**own, "stochastic": False}
        groups |= {"actor": ["policy"], "critic": ["critic"]}
        return top | {"obs_groups": groups, "actor": own | std, "critic": critic, "algorithm": named}
    policy = {"init_noise_std": 0.8, "actor_hidden_dims": [6, 4], "critic_hidden_dims": [6, 4], "activation": "elu"}
    size = {"rnn_hidden_size" if generation == 1 else "rnn_hidden_dim": 4}
    policy |= (rnn | size) if recurrent else {}
    kind = "ActorCriticRecurrent" if recurrent else "ActorCritic"
    if generation == 1:
        runner = top | {"policy_class_name": kind, "algorithm_class_name": "PPO"}
        return {"runner": runner, "policy": policy, "algorithm": algorithm}
    policy |= {"class_name": kind, **depends} | ({"noise_std_type": "log"} if std_type == "log" else {})
    if generation == 2:
        return top | {"empirical_normalization": True, "policy": policy, "algorithm": named}
    policy |= {"actor_obs_normalization": True, "critic_obs_normalization": True}
    groups |= {"policy": ["policy"], "critic": ["critic"]}
    return top | {"obs_groups": groups, "policy": policy, "algorithm": named}


def installed() -> str:
    """The version of the RSL-RL on the path."""
    import rsl_rl

    beside = [*Path(str(rsl_rl.__file__)).parents[1].glob("rsl_rl_lib-*.dist-info")]
    return beside[0].name.removeprefix("rsl_rl_lib-").removesuffix(".dist-info") if beside else "1.0.2"


def new_runner(generation: int, config: Any, folder: Path) -> Any:
    from rsl_rl.runners import OnPolicyRunner

    logs = None if generation >= 4 else str(folder / "logs")  # older ones cannot do without
    return OnPolicyRunner(Env(generation), config, log_dir=logs, device="cpu")


def networks_of(trained: Any) -> list[Any]:
    """The modules that act and value, whatever the generation calls them."""
    names = ("actor", "critic", "policy", "actor_critic")
    return [model for name in names if (model := getattr(trained.alg, name, None)) is not None]


def acted(trained: Any, obs: Any) -> torch.Tensor:
    """What the runner's policy does without noise."""
    policy = trained.get_inference_policy("cpu")
    with torch.inference_mode():
        return policy(obs)


@torch.inference_mode()
def called(trained: Any, generation: int, obs: Any, action: torch.Tensor) -> torch.Tensor | None:
    """Values `[N, 1]` by calling the critic, which scripts do since 4.0; the actor is called in the same way."""
    if generation < 4:
        return None
    forget(trained)
    assert torch.equal(trained.alg.actor(obs), action)
    return trained.alg.critic(obs)


@torch.inference_mode()
def forget(trained: Any) -> None:
    """Begin new episodes."""
    for model in networks_of(trained):
        model.reset(torch.ones(N, dtype=torch.bool))


def further(trained: Any, generation: int) -> None:
    """One update more, of a recorded rollout. Statistics stay: generations move them at different moments."""
    data, alg, step = rollouts(INSTALLED["rsl_rl scalar"]), trained.alg, 0
    noise = torch.from_numpy(data["noise"])
    alg.schedule = "fixed"  # before 5.0 an epsilon in the KL moves an adaptive rate, which is not imitated
    for model in networks_of(trained):
        model.train()
        model.update_normalization = lambda obs: None
    if generation == 2:
        trained.obs_normalizer.train(False), trained.privileged_obs_normalizer.train(False)

    def at(t: int) -> Any:
        policy, critic = torch.from_numpy(data["obs"][t]), torch.from_numpy(data["states"][t])
        if generation >= 3:
            from tensordict import TensorDict

            return (TensorDict({"policy": policy, "critic": critic}, batch_size=[N]),)
        if generation == 2:
            return trained.obs_normalizer(policy), trained.privileged_obs_normalizer(critic)
        return policy, critic

    forget(trained)
    with torch.inference_mode():
        for step in range(T):
            drawn = noise[step]
            with mock.patch.object(torch.distributions.Normal, "sample", lambda d, *_, z=drawn: d.mean + d.stddev * z):
                alg.act(*at(step))
            ended = torch.from_numpy(data["terminated"][step] | data["truncated"][step])
            # 1.x takes ends that are no mask for indices of environments; legged_gym's are a mask.
            came = (torch.from_numpy(data["reward"][step]), ended if generation == 1 else ended.long())
            after = at(step + 1) if generation >= 3 else ()
            infos = {"time_outs": torch.from_numpy(data["truncated"][step])}
            alg.process_env_step(*after, *came, infos | {"observations": {"rnd_state": at(step + 1)[0]}})
        alg.compute_returns(at(T)[-1])
    with mock.patch("torch.randperm", lambda count, **_: torch.from_numpy(order(0, count))):
        alg.update()


def runner(folder: Path) -> None:
    version = installed()
    generation = int(version[0])
    for layout in layouts(version):
        torch.manual_seed(1)
        config = settings(generation, layout)
        text = json.dumps(config)
        path = folder / f"rsl_rl_{version}_{layout}.pt"
        with contextlib.redirect_stdout(io.StringIO()):
            trained = new_runner(generation, config, folder)
            trained.learn(2)
            # 2.x tells a writer of the model unless logs are off.
            trained.logger_type, trained.disable_logs = "tensorboard", True
            trained.save(str(path))
            obs = Env(generation).draw()
            forget(trained)
            action = acted(trained, obs if generation >= 3 else obs[0])
            value = called(trained, generation, obs, action)
            further(trained, generation)
            trained.save(str(folder / f"after_{path.name}"))
        given = (
            {"policy": obs["policy"], "critic": obs["critic"]}
            if generation >= 3
            else dict(zip(("policy", "critic"), obs, strict=True))
        )
        state = {name: tensor.tolist() for name, tensor in given.items()}
        row = {"settings": json.loads(text), "obs": state, "action": action.tolist(), "generation": generation}
        row |= {} if value is None else {"value": value.tolist()}
        path.with_suffix(".json").write_text(json.dumps(row))


def reload(folder: Path) -> None:
    """What Canter wrote, loaded by a new runner: its actions, and all that it saves again, beside the parent's own."""
    version = installed()
    generation, found = int(version[0]), {}
    for path in sorted(folder.glob(f"rsl_rl_{version}_*.pt")):
        row = json.loads(path.with_suffix(".json").read_text())
        with contextlib.redirect_stdout(io.StringIO()):
            trained = new_runner(generation, row["settings"], folder)
            trained.logger_type, trained.disable_logs = "tensorboard", True
            if generation >= 4:
                trained.logger.writer = None  # which only `learn` makes
            trained.load(str(folder / f"ours_{path.name}"))
            obs = Env(generation).draw()
            action = acted(trained, obs if generation >= 3 else obs[0])
            trained.save(str(folder / "again.pt"))
        flat = []
        for file in (path, folder / "again.pt"):
            flat.append({})
            walk(torch.load(file, weights_only=True), "", flat[-1])
        state = difference(*({name: tensor.double() for name, tensor in each.items()} for each in flat))
        found[path.stem] = max(state, float((action - torch.tensor(row["action"])).abs().max()))
    (folder / f"reloaded_{version}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "verify": verify, "runner": runner, "reload": reload}[sys.argv[1]](Path(sys.argv[2]))

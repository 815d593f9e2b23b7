"""Train with the code of other libraries and the settings that they publish (`peers.yaml`).

Stable-Baselines3, sb3-contrib and Tianshou are imported; CleanRL is a script, run from its file. Each function trains
one seed and returns the policy without noise and the training episodes.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import torch
import yaml

SETTINGS: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((Path(__file__).parent / "peers.yaml").read_text())
EVAL_EPISODES = 50

Act = Callable[[np.ndarray], np.ndarray]
"""Maps an observation of the task to an action without noise."""


@dataclass
class Episodes:
    """Raw returns of training episodes, from all environments of a run."""

    steps: int = 0
    finished: list[tuple[int, float]] = field(default_factory=list)
    """Steps of all environments at the end of each episode, and its return."""

    def make(self, task: str) -> gymnasium.Env:
        """Return the task, with its episodes recorded here."""
        return _Recorded(gymnasium.make(task), self)

    def curve(self, points: int, steps: int) -> list[list[float]]:
        """Return the mean of the last 100 episodes at `points` even times."""
        curve = []
        for point in range(1, points + 1):
            until = steps * point // points
            returns = [return_ for step, return_ in self.finished if step <= until]
            if returns:
                curve.append([until, round(float(np.mean(returns[-100:])), 1)])
        return curve


class _Recorded(gymnasium.Wrapper):
    """Adds the raw return of each finished episode to `Episodes`."""

    def __init__(self, env: gymnasium.Env, episodes: Episodes) -> None:
        super().__init__(env)
        self._episodes = episodes
        self._return = 0.0

    def reset(self, **options: Any) -> Any:
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self._episodes.steps += 1
        self._return += float(result[1])
        if result[2] or result[3]:
            self._episodes.finished.append((self._episodes.steps, self._return))
        return result


def evaluate(act: Act, task: str, seed: int) -> list[float]:
    """Return the returns of `EVAL_EPISODES` new episodes without noise."""
    env = gymnasium.make(task)
    returns = []
    for episode in range(EVAL_EPISODES):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        ended, total = False, 0.0
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            ended = terminated or truncated
            total += float(reward)
        returns.append(total)
    env.close()
    return returns


def train(library: str, task: str, seed: int, steps: int, cleanrl: Path | None) -> tuple[Act, Episodes, str]:
    """Train one seed; return the policy, the training episodes and the version of the library."""
    settings = dict(SETTINGS[library][task])
    torch.set_num_threads(1)
    if library == "cleanrl":
        if cleanrl is None:
            raise SystemExit("cleanrl: give the path of ppo_continuous_action.py at fe8d8a0 by --cleanrl PATH")
        return *_train_cleanrl(cleanrl, task, seed, steps), "fe8d8a0"
    if library == "tianshou":
        return *_train_tianshou(settings, task, seed, steps), import_module("tianshou").__version__
    module = import_module("sb3_contrib" if library == "sb3-trpo" else "stable_baselines3")
    algorithm = getattr(module, library.removeprefix("sb3-").upper())
    return *_train_sb3(algorithm, settings, task, seed, steps), module.__version__


def _train_sb3(algorithm: Any, settings: dict[str, Any], task: str, seed: int, steps: int) -> tuple[Act, Episodes]:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    episodes = Episodes()
    env: Any = make_vec_env(lambda: episodes.make(task), settings.pop("n_envs"), seed=seed)
    if settings.pop("normalize"):
        env = VecNormalize(env, gamma=settings.get("gamma", 0.99))
    policy = dict(settings.pop("policy_kwargs", {}))
    if "activation_fn" in policy:
        policy["activation_fn"] = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}[policy["activation_fn"]]
    model = algorithm("MlpPolicy", env, seed=seed, device="cpu", policy_kwargs=policy, **settings)
    model.learn(steps)

    def act(obs: np.ndarray) -> np.ndarray:
        normalized = env.normalize_obs(obs) if isinstance(env, VecNormalize) else obs
        return model.predict(normalized, deterministic=True)[0]

    return act, episodes


class _OldSyncVectorEnv(gymnasium.vector.SyncVectorEnv):
    """The vector environment of Gymnasium 0.29, which CleanRL is written for: resets in the step that ends."""

    def __init__(self, make: Any) -> None:
        super().__init__(make, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> Any:
        *result, info = super().step(actions)
        return *result, {key: value for key, value in info.items() if key != "final_info"}


class _OldTransformObservation(gymnasium.wrappers.TransformObservation):
    def __init__(self, env: gymnasium.Env, transform: Any) -> None:
        super().__init__(env, transform, env.observation_space)


class _NoWriter:
    """Stands in for TensorBoard's SummaryWriter."""

    def __init__(self, folder: str) -> None: ...

    def add_scalar(self, name: str, value: float, step: int) -> None: ...

    def add_text(self, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def _train_cleanrl(script: Path, task: str, seed: int, steps: int) -> tuple[Act, Episodes]:
    """Run the script unchanged, with the interface of Gymnasium 0.29 and without TensorBoard."""
    episodes = Episodes()
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = _NoWriter  # pyright: ignore[reportAttributeAccessIssue]
    arguments = [str(script), "--env-id", task, "--seed", str(seed), "--total-timesteps", str(steps), "--no-cuda"]
    plain_make = gymnasium.make
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nothing,
        redirect_stdout(nothing),
        patch.dict(sys.modules, {"torch.utils.tensorboard": board}),
        patch.object(sys, "argv", arguments),
        patch.object(gymnasium, "make", lambda name: _Recorded(plain_make(name), episodes)),
        patch.object(gymnasium.vector, "SyncVectorEnv", _OldSyncVectorEnv),
        patch.object(gymnasium.wrappers, "TransformObservation", _OldTransformObservation),
    ):
        script = script.resolve()
        here = Path.cwd()
        os.chdir(folder)
        try:
            names = runpy.run_path(str(script), run_name="__main__")
        finally:
            os.chdir(here)
    env = names["envs"].envs[0]
    low, high = env.unwrapped.action_space.low, env.unwrapped.action_space.high
    while not isinstance(env, gymnasium.wrappers.NormalizeObservation):
        env = env.env
    statistics, actor = env.obs_rms, names["agent"].actor_mean
    scale = np.sqrt(statistics.var + env.epsilon)

    def act(obs: np.ndarray) -> np.ndarray:
        normalized = np.clip((obs - statistics.mean) / scale, -10, 10).astype(np.float32)
        with torch.no_grad():
            return actor(torch.from_numpy(normalized)).numpy().clip(low, high)

    return act, episodes


def _train_tianshou(settings: dict[str, Any], task: str, seed: int, steps: int) -> tuple[Act, Episodes]:
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
    from tianshou.data import Batch, Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv, VectorEnvNormObs
    from tianshou.trainer import OnPolicyTrainerParams

    episodes = Episodes()
    num_envs, collect = settings["num_envs"], settings["collect"]
    envs = VectorEnvNormObs(DummyVectorEnv([lambda: episodes.make(task) for _ in range(num_envs)]))
    envs.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    space = gymnasium.make(task)
    actor, critic = _tianshou_networks(settings, space.observation_space.shape, space.action_space.shape)
    optimizer = AdamOptimizerFactory(lr=settings["learning_rate"])
    # One epoch of the whole run; the schedule counts rollouts.
    rollouts = -(-steps // collect)
    optimizer.with_lr_scheduler_factory(LRSchedulerFactoryLinear(1, rollouts * collect, collect))
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda mean_std: torch.distributions.Independent(torch.distributions.Normal(*mean_std), 1),
        action_scaling=True,
        action_bound_method="clip",
        action_space=space.action_space,
    )
    algorithm = PPO(policy=policy, critic=critic, optim=optimizer, **settings["algorithm"])
    buffer = VectorReplayBuffer(2 * collect, num_envs)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    parameters = OnPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=steps,
        update_step_num_repetitions=settings["repetitions"],
        batch_size=settings["batch_size"],
        collection_step_num_env_steps=collect,
        show_progress=False,
    )
    algorithm.run_training(parameters)
    statistics = envs.get_obs_rms()

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            mean = policy(Batch(obs=statistics.norm(obs[None]), info={})).logits[0].numpy()
        return policy.map_action(mean)[0]

    return act, episodes


def _tianshou_networks(settings: dict[str, Any], obs: Any, action: Any) -> tuple[Any, Any]:
    """Return actor and critic with the initialisation of the example."""
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

    nets = [Net(state_shape=obs, hidden_sizes=settings["hidden"], activation=torch.nn.Tanh) for _ in range(2)]
    actor = ContinuousActorProbabilistic(preprocess_net=nets[0], action_shape=action, unbounded=True)
    critic = ContinuousCritic(preprocess_net=nets[1])
    torch.nn.init.constant_(actor.sigma_param, settings["log_std"])
    for layer in [*actor.modules(), *critic.modules()]:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.orthogonal_(layer.weight, np.sqrt(2))
            torch.nn.init.zeros_(layer.bias)
    for layer in actor.mu.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data.mul_(0.01)
    return actor, critic

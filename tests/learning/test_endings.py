"""The three tasks that tell how episode ends are treated, through every way in which Gymnasium restarts episodes.

The same tasks as tensor environments are among the probes (`test_probes.py`).
"""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import canter.envs.envpool
from canter.algorithms.ppo import PPOConfig
from canter.envs.envpool import EnvPoolEnv
from canter.envs.gymnasium import GymnasiumEnv
from canter.envs.wrappers import FiniteHorizon
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Linear
from canter.training.collector import Collector

GAMMA = 0.99
NUM_ENVS = 16
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]


class Nodes(gymnasium.Env):
    """A walk over one-hot nodes; `visit(node)` returns reward, next node, terminated and truncated."""

    count = 0
    action_space = gymnasium.spaces.Discrete(1)

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(0, 1, (self.count,), np.float32)

    def observe(self):
        return np.eye(self.count, dtype=np.float32)[self.node]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.node = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.node, terminated, truncated = self.visit(self.node)
        return self.observe(), reward, terminated, truncated, {}


class Discriminator(Nodes):
    """S -> A pays 0; A pays 1 and is truncated at B half of the time; B pays 10 and terminates."""

    count = 3

    def visit(self, node):
        if node == 0:
            return 0.0, 1, False, False
        if node == 1:
            return 1.0, 2, False, bool(self.np_random.random() < 0.5)
        return 10.0, 2, True, False


class BothFlags(Nodes):
    """Every step pays 1 and raises both flags."""

    count = 2

    def visit(self, node):
        return 1.0, 1, True, True


class Deadline(Nodes):
    """Five steps that pay 1 each; time is shown and the deadline is reported as a truncation."""

    count = 6

    def visit(self, node):
        return 1.0, node + 1, False, node == 4


def vector_env(task, mode):
    return SyncVectorEnv([task] * NUM_ENVS, autoreset_mode=mode)


def through(path, task, monkeypatch):
    if path == "envpool":
        monkeypatch.setattr(canter.envs.envpool, "_make_pool", lambda *arguments: vector_pool(task))
        return EnvPoolEnv("Task-v0", NUM_ENVS)
    return GymnasiumEnv(vector_env(task, AutoresetMode[path]))


def vector_pool(task):
    """A stand-in for a pool of our own tasks, which EnvPool cannot hold: its rows are those of next-step autoreset."""
    env = vector_env(task, AutoresetMode.NEXT_STEP)
    env.config = {"max_episode_steps": 5}  # it has a limit, as Deadline has
    return env


def values_after_training(env, seed, iterations=40):
    config = PPOConfig(
        horizon=16,
        epochs=4,
        num_minibatches=1,
        gamma=GAMMA,
        optimizer=OptimizerConfig(learning_rate=Linear(2e-2)),
        model=ModelConfig(policy=NetworkConfig(hidden=(16,))),
    )
    algorithm = config.build(env.spec, seed)
    collector = Collector(env, algorithm, seed)
    for iteration in range(iterations):
        algorithm.set_progress(iteration / iterations)
        algorithm.update(collector.collect())
    env.close()
    nodes = torch.eye(env.spec.obs["policy"].shape[0]).unsqueeze(0)
    with torch.no_grad():
        normalised, _ = algorithm.model.critic({"policy": nodes}, (), None)
    return algorithm.model.critic.head.normalizer.inverse(normalised)[0].tolist()


PATHS = ["NEXT_STEP", "SAME_STEP", "DISABLED", "envpool"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("path", PATHS)
def test_truncation_bootstraps_the_true_final_observation(path, seed, monkeypatch):
    value = values_after_training(through(path, Discriminator, monkeypatch), seed)
    # 5.95: taken for a termination; 11.78: V(s_t) for V(s_t+1); 11.67: the next episode leaks in
    assert value[1] == pytest.approx(1 + GAMMA * 10, abs=0.15)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_that_is_both_is_terminated(path, monkeypatch):
    value = values_after_training(through(path, BothFlags, monkeypatch), seed=0)
    assert value[0] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("path", PATHS)
def test_a_deadline_that_is_part_of_the_task_ends_the_value(path, monkeypatch):
    value = values_after_training(FiniteHorizon(through(path, Deadline, monkeypatch)), seed=0)
    expected = [sum(GAMMA**k for k in range(left)) for left in range(5, 0, -1)]
    assert value[:5] == pytest.approx(expected, abs=0.25)


def test_the_same_deadline_undeclared_is_bootstrapped():
    value = values_after_training(GymnasiumEnv(vector_env(Deadline, AutoresetMode.SAME_STEP)), seed=0)
    assert value[4] > 2.0

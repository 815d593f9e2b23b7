"""Milliseconds of one iteration of skrl's PPO on `tensor:null`, as one line of JSON.

    python benchmarks/speed/peers/skrl_bench.py --device cuda --num-envs 4096 --hidden 256 128 64

It logs nothing and saves nothing.
"""
# ruff: noqa: D102 - methods that the library calls by these names

from __future__ import annotations

import argparse
import logging
from typing import Any

import gymnasium
import numpy as np
import skrl
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR
from skrl.trainers.torch import SequentialTrainer
from stopwatch import Stopwatch, arguments, bench
from torch import Tensor, nn

from canter.envs.tensor import tensor_envs


class NullEnv(Wrapper):
    """`tensor:null` for skrl."""

    def __init__(self, num_envs: int, device: str) -> None:
        super().__init__(tensor_envs["null"](num_envs, device))
        spec = self._env.spec
        self._observation_space = gymnasium.spaces.Box(-np.inf, np.inf, spec.obs["policy"].shape, np.float32)
        self._action_space = gymnasium.spaces.Box(-1.0, 1.0, (spec.action.dim,), np.float32)

    @property
    def observation_space(self) -> gymnasium.Space:
        return self._observation_space

    @property
    def action_space(self) -> gymnasium.Space:
        return self._action_space

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        return self._env.reset(0)["policy"], {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        step = self._env.step(actions)
        return step.obs["policy"], step.reward[:, None], step.terminated[:, None], step.truncated[:, None], {}

    def state(self) -> None:
        return None

    def render(self, *args: Any, **kwargs: Any) -> None:
        return None

    def close(self) -> None:
        self._env.close()


def mlp(inputs: int, hidden: list[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ELU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Policy(GaussianMixin, Model):
    """Mean from a network, one learned deviation for each action."""

    def __init__(self, env: NullEnv, hidden: list[int]) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        GaussianMixin.__init__(self)
        self.net = mlp(self.num_observations, hidden, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    """Value of an observation."""

    def __init__(self, env: NullEnv, hidden: list[int]) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, hidden, 1)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


def settings(env: NullEnv, horizon: int) -> PPO_CFG:
    return PPO_CFG(
        rollouts=horizon,
        learning_epochs=5,
        mini_batches=4,
        discount_factor=0.99,
        gae_lambda=0.95,
        learning_rate=1e-3,
        learning_rate_scheduler=KLAdaptiveLR,
        learning_rate_scheduler_kwargs={"kl_threshold": 0.01},
        observation_preprocessor=RunningStandardScaler,
        observation_preprocessor_kwargs={"size": env.observation_space, "device": env.device},
        value_preprocessor=RunningStandardScaler,
        value_preprocessor_kwargs={"size": 1, "device": env.device},
        grad_norm_clip=1.0,
        ratio_clip=0.2,
        value_clip=0.2,
        entropy_loss_scale=0.01,
        value_loss_scale=1.0,
        time_limit_bootstrap=True,
        experiment={"write_interval": 0, "checkpoint_interval": 0},
    )


def train(options: argparse.Namespace, iterations: int, watch: Stopwatch) -> None:
    env = NullEnv(options.num_envs, options.device)
    agent = PPO(
        models={"policy": Policy(env, options.hidden), "value": Value(env, options.hidden)},
        memory=RandomMemory(memory_size=options.horizon, num_envs=env.num_envs, device=env.device),
        cfg=settings(env, options.horizon),
        observation_space=env.observation_space,
        action_space=env.action_space,
        device=env.device,
    )
    agent.update = watch.after(watch.before(agent.update, "collect"), "learn")
    length = {"timesteps": iterations * options.horizon, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=length | {"close_environment_at_exit": False}).train()


if __name__ == "__main__":
    skrl.logger.setLevel(logging.ERROR)
    bench("skrl", "skrl", train, arguments(__doc__))

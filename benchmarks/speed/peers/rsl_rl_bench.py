"""Milliseconds of one iteration of RSL-RL's PPO on `tensor:null`, as one line of JSON.

    python benchmarks/speed/peers/rsl_rl_bench.py --device cuda --num-envs 4096 --hidden 256 128 64

It has no value normalisation, so the critic learns raw returns. It logs nothing, not even to the console.
"""
# ruff: noqa: D102 - methods that the library calls by these names

from __future__ import annotations

import argparse
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from stopwatch import Stopwatch, arguments, bench
from tensordict import TensorDict
from torch import Tensor

from canter.core.specs import Continuous
from canter.envs.tensor import TensorEnv, tensor_envs


class TensorVecEnv(VecEnv):
    """One of Canter's tensor environments for RSL-RL; a choice of two is the sign of one continuous action."""

    def __init__(self, env: TensorEnv, seed: int = 0) -> None:
        self.env, self.num_envs, self.device, self.cfg = env, env.num_envs, env.device, {}
        self.continuous = isinstance(env.spec.action, Continuous)
        self.num_actions = env.spec.action.dim if isinstance(env.spec.action, Continuous) else 1
        self.max_episode_length = 1000
        self.episode_length_buf = torch.zeros(env.num_envs, dtype=torch.long, device=env.device)
        self.obs = env.reset(seed)

    def get_observations(self) -> TensorDict:
        return TensorDict(self.obs, batch_size=[self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        step = self.env.step(actions if self.continuous else (actions[:, 0] > 0).long())
        self.obs = step.obs
        done = step.terminated | step.truncated
        return self.get_observations(), step.reward, done, {"time_outs": step.truncated}


def settings(horizon: int, hidden: list[int]) -> dict[str, Any]:
    network = {"class_name": "MLPModel", "hidden_dims": hidden, "activation": "elu", "obs_normalization": True}
    return {
        "num_steps_per_env": horizon,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": 5,
            "num_mini_batches": 4,
            "gamma": 0.99,
            "lam": 0.95,
            "clip_param": 0.2,
            "entropy_coef": 0.01,
            "learning_rate": 1e-3,
            "schedule": "adaptive",
            "desired_kl": 0.01,
            "max_grad_norm": 1.0,
        },
    }


def train(options: argparse.Namespace, iterations: int, watch: Stopwatch) -> None:
    env = TensorVecEnv(tensor_envs["null"](options.num_envs, options.device))
    runner = OnPolicyRunner(env, settings(options.horizon, options.hidden), device=options.device)
    runner.alg.compute_returns = watch.before(runner.alg.compute_returns, "collect")
    runner.alg.update = watch.after(runner.alg.update, "learn")
    runner.learn(iterations)


if __name__ == "__main__":
    bench("rsl_rl", "rsl-rl-lib", train, arguments(__doc__))

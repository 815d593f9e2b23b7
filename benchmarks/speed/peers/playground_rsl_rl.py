"""Milliseconds of one iteration of RSL-RL's PPO through MuJoCo Playground's own wrapper for torch, as one line of JSON.

    python benchmarks/speed/peers/playground_rsl_rl.py --env playground:Go1JoystickFlatTerrain --num-envs 4096

`RSLRLBraxWrapper` steps the task for RSL-RL, as in Playground's own script `train_rsl_rl.py`. The settings are those of
`rsl_rl_bench.py`, but for observations, which the critic takes from `privileged_state`.
"""
# ruff: noqa: D102 - methods that the library calls by these names

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from mujoco_playground import registry
from mujoco_playground._src.wrapper_torch import RSLRLBraxWrapper
from rsl_rl.runners import OnPolicyRunner
from rsl_rl_bench import settings
from stopwatch import Stopwatch, arguments, bench
from torch import Tensor

EPISODE_LENGTH = 1000


class Wrapped(RSLRLBraxWrapper):
    """Playground's wrapper, and what RSL-RL 5 asks for besides."""

    def __init__(self, env_id: str, num_envs: int, device: str) -> None:
        task = registry.load(env_id.removeprefix("playground:"), config_overrides={"impl": "jax"})
        super().__init__(task, num_envs, 0, EPISODE_LENGTH, 1)
        self.device, self.cfg = device, {}
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)

    def step(self, action: Tensor) -> tuple[Any, Any, Any, dict[str, Any]]:
        obs, reward, done, extras = super().step(action)
        del extras["observations"]  # None unless there are groups, and read by earlier versions of RSL-RL only
        return obs, reward, done, extras


def train(options: argparse.Namespace, iterations: int, watch: Stopwatch) -> None:
    env = Wrapped(options.env, options.num_envs, options.device)
    critic = "privileged_state" if env.asymmetric_obs else "state"
    groups = {"actor": ["state"], "critic": [critic]}
    runner = OnPolicyRunner(
        env, settings(options.horizon, options.hidden) | {"obs_groups": groups}, device=options.device
    )
    runner.alg.compute_returns = watch.before(runner.alg.compute_returns, "collect")
    runner.alg.update = watch.after(runner.alg.update, "learn")
    runner.learn(iterations)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--env", default="playground:Go1JoystickFlatTerrain")
    bench("playground with rsl_rl", "rsl-rl-lib", train, parser)

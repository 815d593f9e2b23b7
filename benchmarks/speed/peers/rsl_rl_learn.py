"""Seconds until RSL-RL solves one of Canter's tensor environments, as one line of JSON.

    python benchmarks/speed/peers/rsl_rl_learn.py tensor:quadrotor --target 400 --seeds 0 1

The same settings as in `rsl_rl_bench.py`. The mean return of the last 100 episodes is looked at once an iteration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import deque
from importlib.metadata import version
from typing import Any

import torch
from rsl_rl.runners import OnPolicyRunner
from rsl_rl_bench import TensorVecEnv, settings
from stopwatch import arguments
from tensordict import TensorDict
from torch import Tensor

from canter.envs.tensor import TensorEnv, tensor_envs


class Reached(Exception):
    """The goal of a run."""


class CountedVecEnv(TensorVecEnv):
    """Adds up returns on the device; the host reads them only when it is asked for them."""

    def __init__(self, env: TensorEnv, seed: int) -> None:
        super().__init__(env, seed)
        self.running = torch.zeros(env.num_envs, device=env.device)
        self.unread: list[Tensor] = []
        self.recent: deque[float] = deque(maxlen=100)
        self.steps = 0

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """As RSL-RL asks for it."""
        obs, reward, done, extras = super().step(actions)
        total = self.running + reward
        self.unread.append(torch.where(done, total, torch.nan))
        self.running = torch.where(done, 0.0, total)
        self.steps += self.num_envs
        return obs, reward, done, extras

    def mean_return(self) -> float | None:
        """Of the last 100 episodes; None before there are as many."""
        totals = torch.cat(self.unread)
        self.recent.extend(totals[~totals.isnan()].tolist()[-100:])
        self.unread.clear()
        return sum(self.recent) / 100 if len(self.recent) == 100 else None


def learn(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(seed)
    env = CountedVecEnv(tensor_envs[options.env.rpartition(":")[2]](options.num_envs, options.device), seed)
    runner = OnPolicyRunner(env, settings(options.horizon, options.hidden), device=options.device)
    update, reached = runner.alg.update, False

    def update_and_look() -> dict[str, float]:
        losses, mean = update(), env.mean_return()
        if mean is not None and mean >= options.target:
            raise Reached
        return losses

    runner.alg.update = update_and_look
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runner.learn(options.max_iterations)
    except Reached:
        reached = True
    mean = round(sum(env.recent) / max(len(env.recent), 1), 1)
    seconds = round(time.perf_counter() - start, 2)
    return {"seed": seed, "reached": reached, "seconds": seconds, "env_steps": env.steps, "return": mean}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("env", help="tensor:NAME")
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max-iterations", type=int, default=300)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    runs = []
    for seed in options.seeds:
        runs.append(learn(options, seed))
        # The last line counts, also if the next seed takes too long.
        print(json.dumps({"library": "rsl_rl", "version": version("rsl-rl-lib"), "runs": runs}), flush=True)


if __name__ == "__main__":
    main()

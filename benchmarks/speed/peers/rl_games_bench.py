"""Milliseconds of one iteration of rl_games' PPO on `tensor:null`, as one line of JSON.

    python benchmarks/speed/peers/rl_games_bench.py --device cuda --num-envs 4096 --hidden 256 128 64

Its network goes through torch.compile, as is its default; --no-compile leaves that out. Its advantages count to the
collection, which is where it computes them.
"""
# ruff: noqa: D102 - methods that the library calls by these names

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import DefaultAlgoObserver
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner
from stopwatch import Stopwatch, arguments, bench
from torch import Tensor

from canter.envs.tensor import tensor_envs


class NullVecEnv(IVecEnv):
    """`tensor:null` for rl_games."""

    def __init__(self, config_name: str, num_actors: int, **options: Any) -> None:
        self.env = tensor_envs["null"](num_actors, options["device"])

    def reset(self) -> dict[str, Tensor]:
        return {"obs": self.env.reset(0)["policy"]}

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        step = self.env.step(actions)
        done = step.terminated | step.truncated
        return {"obs": step.obs["policy"]}, step.reward, done, {"time_outs": step.truncated}

    def get_env_info(self) -> dict[str, Any]:
        spec = self.env.spec
        return {
            "observation_space": gymnasium.spaces.Box(-np.inf, np.inf, spec.obs["policy"].shape, np.float32),
            "action_space": gymnasium.spaces.Box(-1.0, 1.0, (spec.action.dim,), np.float32),
        }


class TimedObserver(DefaultAlgoObserver):
    """Gets hold of the agent before it trains, and times it."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.watch = watch

    def after_init(self, algo: Any) -> None:
        super().after_init(algo)
        algo.play_steps = self.watch.after(algo.play_steps, "collect")
        algo.train_epoch = self.watch.after(algo.train_epoch, "learn")


def network(hidden: list[int]) -> dict[str, Any]:
    nothing = {"name": "default"}
    fixed_std = {"mu_activation": "None", "sigma_activation": "None", "mu_init": nothing, "fixed_sigma": True}
    return {
        "name": "actor_critic",
        "separate": True,
        "space": {"continuous": fixed_std | {"sigma_init": {"name": "const_initializer", "val": 0}}},
        "mlp": {"units": hidden, "activation": "elu", "initializer": nothing, "regularizer": {"name": "None"}},
    }


def settings(options: argparse.Namespace, iterations: int, folder: str) -> dict[str, Any]:
    config = {
        "name": "null",
        "env_name": "null",
        "env_config": {"device": options.device},
        "train_dir": folder,
        "device": options.device,
        "num_actors": options.num_envs,
        "horizon_length": options.horizon,
        "minibatch_size": options.num_envs * options.horizon // 4,
        "mini_epochs": 5,
        "max_epochs": iterations,
        "gamma": 0.99,
        "tau": 0.95,
        "e_clip": 0.2,
        "entropy_coef": 0.01,
        "critic_coef": 1.0,
        "clip_value": False,
        "bound_loss_type": "none",
        "bounds_loss_coef": 0.0,
        "learning_rate": 1e-3,
        "lr_schedule": "adaptive",
        "schedule_type": "legacy",  # after every minibatch
        "kl_threshold": 0.01,
        "grad_norm": 1.0,
        "truncate_grads": True,
        "normalize_input": True,
        "normalize_value": True,
        "normalize_advantage": True,
        "reward_shaper": {"scale_value": 1.0},
        "print_stats": False,
        "save_best_after": 10**9,
        "torch_compile": options.compile,
    }
    return {
        "seed": 1,
        "torch_threads": 0,  # those that are set
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": network(options.hidden),
        "config": config,
    }


def train(options: argparse.Namespace, iterations: int, watch: Stopwatch) -> None:
    # Its messages go to stderr: stdout is for the result.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        runner = Runner(TimedObserver(watch))
        runner.load({"params": settings(options, iterations, str(Path(folder) / "runs"))})
        runner.run({"train": True})


if __name__ == "__main__":
    vecenv.register("null", NullVecEnv)
    env_configurations.register("null", {"env_creator": None, "vecenv_type": "null"})
    parser = arguments(__doc__)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    torch.manual_seed(0)
    bench("rl_games", "rl-games", train, parser)

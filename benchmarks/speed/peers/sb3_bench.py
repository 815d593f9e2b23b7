"""Stable-Baselines3 on a CPU, as one line of JSON.

    python benchmarks/speed/peers/sb3_bench.py HalfCheetah-v5 --num-envs 1 --horizon 2048 --batch-size 64
    python benchmarks/speed/peers/sb3_bench.py CartPole-v1 --target 475

The first form gives steps per second of whole training after two iterations of warm-up. The second trains with the
settings of its zoo until the mean return of the last 100 episodes reaches the target; take the time of the process.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

WARM_UP = 2


class Laps(BaseCallback):
    """When each rollout began."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[float] = []

    def _on_rollout_start(self) -> None:
        self.starts.append(time.perf_counter())

    def _on_step(self) -> bool:
        return True


class Until(BaseCallback):
    """Stops when the last 100 episodes are good enough."""

    def __init__(self, target: float) -> None:
        super().__init__()
        self.target, self.reached = target, False

    def _on_rollout_start(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        self.reached = len(returns) == 100 and sum(returns) / 100 >= self.target

    def _on_step(self) -> bool:
        return not self.reached


def speed(options: argparse.Namespace) -> dict[str, Any]:
    env = VecNormalize(make_vec_env(options.env, n_envs=options.num_envs))
    model = PPO(
        "MlpPolicy", env, n_steps=options.horizon, batch_size=options.batch_size, n_epochs=10, device="cpu", seed=0
    )
    laps, rollout = Laps(), options.horizon * options.num_envs
    model.learn(rollout * (WARM_UP + options.iterations), callback=laps)
    seconds = time.perf_counter() - laps.starts[WARM_UP]
    return {"steps_per_second": round(rollout * options.iterations / seconds, 1)}


def to_target(options: argparse.Namespace) -> dict[str, Any]:
    # rl-baselines3-zoo, hyperparams/ppo.yml: CartPole-v1; its two schedules fall linearly over 100,000 steps.
    model = PPO(
        "MlpPolicy",
        make_vec_env(options.env, n_envs=8),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda left: left * 1e-3,
        clip_range=lambda left: left * 0.2,
        device="cpu",
        seed=options.seed,
    )
    until = Until(options.target)
    model.learn(100_000, callback=until)
    return {"reached": until.reached, "env_steps": model.num_timesteps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--horizon", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = speed(options) if options.target is None else to_target(options)
    print(json.dumps({"library": "Stable-Baselines3", "version": stable_baselines3.__version__} | result))


if __name__ == "__main__":
    main()

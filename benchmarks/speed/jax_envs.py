"""Simulators in JAX: the cost of a step, of a rollout, and how fast and how well policies learn in them.

    python benchmarks/speed/jax_envs.py --device cuda

Writes `results/jax_envs.json`. `step` compares Canter's environment with the same program called from JAX alone and
counts waits of the host; `rollout` compares Canter's collection, by steps and by `execution.mode=scan`, with one in JAX
alone; `go1` is an iteration with Playground's Go1, beside Playground's own wrapper with RSL-RL; `cartpole` is the time
until gymnax's CartPole-v1 is solved, beside `peers/jax_cartpole.py`; `ant` and `ant_by_brax` train Brax's ant for the
same number of steps with Canter and with Brax's own PPO, all seeds at once.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import Harness, Job, main

GO1 = "playground:Go1JoystickFlatTerrain"
ENVS = ["brax:ant", GO1, "gymnax:CartPole-v1"]


def step(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    return {env: bench(harness, options, "step", env) for env in options.envs}


def rollout(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    return {env: bench(harness, options, "rollout", env) for env in options.envs}


def go1(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    same = ("--device", options.device, "--num-envs", options.num_envs, "--iterations", 10)
    return {
        "canter": harness.run(Job("canter", ("jax_bench.py", "iteration", GO1, *same))),
        "rsl_rl": harness.run(Job("rsl_rl", ("peers/playground_rsl_rl.py", "--env", GO1, *same))),
    }


def cartpole(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    same = ("--num-envs", options.num_envs, "--target", 475, "--seeds", *range(options.seeds))
    canter = ("canter_bench.py", "learn", "gymnax:CartPole-v1", "--device", options.device, *same)
    return {
        "canter": harness.run(Job("canter", canter)),
        "jax": harness.run(Job("jax", ("peers/jax_cartpole.py", *same))),
    }


def ant(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    return seeds(harness, options, "canter")


def ant_by_brax(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    return seeds(harness, options, "brax")


def seeds(harness: Harness, options: argparse.Namespace, side: str) -> dict[str, Any]:
    def run(seed: int) -> dict[str, Any]:
        return bench(harness, options, side, "brax:ant", "--total-steps", options.total_steps, "--seed", seed)

    with ThreadPoolExecutor(options.seeds) as pool:
        return dict(zip(map(str, range(options.seeds)), pool.map(run, range(options.seeds)), strict=True))


def bench(harness: Harness, options: argparse.Namespace, command: str, env: str, *extra: Any) -> dict[str, Any]:
    arguments = ("jax_bench.py", command, env, "--device", options.device, "--num-envs", options.num_envs, *extra)
    return harness.run(Job(f"{command} {env}", arguments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--envs", nargs="+", default=ENVS, help="of `step` and `rollout`")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=10_000_000)
    parts = {"step": step, "rollout": rollout, "go1": go1, "cartpole": cartpole, "ant": ant, "ant_by_brax": ant_by_brax}
    main("jax_envs", parts, parser)

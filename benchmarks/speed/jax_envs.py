"""Simulators in JAX: the cost of a step, of a rollout, and how fast and how well policies learn in them.

    python benchmarks/speed/jax_envs.py --device cuda

Writes `results/jax_envs.json`. `step` compares Canter's environment with the same program called from JAX alone and
counts waits of the host; `rollout` compares Canter's collection, by steps and by `execution.mode=scan`, with one in JAX
alone; `cartpole` is the time until gymnax's CartPole-v1 is solved, beside `peers/jax_cartpole.py`; `ant` and
`ant_by_brax` train Brax's ant for the same number of steps with Canter and with Brax's own PPO.
"""

from __future__ import annotations

import argparse
from typing import Any

from harness import Harness, Job, main


def step(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    return {env: bench(harness, options, "step", env) for env in options.envs}


def rollout(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    return {env: bench(harness, options, "rollout", env) for env in options.envs}


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
    extra = ("--total-steps", options.total_steps, "--seed")
    return {str(seed): bench(harness, options, side, "brax:ant", *extra, seed) for seed in range(options.seeds)}


def bench(harness: Harness, options: argparse.Namespace, command: str, env: str, *extra: Any) -> dict[str, Any]:
    arguments = ("jax_bench.py", command, env, "--device", options.device, "--num-envs", options.num_envs, *extra)
    return harness.run(Job(f"{command} {env}", arguments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--envs", nargs="+", default=["brax:ant", "gymnax:CartPole-v1"], help="of `step`, `rollout`")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=10_000_000)
    parts = {"step": step, "rollout": rollout, "cartpole": cartpole, "ant": ant, "ant_by_brax": ant_by_brax}
    main("jax_envs", parts, parser)

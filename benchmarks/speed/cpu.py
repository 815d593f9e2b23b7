"""Canter and its peers on this machine's CPU; writes `results/cpu.json` and prints tables.

    python benchmarks/speed/cpu.py --rounds 3

Each library runs with one thread and with two, in alternation; the tables show the better of both.
"""

from __future__ import annotations

import argparse
from typing import Any

from harness import Harness, Job, main
from table import cpu_tables

THREADS = (1, 2)
SEEDS = {"Canter": range(5), "Stable-Baselines3": range(3)}
TRAINING = {
    "halfcheetah-1": ("HalfCheetah-v5", 1, 2048, 64),
    "halfcheetah-16": ("HalfCheetah-v5", 16, 128, 256),
    "hopper-1": ("Hopper-v5", 1, 2048, 64),
    "pendulum-1": ("Pendulum-v1", 1, 2048, 64),
}
"""Part -> task, environments, steps of a rollout, rows of a minibatch."""


def best_of_threads(harness: Harness, jobs: dict[str, list[Any]], rounds: int) -> dict[str, Any]:
    every = [Job(f"{name}, {n} thr.", arguments, n, 900) for name, arguments in jobs.items() for n in THREADS]
    results = harness.alternate(every, rounds)
    best = {}
    for name in jobs:
        own = [results[f"{name}, {n} thr."] for n in THREADS]
        best[name] = max(own, key=lambda result: result.get("steps_per_second", 0))
        best[name]["by_threads"] = {n: one.get("steps_per_second") for n, one in zip(THREADS, own, strict=True)}
    return best


def training(harness: Harness, rounds: int, part: str) -> dict[str, Any]:
    task, num_envs, horizon, batch = TRAINING[part]
    common = [task, "--num-envs", num_envs, "--horizon", horizon, "--iterations", 3]
    minibatches = num_envs * horizon // batch
    jobs = {
        "Canter": ["canter_bench.py", "train", *common, "--device", "cpu", "--num-minibatches", minibatches],
        "Stable-Baselines3": ["peers/sb3_bench.py", *common, "--batch-size", batch],
    }
    return best_of_threads(harness, jobs, rounds)


def null(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    common = ["--device", "cpu", "--num-envs", 256, "--iterations", 10]
    jobs = {
        "Canter": ["canter_bench.py", "iteration", *common],
        "rsl_rl": ["peers/rsl_rl_bench.py", *common],
        "rl_games": ["peers/rl_games_bench.py", *common],
        "rl_games, not compiled": ["peers/rl_games_bench.py", *common, "--no-compile"],
        "skrl": ["peers/skrl_bench.py", *common],
    }
    return best_of_threads(harness, jobs, options.rounds)


def cartpole(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the shell to a mean return of 475, imports included, for several seeds."""
    scripts = {
        "Canter": (["canter_bench.py", "target", "CartPole-v1", "--target", 475], "--seeds"),
        "Stable-Baselines3": (["peers/sb3_bench.py", "CartPole-v1", "--target", 475], "--seed"),
    }
    results: dict[str, Any] = {name: {"runs": []} for name in scripts}
    for name, (arguments, flag) in scripts.items():
        for seed in SEEDS[name]:
            for threads in THREADS:
                job = Job(f"{name}, seed {seed}", [*arguments, flag, seed], threads)
                results[name]["runs"].append({"seed": seed} | harness.run(job))
    return results


PARTS = {
    **{part: lambda harness, options, part=part: training(harness, options.rounds, part) for part in TRAINING},
    "null": null,
    "cartpole": cartpole,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often every command runs; medians count")
    print(cpu_tables(main("cpu", PARTS, parser)))

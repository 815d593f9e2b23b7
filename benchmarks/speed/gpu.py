"""Canter and its peers on one GPU; writes `results/gpu.json` and prints tables.

    python benchmarks/speed/gpu.py --budget 500

Everything runs within the budget of seconds: what does not fit is left out and said so in the results. --only runs
some of the parts and keeps the results of the others.
"""

from __future__ import annotations

import argparse
from typing import Any

from harness import Harness, Job, main
from table import gpu_tables

WIDTHS = {"[256, 128, 64]": (256, 128, 64), "[512, 256, 128]": (512, 256, 128)}
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
GOALS = {"tensor:cartpole": 475, "tensor:quadrotor": 350}
"""Mean return of 100 episodes at which a task counts as learned."""


def jobs_of(common: list[Any]) -> list[Job]:
    """Every trainer on the same work; where nothing is compiled, host synchronisations are counted as well."""
    counted = [*common, "--syncs"]
    return [
        Job("Canter graph", ["canter_bench.py", "iteration", *counted, "--mode", "graph"], limit=60),
        Job("rsl_rl", ["peers/rsl_rl_bench.py", *counted], limit=60),
        Job("skrl", ["peers/skrl_bench.py", *counted], limit=60),
        Job("rl_games, not compiled", ["peers/rl_games_bench.py", *counted, "--no-compile"], limit=60),
        Job("Canter eager", ["canter_bench.py", "iteration", *counted, "--mode", "eager"], limit=60),
        Job("pure JAX", ["peers/jax_ppo.py", *common], limit=60),
        Job("rl_games", ["peers/rl_games_bench.py", *common], limit=100),
    ]


def speed(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    """One iteration of 4096 environments x 24 steps, with networks of two widths."""
    results = {}
    for label, width in WIDTHS.items():
        common = ["--num-envs", options.num_envs, "--hidden", *width, "--device", options.device]
        before = harness.before.get("speed", {}).get(label)
        results[label] = harness.alternate(jobs_of(common), options.rounds, before)
    return results


def kinds(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    """Other policies: an LSTM over whole rollouts, and a choice between two actions."""
    common = ["--device", options.device, "--num-envs", options.num_envs, "--iterations", 10]
    scripts = {"LSTM": ["--memory", 128], "discrete": ["tensor:cartpole"]}
    jobs = [
        Job(f"{kind} {mode}", ["canter_bench.py", "iteration", *more, *common, "--mode", mode], limit=40)
        for kind, more in scripts.items()
        for mode in ("eager", "graph")
    ]
    return harness.alternate(jobs, 1, harness.before.get("kinds"))


def scale(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of an iteration against the number of environments."""
    sizes = [size for size in SIZES if size <= 16 * options.num_envs]
    common = ["--device", options.device, "--iterations", 10, "--num-envs"]
    before = harness.before.get("scale", {})
    canter = Job("Canter graph", ["canter_bench.py", "iteration", "--mode", "graph", *common, *sizes], limit=75)
    own = harness.alternate([canter], 1, before)["Canter graph"]
    jobs = {size: Job(f"rsl_rl {size}", ["peers/rsl_rl_bench.py", *common, size], limit=40) for size in sizes[1::2]}
    found = harness.alternate(list(jobs.values()), 1)
    peer = {str(size): found[job.name] for size, job in jobs.items() if job.name in found}
    return {"Canter graph": own.get("num_envs", own), "rsl_rl": before.get("rsl_rl", {}) | peer}


def learn(harness: Harness, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a task is learned, start-up of the run included."""
    results: dict[str, Any] = {}
    for task, goal in GOALS.items():
        common = [task, "--target", goal, "--device", options.device, "--num-envs", options.num_envs, "--seeds"]
        canter = Job("Canter graph", ["canter_bench.py", "learn", *common, 0, 1, 2, "--mode", "graph"], limit=60)
        peer = Job("rsl_rl", ["peers/rsl_rl_learn.py", *common, 0, 1], limit=100)
        results[task] = {"goal": goal} | harness.alternate([canter, peer], 1, harness.before.get("learn", {}).get(task))
    return results


PARTS = {"speed": speed, "learn": learn, "scale": scale, "kinds": kinds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2, help="how often the speed of each is measured")
    parser.add_argument("--jobs", nargs="+", default=(), help="run only jobs of these names; others keep their results")
    print(gpu_tables(main("gpu", PARTS, parser)))

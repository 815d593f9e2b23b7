"""Train the presets, seed by seed.

    python benchmarks/learning/run.py                      every task that is not finished yet
    python benchmarks/learning/run.py Hopper-v5 --seeds 5  one task, seeds 0 to 4

One JSON file per task in `results/`, written after every run; runs that are in it are not repeated. Two numbers per
seed: `training_return`, the mean of the last 100 training episodes (the policy acts with its noise), and
`evaluation_return`, the mean of 50 new episodes without noise. `table.py` prints them all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import gymnasium
import torch

import canter
from canter.core.seeding import derive_seed
from canter.training.trainer import train

RESULTS = Path(__file__).parent / "results"
EVAL_EPISODES = 50
CURVE_POINTS = 40


def task(seeds: int, threshold: float) -> dict[str, Any]:
    return {"seeds": seeds, "threshold": threshold}


# Seeds and the return to reach: for classic control as required, for MuJoCo the best published PPO at 1 M steps.
TASKS = {
    "CartPole-v1": task(10, 475),
    "Pendulum-v1": task(5, -200),
    "Acrobot-v1": task(5, -100),
    "MountainCarContinuous-v0": task(5, 90),
    "Hopper-v5": task(10, 2600),
    "Walker2d-v5": task(10, 3600),
    "HalfCheetah-v5": task(10, 5800),
    "Ant-v5": task(10, 3300),
    "Swimmer-v5": task(3, 280),
    "InvertedDoublePendulum-v5": task(3, 9200),
    "Humanoid-v5": task(3, 787),
    # rl_games with EnvPool at about 32 M steps.
    "envpool:CheetahRun-v1": task(1, 685),
    "envpool:WalkerWalk-v1": task(1, 917),
    "envpool:WalkerRun-v1": task(1, 702),
}


def run(env_id: str, seed: int, number: int) -> dict[str, Any]:
    """Train with the preset and evaluate; everything worth keeping of one run, the `number`-th of all."""
    if hasattr(os, "sched_setaffinity"):  # one core for each run, environments included
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    preset = canter.preset_for(env_id)
    assert preset is not None
    config = replace(preset, seed=seed)
    threshold, every = TASKS[env_id]["threshold"], config.total_steps / CURVE_POINTS
    curve: list[list[float | None]] = []
    solved: list[tuple[int, float]] = []

    def follow(report: canter.Report) -> None:
        seconds = round(time.perf_counter() - start, 1)
        if report.env_steps >= len(curve) * every:
            curve.append([report.env_steps, report.return_, seconds])
        if not solved and report.episodes >= 100 and (report.return_ or float("-inf")) >= threshold:
            solved.append((report.env_steps, seconds))
        last.append(report)
        del last[:-1]

    last: list[canter.Report] = []
    start = time.perf_counter()
    algorithm = train(config, follow)
    seconds = time.perf_counter() - start
    env = config.env.build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, EVAL_EPISODES, derive_seed(seed, "eval"))
    env.close()
    return {
        "seed": seed,
        "training_return": last[0].return_,
        "evaluation_return": evaluation.mean,
        "steps_to_threshold": solved[0][0] if solved else None,
        "seconds_to_threshold": solved[0][1] if solved else None,
        "env_steps": last[0].env_steps,
        "seconds": round(seconds, 1),
        "curve": curve,
    }


def file_of(env_id: str) -> Path:
    """Return the file of a task's results."""
    return RESULTS / f"{env_id.replace(':', '_')}.json"


def finished(env_id: str) -> dict[str, Any]:
    """The task's file, or an empty one with what is needed to repeat it."""
    path = file_of(env_id)
    if path.exists():
        return json.loads(path.read_text())
    return {
        "env": env_id,
        "command": f"python benchmarks/learning/run.py {env_id}",
        "threshold": TASKS[env_id]["threshold"],
        "config": asdict(canter.preset_for(env_id) or canter.TrainConfig()),
        "versions": {"canter": canter.__version__, "torch": torch.__version__, "gymnasium": gymnasium.__version__},
        "machine": f"{platform.machine()}, one core per run",
        "runs": [],
    }


def save(env_id: str, result: dict[str, Any]) -> None:
    document = finished(env_id)
    document["runs"] = sorted([*document["runs"], result], key=lambda entry: entry["seed"])
    document["date"] = date.today().isoformat()
    RESULTS.mkdir(exist_ok=True)
    file_of(env_id).write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help="environment ids; all by default")
    parser.add_argument("--seeds", type=int, help="how many seeds, from 0")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    wanted = [
        (env_id, seed)
        for env_id in arguments.tasks
        for seed in range(arguments.seeds or TASKS[env_id]["seeds"])
        if seed not in [entry["seed"] for entry in finished(env_id)["runs"]]
    ]
    with ProcessPoolExecutor(arguments.workers, max_tasks_per_child=1) as pool:
        futures = [(env_id, pool.submit(run, env_id, seed, number)) for number, (env_id, seed) in enumerate(wanted)]
        for env_id, future in futures:
            result = future.result()
            save(env_id, result)
            print(
                f"{env_id} seed {result['seed']}: {result['training_return']:.1f} in {result['seconds']} s", flush=True
            )


if __name__ == "__main__":
    main()

"""Train SAC, seed by seed, several runs at a time, and record returns by steps and by time.

    python benchmarks/learning/sac.py Pendulum-v1 --seeds 5
    python benchmarks/learning/sac.py HalfCheetah-v5 Hopper-v5 Walker2d-v5 --seeds 3 --workers 9 --device cuda
    python benchmarks/learning/sac.py HalfCheetah-v5 --seeds 3 --device cuda --preset HalfCheetah-sac-large
    python benchmarks/learning/sac.py tensor:quadrotor --device cuda --workers 1 --preset quadrotor-sac-large

`--preset` names the settings; by default it is `TASK-sac`, the plain one, on either device. `--algorithm ppo` runs
PPO's preset in the same way, for comparison. One JSON file per task and preset in `results/sac/`, written after every
run; runs that are in it are not repeated. The curve is of evaluations: the mean of 10 new episodes without noise, of
which the time is not counted. `evaluation_return` is the mean of 50 at the end.
`--limit-seconds` ends each run early; its steps are in `env_steps`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium
import torch

import canter
from canter.config.presets import name_for
from canter.core.seeding import derive_seed

RESULTS = Path(__file__).parent / "results" / "sac"
CURVE_EPISODES, EVAL_EPISODES = 10, 50
MAX_EVAL_STEPS = 20_000

# Return to reach: Pendulum as required; MuJoCo as published for SAC at 1 M steps (see docs/algorithms/sac.md).
THRESHOLDS = {"Pendulum-v1": -200.0, "HalfCheetah-v5": 10_000.0, "Hopper-v5": 2_787.0, "Walker2d-v5": 4_536.0}


def settings(task: dict[str, Any]) -> canter.TrainConfig:
    """The preset with what the command line changes."""
    preset = canter.presets[task["preset"]]
    changes: dict[str, Any] = {"env": replace(preset.env, id=task["env"]), "device": task["device"]}
    if task["steps"]:
        changes["total_steps"] = task["steps"]
    return replace(preset, seed=task["seed"], **changes)


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluating along the way; everything worth keeping of one run."""
    torch.set_num_threads(1)
    config, seed = settings(task), task["seed"]
    assert config.total_steps is not None
    curve: list[list[float]] = []
    trained = 0.0
    with canter.Trainer(config) as trainer:
        per_iteration = trainer.algorithm.horizon * config.env.num_envs
        chunk = max(1, round(config.total_steps / task["points"] / per_iteration))
        while not trainer.finished and trained < task["limit"]:
            start = time.perf_counter()
            trainer.learn(chunk)
            trained += time.perf_counter() - start
            score = evaluate(config, trainer.algorithm.policy, CURVE_EPISODES, seed)
            curve.append([trainer.progress.env_steps, round(score, 2), round(trained, 1)])
            name = f"{task['env']} {task['preset']} seed {seed}"
            print(f"{name}: {score:.1f} after {trainer.progress.env_steps}", flush=True)
        policy = trainer.algorithm.policy
        env_steps = trainer.progress.env_steps
        recent = trainer.progress.recent_return
        final = evaluate(config, policy, EVAL_EPISODES, seed)
    threshold = THRESHOLDS.get(task["env"])
    reached = [] if threshold is None else [steps for steps, score, _ in curve if score >= threshold]
    return {
        "seed": seed,
        "training_return": recent,
        "evaluation_return": final,
        "steps_to_threshold": reached[0] if reached else None,
        "env_steps": env_steps,
        "seconds": round(trained, 1),
        "curve": curve,
    }


def evaluate(config: canter.TrainConfig, policy: canter.Policy, episodes: int, seed: int) -> float:
    env = replace(config.env, num_envs=min(episodes, max(config.env.num_envs, 10))).build(config.device)
    try:
        return canter.evaluate(policy, env, episodes, derive_seed(seed, "eval"), max_steps=MAX_EVAL_STEPS).mean
    finally:
        env.close()


def document(task: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The file of a task and preset, and what is in it; at first what is needed to repeat it."""
    steps = f"-{task['steps']}" if task["steps"] else ""
    path = RESULTS / f"{task['env'].replace(':', '_')}-{task['preset']}{steps}.json"
    if path.exists():
        return path, json.loads(path.read_text())
    return path, {
        "env": task["env"],
        "preset": task["preset"],
        "command": f"python benchmarks/learning/sac.py {task['env']} --preset {task['preset']}"
        + f" --device {task['device']}"
        + (f" --steps {task['steps']}" if task["steps"] else ""),
        "threshold": THRESHOLDS.get(task["env"]),
        "config": asdict(settings(task)),
        "versions": {"canter": canter.__version__, "torch": torch.__version__, "gymnasium": gymnasium.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores"
        + (f", {torch.cuda.get_device_name()}" if task["device"].startswith("cuda") else ""),
        "curve": "steps, mean return of 10 episodes without noise, seconds of training",
        "runs": [],
    }


def save(task: dict[str, Any], result: dict[str, Any]) -> None:
    path, content = document(task)
    content["runs"] = sorted([*content["runs"], result], key=lambda entry: entry["seed"])
    content["date"] = date.today().isoformat()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help="environment ids")
    parser.add_argument("--algorithm", default="sac")
    parser.add_argument("--preset", help="name of the settings, for all tasks")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, help="transitions, instead of the preset's")
    parser.add_argument("--points", type=int, default=40, help="of the curve, each ten episodes")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="of training, for each run")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    wanted = []
    for seed in range(arguments.seeds):
        for env_id in arguments.tasks:
            preset = arguments.preset or name_for(env_id, arguments.algorithm)
            about = {"env": env_id, "preset": preset, "device": arguments.device, "steps": arguments.steps}
            task = about | {"seed": seed, "points": arguments.points, "limit": arguments.limit_seconds}
            if seed not in [entry["seed"] for entry in document(task)[1]["runs"]]:
                wanted.append(task)
    # Processes of their own, started afresh: CUDA does not survive a fork.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(run, task): task for task in wanted}
        for future in as_completed(futures):
            task, result = futures[future], future.result()
            save(task, result)
            print(
                f"{task['env']} {task['preset']} seed {task['seed']}: {result['evaluation_return']:.1f} "
                f"in {result['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

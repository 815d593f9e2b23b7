"""Wall time of populations beside a single run, on tensor environments.

    python benchmarks/speed/population.py [--device cuda] [--members 1 8 64] [--iterations 100]

Each line is a run of its own: an ordinary run with its fastest engine, then populations of members with
the same settings but for the learning rate. `run` is the wall time of a run of that many iterations with
its start (building, warm-up, capture), `iteration` that of one more after it; both are also shown as
multiples of the single run, with the shares of collecting and learning in an iteration. JSON goes to
`results/population.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import canter
from canter.app.experiments.population import population_config
from canter.app.experiments.settings import base_config

RESULTS = Path(__file__).parent / "results" / "population.json"
TASKS = ("tensor:cartpole", "tensor:quadrotor")


def settings(task: str, device: str, num_envs: int) -> canter.TrainConfig:
    """Return the settings of a single run: the task's preset, or the defaults, with more environments."""
    config, _ = base_config(task, None, None, device)
    execution = replace(config.execution, threads=1 if device == "cpu" else None)
    env = replace(config.env, num_envs=num_envs)
    return replace(config, device=device, env=env, total_steps=10**9, log_every=10, execution=execution)


def wait(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def measure(config: canter.TrainConfig, iterations: int) -> dict[str, float]:
    """Return the seconds of a run and of its parts."""
    start = time.perf_counter()
    with canter.Trainer(config) as trainer:
        trainer.learn(iterations)
        wait(config.device)
        whole = time.perf_counter() - start
        more = max(iterations // 2, 3)
        start = time.perf_counter()
        trainer.learn(more)
        wait(config.device)
        each = (time.perf_counter() - start) / more
        parts = {"collect": 0.0, "update": 0.0}
        for _ in range(more):
            wait(config.device)
            start = time.perf_counter()
            rollout = trainer.programs.collect()
            wait(config.device)
            middle = time.perf_counter()
            trainer.programs.update(rollout)
            wait(config.device)
            parts["collect"] += (middle - start) / more
            parts["update"] += (time.perf_counter() - middle) / more
    return {"run": whole, "iteration": each, **parts}


def main() -> None:
    """Measure all sizes on all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--num-envs", type=int, default=64, help="environments of each member")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    about = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    document: dict[str, Any] = {"device": about, "num_envs": options.num_envs, "tasks": {}}
    for task in options.tasks:
        config = settings(task, options.device, options.num_envs)
        single = measure(config, options.iterations)
        rows = document["tasks"].setdefault(task, {"single": single})
        print(f"{task} single: {shown(single, single)}", flush=True)
        for count in options.members:
            members = [{"learning_rate": 1e-3 * (1 + number / count)} for number in range(count)]
            rows[str(count)] = measure(population_config(config, members), options.iterations)
            print(f"{task} {count} members: {shown(rows[str(count)], single)}", flush=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")


def shown(found: dict[str, float], single: dict[str, float]) -> str:
    """Return the seconds of a run in words, with multiples of those of the single run."""
    return ", ".join(f"{name} {seconds:.4f} s ({seconds / single[name]:.2f}x)" for name, seconds in found.items())


if __name__ == "__main__":
    main()

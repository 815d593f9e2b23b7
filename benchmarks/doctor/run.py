"""Planted faults and healthy runs: what `canter doctor` finds, when, and false alarms.

    python benchmarks/doctor/run.py record --seeds 0..2     train; finished runs are kept
    python benchmarks/doctor/run.py judge --seeds 0..2      apply the rules to the recorded streams

Streams (settings and rows of the log) go to --streams; `judge` writes results.json next to this file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch

from canter import Trainer
from canter.app.experiments.settings import base_config, with_overrides
from canter.config import TrainConfig
from canter.core.plain import to_plain
from canter.core.registry import UserError
from canter.runs.records import flatten
from faults import FAULTS, Fault, FaultyEnv

HERE = Path(__file__).parent
QUADROTOR = {"env.num_envs": 64, "algorithm.horizon": 32, "algorithm.optimizer.learning_rate": 1e-3}
QUADROTOR |= {"algorithm.epochs": 5, "algorithm.model.std.initial": 0.5}
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"total_steps": 60_000},
    "Pendulum-v1": {"total_steps": 160_000},
    "Hopper-v5": {"total_steps": 200_000},
    "tensor:quadrotor": {"total_steps": 400_000, **QUADROTOR},
    "Acrobot-v1": {"total_steps": 120_000},
    "tensor:cartpole": {"total_steps": 100_000},
}
MORE_ENVS = {"CartPole-v1": 16, "Pendulum-v1": 16, "Hopper-v5": 16}
"""A broken environment is one of 16 at least."""


def config_of(task: str, name: str, seed: int) -> TrainConfig:
    """Return the settings of a run with a fault."""
    fault = FAULTS[name]
    config, _ = base_config(task, None)
    settings = {**TASKS[task], **fault.settings, "seed": seed}
    if name == "broken env" and task in MORE_ENVS:
        settings |= {"env.num_envs": MORE_ENVS[task], "algorithm.horizon": config.algorithm.horizon // 2}
    if "algorithm.critic_optimizer" in settings:
        section = to_plain(config.algorithm.optimizer) | settings.pop("algorithm.critic_optimizer")
        settings |= {f"algorithm.critic_optimizer.{key}": value for key, value in section.items()}
    config = with_overrides(config, settings)
    if fault.rate != 1.0:
        rate = to_plain(config.algorithm.optimizer.learning_rate)
        key = "start" if "start" in rate else "value"
        rate[key] *= fault.rate
        config = with_overrides(config, {"algorithm.optimizer.learning_rate": rate})
    return config


def record(task: str, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train with a fault; return settings and rows, or the refusal."""
    fault: Fault = FAULTS[name]
    rows: list[dict[str, Any]] = []
    try:
        config = config_of(task, name, seed)
        settings = dict(flatten(to_plain(config)))
        env = FaultyEnv(config.env.build("cpu"), fault.action, fault.step)
        torch.manual_seed(seed)
        with Trainer(config, lambda report: rows.append(dict(report.row())) and None, env=env) as trainer:
            trainer.learn()
        env.close()
    except (UserError, ValueError) as error:
        return {"refused": str(error)}
    return {"settings": settings, "rows": rows}


def seeds_of(text: str) -> list[int]:
    """Return the seeds of `0..2` or `5`."""
    first, _, last = text.partition("..")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    """Record or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "judge"))
    parser.add_argument("--streams", type=Path, default=Path("doctor-streams"))
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS)[:4])
    parser.add_argument("--only", nargs="+", default=list(FAULTS), help="faults")
    arguments = parser.parse_args()
    arguments.streams.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for name in arguments.only:
                file = f"{task}-{name}-{seed}.json.gz"
                path = arguments.streams / file.replace(":", "_").replace(" ", "_").replace("/", "per")
                if path.exists():
                    continue
                start = time.perf_counter()
                result = record(task, name, seed, arguments.streams)
                path.write_bytes(gzip.compress(json.dumps(result).encode()))
                print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

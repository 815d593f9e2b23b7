"""Planted faults and healthy runs: what `canter doctor` finds, when, and false alarms.

    python benchmarks/doctor/run.py record --seeds 0..2     train; finished runs are kept
    python benchmarks/doctor/run.py judge --seeds 0..2      apply the rules to what was recorded
    python benchmarks/doctor/run.py store --seeds 100       write the logs that the tests read

Streams (settings and rows of the log) go to --streams. A run is diagnosed as it is while it trains: after
each look, with the rows up to there. `judge` writes results.json next to this file. Thresholds were chosen
on seed 100.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from canter import Trainer
from canter.algorithms import doctor
from canter.algorithms.doctor.findings import Signals, diagnose_signals
from canter.algorithms.doctor.ppo import PPO_RULES
from canter.algorithms.doctor.task import TASK_RULES
from canter.app.experiments.settings import base_config, with_overrides
from canter.config import TrainConfig
from canter.core.plain import to_plain
from canter.core.registry import UserError
from canter.runs.records import flatten
from faults import FAULTS, HEALTHY, Fault, FaultyEnv

HERE = Path(__file__).parent
STORED = HERE.parents[1] / "tests/algorithms/doctor/streams.json.gz"
RULES = Path(doctor.__file__).parent
LOOK = "doctor/return_std"
"""Metric of the rows at which a running run is diagnosed."""
QUADROTOR = {"env.num_envs": 64, "algorithm.horizon": 32, "algorithm.optimizer.learning_rate": 1e-3}
QUADROTOR |= {"algorithm.epochs": 5, "algorithm.model.std.initial": 0.5}
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"total_steps": 60_000},
    "Pendulum-v1": {"total_steps": 160_000},
    "Hopper-v5": {"total_steps": 200_000},
    "tensor:quadrotor": {"total_steps": 400_000, **QUADROTOR},
    "Acrobot-v1": {"total_steps": 120_000},
    "MountainCarContinuous-v0": {"total_steps": 100_000},
    "LunarLander-v3": {"total_steps": 150_000},
    "tensor:rps": {},
    "tensor:rendezvous": {},
}
CONTINUOUS = ("std tiny",)
"""Faults of continuous actions."""
DISCRETE = ("CartPole-v1",)
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


def record(task: str, name: str, seed: int) -> dict[str, Any]:
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


def stream_file(folder: Path, task: str, name: str, seed: int) -> Path:
    """Return the file of a stream."""
    file = f"{task}-{name}-{seed}.json.gz"
    return folder / file.replace(":", "_").replace(" ", "_").replace("/", "per")


def read_stream(path: Path) -> dict[str, Any]:
    """Return a recorded stream."""
    return json.loads(gzip.decompress(path.read_bytes()))


def judge_stream(name: str, stream: dict[str, Any]) -> dict[str, Any]:
    """Return the rules that were found and when, and whether that is right."""
    wanted = FAULTS[name].rules
    if "refused" in stream:
        return {"refused": stream["refused"].partition(":")[0], "right": None if name == HEALTHY else True, "at": 0.0}
    rows = stream["rows"]
    found: dict[str, float] = {}
    for end, row in enumerate(rows, 1):
        if LOOK in row or end == len(rows):
            for finding in diagnose_signals(Signals(stream["settings"], rows[:end]), (TASK_RULES, PPO_RULES)):
                found.setdefault(finding.rule, row["env_steps"] / stream["settings"]["total_steps"])
    times = [at for rule, at in found.items() if rule in wanted]
    return {"found": found, "right": bool(times) if wanted else not found, "at": min(times, default=None)}


def judge(arguments: argparse.Namespace) -> None:
    """Judge all recorded streams of the chosen seeds, print a table and write results.json."""
    results: dict[str, Any] = {}
    for name in arguments.only:
        for task in arguments.tasks:
            for seed in arguments.seeds:
                path = stream_file(arguments.streams, task, name, seed)
                if path.exists() and not (name in CONTINUOUS and task in DISCRETE):
                    results[f"{name} | {task} | {seed}"] = judge_stream(name, read_stream(path))
    if not results:
        sys.exit(f"no streams of these runs in {arguments.streams}; run `record` first")
    healthy = [result for key, result in results.items() if key.startswith(f"{HEALTHY} |")]
    faulty = [result for key, result in results.items() if not key.startswith(f"{HEALTHY} |")]
    found = [result["at"] for result in faulty if result["right"]]
    summary = {
        "healthy_runs": len(healthy),
        "false_alarms": sum(not result["right"] for result in healthy),
        "faulty_runs": len(faulty),
        "found": len(found),
        "median_fraction_of_budget": statistics.median(found) if found else None,
    }
    for name in arguments.only:
        cells = {
            task: [results.get(f"{name} | {task} | {seed}") for seed in arguments.seeds] for task in arguments.tasks
        }
        counts = [
            f"{sum(bool(cell['right']) for cell in row if cell)}/{sum(cell is not None for cell in row)}"
            for row in cells.values()
        ]
        print(f"| {name} | {' | '.join(counts)} |")
    print(json.dumps(summary))
    (HERE / "results.json").write_text(json.dumps({"summary": summary, "runs": results}, indent=1) + "\n")


def store(arguments: argparse.Namespace) -> None:
    """Write one faulty run of each rule and all healthy runs, with the metrics that rules read."""
    metrics = set(re.findall(r'"((?:[a-z_]+/)?[a-z_]+)"', "".join(path.read_text() for path in RULES.glob("*.py"))))
    kept = ("total_steps", "env.finite_horizon", "success.", "until.", "self_play.", "algorithm.")

    def shorten(stream: dict[str, Any], title: str) -> dict[str, Any]:
        settings = {key: x for key, x in stream["settings"].items() if key.startswith(kept) and x not in (None, {}, [])}
        rows = [
            {
                name: float(f"{x:.4g}") if isinstance(x, float) else x
                for name, x in row.items()
                if x is not None and (name in metrics or name.startswith("optim/learning_rate"))
            }
            for row in stream["rows"]
        ]
        return {"name": title, "settings": settings, "rows": rows}

    content: dict[str, Any] = {"faulty": {}, "healthy": []}
    for path in sorted(arguments.streams.glob(f"*-{HEALTHY}-*.json.gz")):
        content["healthy"].append(shorten(read_stream(path), path.name.removesuffix(".json.gz")))
    for name, fault in FAULTS.items():
        for task in arguments.tasks:
            path = stream_file(arguments.streams, task, name, arguments.seeds[0])
            missing = fault.rules and fault.rules[0] not in content["faulty"] and path.exists()
            if missing and judge_stream(name, stream := read_stream(path))["right"] and "rows" in stream:
                content["faulty"][fault.rules[0]] = shorten(stream, path.name.removesuffix(".json.gz"))
    STORED.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


def seeds_of(text: str) -> list[int]:
    """Return the seeds of `0..2` or `5`."""
    first, _, last = text.partition("..")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    """Record or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "judge", "store"))
    parser.add_argument("--streams", type=Path, default=Path("doctor-streams"))
    parser.add_argument("--seeds", type=seeds_of, default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=list(FAULTS), help="faults")
    arguments = parser.parse_args()
    if arguments.what != "record":
        {"judge": judge, "store": store}[arguments.what](arguments)
        return
    arguments.streams.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for name in arguments.only:
                path = stream_file(arguments.streams, task, name, seed)
                if path.exists():
                    continue
                start = time.perf_counter()
                path.write_bytes(gzip.compress(json.dumps(record(task, name, seed)).encode()))
                print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

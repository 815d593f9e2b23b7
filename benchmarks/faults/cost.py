"""What it costs to be ready for a failure: the share of an iteration that keeps the last good state and looks for NaN.

python benchmarks/faults/cost.py            writes cost.json beside it

Each share is one part of a run's processor time. All cases are run several times in turn, and the median is told, with
the smallest and the largest.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import canter
from canter.core.machine import describe_machine, describe_versions

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "HalfCheetah-v5, 1 environment": (
        {"id": "HalfCheetah-v5", "num_envs": 1},
        {"horizon": 2048, "epochs": 10, "num_minibatches": 32},
        4,
    ),
    "CartPole-v1, 8 environments": (
        {"id": "CartPole-v1", "num_envs": 8},
        {"horizon": 128, "epochs": 4, "num_minibatches": 4},
        20,
    ),
    "tensor:quadrotor, 1,024 environments": (
        {"id": "tensor:quadrotor", "num_envs": 1024},
        {"horizon": 16, "epochs": 4, "num_minibatches": 4},
        4,
    ),
}
"""Environment, algorithm and iterations that are timed."""
REPEATS = 5


def shares(env: dict[str, Any], algorithm: dict[str, Any], iterations: int) -> dict[str, float]:
    """Processor time in ms an iteration, and what part of it is for failures, after two that are not counted.

    `before` keeps random states and the states of the environments, so that a failure costs one rollout; `search` looks
    for NaN in a rollout before anything is learned from it; `after` copies the state where everything in it is finite,
    so that the black box can begin with it.
    """
    config = canter.TrainConfig(env=canter.EnvConfig(**env), algorithm=canter.PPOConfig(**algorithm))
    spent: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.process_time()
            result = function(*args)
            spent[name] = spent.get(name, 0.0) + time.process_time() - start
            return result

        return call

    with canter.Trainer(config) as trainer:
        rollback = trainer.guard.rollback
        tracker = trainer.collector.tracker
        tracker.search = timed("search", tracker.search)
        rollback.stage = timed("before", rollback.stage)
        rollback.snapshot = timed("after", rollback.snapshot)
        rollback.commit = timed("after", rollback.commit)
        trainer.programs = config.execution.prepare(trainer.collector, trainer.algorithm, rollback.snapshot)
        trainer.learn(2)
        spent.clear()
        start = time.process_time()
        trainer.learn(iterations)
        whole = time.process_time() - start
    parts = {f"share {name}": seconds / whole for name, seconds in spent.items()}
    return {"iteration_ms": 1000 * whole / iterations} | parts | {"share in all": sum(parts.values())}


def summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Median, smallest and largest of each figure."""
    figures = {key: sorted(run[key] for run in runs) for key in runs[0]}
    return {key: [round(x, 5) for x in (median(found), found[0], found[-1])] for key, found in figures.items()}


def main() -> None:
    runs = [{name: shares(*case) for name, case in CASES.items()} for _ in range(REPEATS)]
    cases = {name: summary([run[name] for run in runs]) for name in CASES}
    document = {"command": "python benchmarks/faults/cost.py", "machine": describe_machine()}
    document |= {"versions": describe_versions(), "cases": cases}
    Path(__file__).with_name("cost.json").write_text(json.dumps(document, indent=1) + "\n")
    for name, found in cases.items():
        print(name, found)


if __name__ == "__main__":
    main()

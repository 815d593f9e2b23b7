"""Training with recurrent networks on a CPU: the native engine beside the one by autograd, in one run.

    python benchmarks/speed/recurrent.py [--rounds 5] [--cases CartPole-v1 HalfCheetah-v5]

Both engines train the same task with one thread; their iterations take turns, so that what else runs on the machine
meets both alike. "clock" is the time of the fastest iteration, "processor" the least processor time, which other
programs disturb less; "without environment" leaves out the time of the simulator. JSON goes to
`results/recurrent_cpu.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import canter
from canter.engines.choose import EngineName
from canter.nn.rnn import RNNConfig
from canter.training.execution import ExecutionConfig
from canter.training.progress import Report

RESULTS = Path(__file__).parent / "results" / "recurrent_cpu.json"
ENGINES: tuple[EngineName, ...] = ("autograd", "native")
WARM_UP = 1
"""Iterations of each engine that do not count."""

Cell = Literal["lstm", "gru", "none"]


@dataclass(frozen=True)
class Case:
    """A task with PPO's default settings, and the sizes of a rollout and of the networks."""

    env: str
    num_envs: int
    horizon: int
    units: int
    hidden: tuple[int, ...]

    def config(self, cell: Cell, engine: EngineName) -> canter.TrainConfig:
        """Return the settings of a run with this kind of network and engine."""
        rnn = None if cell == "none" else RNNConfig(cell=cell, hidden=self.units)
        network = canter.NetworkConfig(hidden=self.hidden, rnn=rnn)
        return canter.TrainConfig(
            env=canter.EnvConfig(id=self.env, num_envs=self.num_envs),
            algorithm=canter.PPOConfig(
                horizon=self.horizon,
                sequence_length=min(16, self.horizon),
                model=canter.ModelConfig(policy=network),
            ),
            total_steps=10**9,
            execution=ExecutionConfig(engine=engine, threads=1),
        )


CASES = (
    Case("CartPole-v1", 8, 128, 64, (64, 64)),
    Case("tensor:cartpole", 8, 128, 64, (64, 64)),
    Case("HalfCheetah-v5", 8, 128, 64, (64, 64)),
    Case("tensor:quadrotor", 64, 32, 128, (128, 128)),
)


class Candidate:
    """A trainer and the times of its iterations, in seconds."""

    def __init__(self, config: canter.TrainConfig) -> None:
        self.trainer = canter.Trainer(config, self.note)
        self.times: list[dict[str, float]] = []
        self.trainer.learn(WARM_UP)
        self.times.clear()

    def note(self, report: Report) -> None:
        """Keep the seconds of each part of an iteration."""
        self.times.append(dict(report.times))

    def iterate(self) -> None:
        """Train for an iteration and keep its times."""
        wall, busy = time.perf_counter(), time.process_time()
        self.trainer.learn(1)
        row = self.times[-1]
        row["clock"] = time.perf_counter() - wall
        row["processor"] = time.process_time() - busy
        row["without environment"] = row["clock"] - row["env"]

    def result(self, steps: int) -> dict[str, Any]:
        """Return steps per second of the fastest iteration, and milliseconds of its parts."""
        least = {name: min(row[name] for row in self.times) for name in self.times[0]}
        parts = {f"{part}_ms": round(1e3 * least[part], 1) for part in ("env", "policy", "update")}
        kinds = ("clock", "processor", "without environment")
        return {"steps_per_second": {kind: round(steps / least[kind]) for kind in kinds}} | parts


def measure(case: Case, cell: Cell, rounds: int) -> dict[str, Any]:
    """Steps per second of both engines, and how many times those of autograd the native one makes."""
    candidates = {engine: Candidate(case.config(cell, engine)) for engine in ENGINES}
    for _ in range(rounds):
        for candidate in candidates.values():
            candidate.iterate()
    steps = case.num_envs * case.horizon
    found: dict[str, Any] = {engine: candidate.result(steps) for engine, candidate in candidates.items()}
    for candidate in candidates.values():
        candidate.trainer.close()
    slow, fast = (found[engine]["steps_per_second"] for engine in ENGINES)
    return found | {"ratio": {kind: round(fast[kind] / slow[kind], 1) for kind in fast}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=[case.env for case in CASES])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": platform.machine(), "torch": torch.__version__, "rounds": options.rounds}
    for case in CASES:
        if case.env not in options.cases:
            continue
        sizes = f"{case.num_envs} environments, {case.horizon} steps, {case.units} units, {list(case.hidden)}"
        found[case.env] = {"sizes": sizes}
        for cell in ("lstm", "gru", "none"):
            found[case.env][cell] = measure(case, cell, options.rounds)
            print(case.env, cell, json.dumps(found[case.env][cell]), flush=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

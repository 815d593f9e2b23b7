"""Cost of `canter doctor` while training: the same run with and without it, in turns.

    python benchmarks/doctor/cost.py
    python benchmarks/doctor/cost.py tensor:cartpole tensor:quadrotor --device cuda --num-envs 4096 --iterations 300
    python benchmarks/doctor/cost.py tensor:quadrotor --device cuda --seconds 20 --out cost.json

Each task is trained twice at once, some iterations of each in turn: with the doctor off, and on with a clock around
each of its calls (on a GPU the clock waits for the device). Prints a JSON line per task: the share of the time that
the doctor's calls take, and the ratio of on to off with its 95 % interval over the turns. On a CPU the time is CPU
time of the process; the share is the more exact of the two figures. The first turn, which compiles kernels and
captures graphs, does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from canter import Trainer
from canter.algorithms.base import plan_of
from canter.app.experiments.settings import base_config, with_overrides
from canter.config import TrainConfig

CALLS = ("measure", "measure_episodes", "diagnose")
MODES = ("off", "on")
TURNS = 20


def config_of(task: str, arguments: argparse.Namespace, *, doctor: bool) -> TrainConfig:
    """Return the settings of a run: the preset, and the flags."""
    config, _ = base_config(task, None, device=arguments.device)
    changes: dict[str, Any] = {"device": arguments.device, "doctor": doctor}
    if arguments.num_envs is not None:
        changes["env.num_envs"] = arguments.num_envs
    config = with_overrides(config, changes)
    if arguments.iterations is not None:
        steps = arguments.iterations * plan_of(config.algorithm).horizon * config.env.num_envs
        config = with_overrides(config, {"total_steps": steps})
    return config


def clock(device: str) -> Callable[[], float]:
    """Return a clock: CPU time, or the time at which the GPU has nothing left to do."""
    if torch.device(device).type == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


class ClockedCalls:
    """The doctor's calls of a trainer, timed."""

    def __init__(self, trainer: Trainer, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(trainer.doctor, name, self.timed(getattr(trainer.doctor, name), now))

    def timed(self, call: Callable[..., Any], now: Callable[[], float]) -> Callable[..., Any]:
        """Return the call with a clock around it."""

        def run(*arguments: Any, **named: Any) -> Any:
            start = now()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += now() - start

        return run


def measure(task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a task in turns and return what the doctor costs."""
    now = clock(arguments.device)
    trainers = {mode: Trainer(config_of(task, arguments, doctor=mode == "on")) for mode in MODES}
    config = trainers["on"].config
    rollout = plan_of(config.algorithm).horizon * config.env.num_envs
    assert config.total_steps is not None
    iterations = math.ceil(config.total_steps / rollout)
    turn = max(iterations // TURNS, 1)
    calls = ClockedCalls(trainers["on"], now)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    number = 0
    end = time.monotonic() + arguments.seconds
    while not trainers["off"].finished and (number < 4 or time.monotonic() < end):
        for mode in MODES[number % 2 :] + MODES[: number % 2]:
            start = now()
            trainers[mode].learn(turn)
            seconds[mode].append(now() - start)
        if number == 0:
            calls.seconds = 0.0
        number += 1
    done = trainers["on"].progress.iteration
    looks = sum(trainers["on"].doctor.looks_at(i + 1) for i in range(turn, done))
    for trainer in trainers.values():
        trainer.close()
    ratios = [on / off for on, off in zip(seconds["on"][1:], seconds["off"][1:], strict=True)]
    half = 2.0 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    off = sum(seconds["off"][1:])
    return {
        "task": task,
        "device": torch.cuda.get_device_name() if torch.device(arguments.device).type == "cuda" else "cpu",
        "num_envs": config.env.num_envs,
        "iterations": done - turn,
        "looks": looks,
        "iteration_ms": round(1e3 * off / (done - turn), 3),
        "look_ms": round(1e3 * calls.seconds / looks, 3),
        "share_percent": round(100.0 * calls.seconds / off, 2),
        "ratio": round(sum(seconds["on"][1:]) / off, 4),
        "ratio_interval": [round(statistics.mean(ratios) + sign * half, 4) for sign in (-1, 1)],
    }


def main() -> None:
    """Measure some tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["CartPole-v1", "Pendulum-v1"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--iterations", type=int, help="length of the run; the budget of the preset if not given")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which a task is not continued")
    parser.add_argument("--out", type=Path, help="file for a JSON list of all results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = []
    for task in arguments.tasks:
        measured.append(measure(task, arguments))
        print(json.dumps(measured[-1]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()

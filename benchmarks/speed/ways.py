"""The ways to step environments of one's own, in plain Python, beside each other: milliseconds of a rollout.

    python benchmarks/speed/ways.py

Sixteen copies of a tandem of queues, whose step takes about 15 or 150 microseconds, 64 steps each, by an untrained
policy. The ways take turns. JSON goes to `results/ways.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import canter
from canter.algorithms.ppo import PPOConfig
from canter.training.collector import Collector

RESULTS = Path(__file__).parent / "results" / "ways.json"
WAYS = ("sync", "threads", "async", "forked")
EVENTS = (20, 200)
"""Events in a step, which is what it takes long for."""


class Queues(gymnasium.Env):
    """Jobs arrive at the first of four queues and leave after the last; the action says which one is served."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, events: int) -> None:
        self.events = events

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin with empty queues."""
        super().reset(seed=seed)
        self.jobs, self.time = [0] * 4, 0
        return np.array(self.jobs, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """So many arrivals and services."""
        jobs = self.jobs
        for _ in range(self.events):
            if self.np_random.random() < 0.2:
                jobs[0] += 1
            elif jobs[action] > 0:
                jobs[action] -= 1
                if action < 3:
                    jobs[action + 1] += 1
        self.time += 1
        return np.array(jobs, np.float32), -float(sum(jobs)), False, self.time >= 200, {}


def measure(events: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a rollout for each way, in turns."""
    env_id = f"Queues{events}-v0"
    gymnasium.register(env_id, lambda: Queues(events))
    collectors: dict[str, Collector] = {}
    for way in WAYS:
        env = canter.EnvConfig(id=env_id, num_envs=16, vectorization=way).build("cpu")
        collectors[way] = Collector(env, PPOConfig(horizon=64).build(env.spec, 0), 0)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for collector in collectors.values():
        collector.collect()
    for _ in range(rounds):
        for way, collector in collectors.items():
            start = time.perf_counter()
            collector.collect()
            times[way].append(time.perf_counter() - start)
    for collector in collectors.values():
        collector.env.close()
    return {way: round(1e3 * statistics.median(found), 2) for way, found in times.items()}


def main() -> None:
    """Both lengths of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "rollout_ms": {}}
    for events in EVENTS:
        single = Queues(events)
        single.reset(seed=0)
        start = time.perf_counter()
        for _ in range(1000):
            single.step(0)
        step = round(1e3 * (time.perf_counter() - start), 1)
        document["rollout_ms"][f"{events} events"] = {"step_us": step} | measure(events, options.rounds)
        print(events, document["rollout_ms"][f"{events} events"], flush=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How many threads learn on a CPU.

Small networks are slowed down by a second thread and wide ones sped up. Sums are rounded differently by another number
of threads, so the number follows from sizes alone, never from a stopwatch: the same command on the same machine gives
the same bits. It is part of the run's state, and a resumed run keeps it. `canter check --threads` measures which number
is the fastest.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from canter.algorithms.base import Algorithm
from canter.training.collector import Collector

WIDE, LONG = 2**14, 2**12
"""Weights of the widest layer and steps of a rollout below which one thread is taken: waiting for each other costs
threads more than there is to share, and on a busy machine a hundred times as much."""


def choose_threads(widest: int, steps: int, cores: int, *, shares_rows: bool = False) -> int:
    """Threads for a network whose widest layer has so many weights, and rollouts of so many steps over all envs.

    Where an algorithm `shares_rows`, short rollouts are as good as long ones.
    """
    return cores if widest >= WIDE and (shares_rows or steps >= LONG) else 1


def widest_layer(algorithm: Algorithm[Any]) -> int:
    """Weights of the largest matrix of the policy."""
    return max((p.numel() for p in algorithm.policy.actor.parameters() if p.ndim == 2), default=0)


def time_updates(collector: Collector, counts: list[int], repeats: int = 3, warmup: int = 0) -> dict[int, float]:
    """Seconds of an update with each number of threads, the best of `repeats`; do not use the algorithm afterwards.

    The first `warmup` transitions are collected before: an update of what they hold learns nothing yet.
    """
    algorithm, rows = collector.algorithm, collector.rollout.reward.numel()
    for _ in range(max(0, math.ceil(warmup / rows) - 1)):
        algorithm.begin_iteration()
        algorithm.update(collector.collect())
    algorithm.begin_iteration()
    rollout, before = collector.collect(), algorithm.state_dict()

    def seconds() -> float:
        # Every update begins with the same weights: one that stops early would otherwise be taken for a fast one.
        algorithm.load_state_dict(before)
        start = time.perf_counter()
        algorithm.update(rollout)
        return time.perf_counter() - start

    seconds()  # compiles, allocates and fills caches
    best: dict[int, float] = {}
    for count in counts:
        torch.set_num_threads(count)
        best[count] = min(seconds() for _ in range(repeats))
    return best

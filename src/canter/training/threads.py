"""How many threads learn on a CPU.

Small networks are slowed down by a second thread and wide ones sped up, by how much depends on the machine and on what
else runs there. So it is measured, once at the start of a run and on its own update. Sums are rounded differently by
another number of threads: the choice is part of the run's state, and a resumed run keeps it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from canter.algorithms.base import Algorithm
from canter.data.rollout import Rollout
from canter.distributed import cores
from canter.machine import set_threads
from canter.struct import Metrics
from canter.training.collector import Collector

logger = logging.getLogger(__name__)

WIDE, LONG = 2**14, 2**12
"""Weights of a layer and steps of a rollout below which one thread is taken without a trial: waiting for each other
costs threads more than there is to share, and on a busy machine a hundred times as much."""
GAIN = 1.2
"""How many times as fast several threads must be to be taken."""


class ThreadChoice:
    """The update of an algorithm; its first call finds out how many threads to use from then on."""

    def __init__(self, collector: Collector, algorithm: Algorithm[Any]) -> None:
        self.collector, self.algorithm = collector, algorithm
        widest = max((p.numel() for p in algorithm.policy.actor.parameters() if p.ndim == 2), default=0)
        if widest < WIDE or collector.rollout.reward.numel() < LONG or cores() == 1:
            collector.threads = torch.get_num_threads()

    def __call__(self, rollout: Rollout[Any]) -> Metrics:
        """As `Algorithm.update`."""
        if self.collector.threads is None:
            self._seconds(rollout, 1)  # compiles, allocates and warms up what the others find done
            one, several = self._seconds(rollout, 1), self._seconds(rollout, cores())
            self.collector.threads = threads = cores() if one > GAIN * several else 1
            set_threads(threads)
            tried = f"an update takes {one:.2f} s with 1 and {several:.2f} s with {cores()}"
            logger.info("execution.threads=%d: %s", threads, tried)
        return self.algorithm.update(rollout)

    def _seconds(self, rollout: Rollout[Any], threads: int) -> float:
        """How long an update takes, which is then undone."""
        before = self.algorithm.state_dict()
        set_threads(threads)
        start = time.perf_counter()
        self.algorithm.update(rollout)
        seconds = time.perf_counter() - start
        self.algorithm.load_state_dict(before)
        return seconds

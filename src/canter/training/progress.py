"""How far a run has come and how it does."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from canter.functional.batch_means import batch_means
from canter.struct import Metrics
from canter.training.collector import Episodes
from canter.training.stopwatch import Stopwatch

RECENT_EPISODES = 100
"""Return, length and success rate are means over this many episodes."""
RECENT_ROLLOUTS = 20
"""The long-run average `lta/mean`, the raw reward per unit of time, is that of this many rollouts."""


@dataclass(frozen=True, kw_only=True)
class SuccessConfig:
    """Which episodes are a success: those that end the right way with at least the required return."""

    ending: Literal["terminated", "truncated", "any"] = "terminated"
    """How it must end: by itself (a goal was reached), at its time limit (nothing broke before), or either way."""
    min_return: float | None = None
    """Sum of raw rewards that it must reach; null for any."""

    def holds(self, return_: float, terminated: bool) -> bool:
        """Whether an episode is a success."""
        right_ending = self.ending == "any" or terminated == (self.ending == "terminated")
        return right_ending and (self.min_return is None or return_ >= self.min_return)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What has happened since the run began."""

    env_steps: int = 0
    """Transitions, over all environments; rows in which an environment only resets are not counted."""
    rollouts: int = 0
    """Rollouts collected."""
    episodes: int = 0
    """Episodes that have ended."""
    resets: int = 0
    """Episodes that have begun."""
    updates: int = 0
    """Rollouts learned from."""
    minibatch_updates: int = 0
    """Optimiser steps."""


@dataclass(frozen=True, kw_only=True)
class Report(Counters):
    """Where a run stands after an iteration; all on the host."""

    seconds: float
    """Since training started, without the time in which it was stopped."""
    return_: float | None
    """Mean return of the last 100 episodes; None before the first has ended."""
    length: float | None
    """Mean length of the same episodes."""
    success_rate: float | None
    """Fraction of them that were a success."""
    rollout_return: float | None
    """Mean return of the episodes that ended in this rollout; None if none did."""
    rollout_length: float | None
    """Mean length of the same episodes."""
    rollout_reward: float
    """Mean reward of a step in this rollout."""
    rollout_steps: int
    """Transitions in this rollout."""
    times: dict[str, float]
    """Seconds of this iteration by part, see `Stopwatch`: env, policy, update, other."""
    metrics: dict[str, float]
    """What the algorithm reports (`loss/policy`, `policy/kl`, ...) and the environment (`env/...`)."""

    @property
    def iteration(self) -> int:
        """Iterations done, each a rollout and its update."""
        return self.rollouts

    def row(self) -> dict[str, Any]:
        """The same as one flat mapping, for a line of a log; equal runs differ only in `seconds` and `time/...`."""
        own = {field.name.rstrip("_"): getattr(self, field.name) for field in fields(self)}
        del own["times"], own["metrics"]
        times = {f"time/{part}": seconds for part, seconds in self.times.items()}
        speed = {"time/steps_per_second": self.rollout_steps / max(sum(self.times.values()), 1e-9)}
        # What the environment did not report in this rollout has no value; JSON knows no NaN.
        silent = {name: None for name, value in self.metrics.items() if name.startswith("env/") and math.isnan(value)}
        return {"iteration": self.iteration} | own | times | speed | self.metrics | silent


class Run:
    """Counts what has happened; `clock` tells what the time was spent on."""

    def __init__(self, total_steps: int, success: SuccessConfig, clock: Stopwatch) -> None:
        self.total_steps, self.success, self.clock = total_steps, success, clock
        self.counters = Counters()
        self.recent: deque[tuple[float, int, bool]] = deque(maxlen=RECENT_EPISODES)
        self.gain_and_time: deque[list[list[float]]] = deque(maxlen=RECENT_ROLLOUTS)
        self.start = time.perf_counter()

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.counters.rollouts

    @property
    def env_steps(self) -> int:
        """Transitions so far."""
        return self.counters.env_steps

    @property
    def progress(self) -> float:
        """Fraction of the run that is done."""
        return self.env_steps / self.total_steps

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 episodes; None before as many have ended."""
        return mean(return_ for return_, _, _ in self.recent) if len(self.recent) == RECENT_EPISODES else None

    @property
    def recent_lta(self) -> float | None:
        """Raw reward per unit of time in the last 20 rollouts; None before as many were collected."""
        average = self._long_run_average() if len(self.gain_and_time) == RECENT_ROLLOUTS else {}
        return average.get("lta/mean")

    def _long_run_average(self) -> dict[str, float]:
        """The long-run average and the half-width of its 95 % interval, as far as they are known."""
        average = batch_means(torch.tensor(list(self.gain_and_time), dtype=torch.float64))
        return {} if average is None else {"lta/mean": average[0], "lta/ci": average[1]}

    def count(self, metrics: Metrics, episodes: Episodes) -> Report:
        """Take note of an iteration; reads the metrics from the device."""
        values = torch.stack([value.float() for value in metrics.values()]).tolist()  # one read for all
        self.clock.lap("update")  # only now is it known to be done
        read, before = dict(zip(metrics, values, strict=True)), self.counters
        self.counters = Counters(
            env_steps=before.env_steps + episodes.env_steps,
            rollouts=before.rollouts + 1,
            episodes=before.episodes + len(episodes.return_),
            resets=before.resets + episodes.resets,
            updates=before.updates + 1,
            minibatch_updates=before.minibatch_updates + round(read.get("optim/minibatch_updates", 0)),
        )
        success = map(self.success.holds, episodes.return_, episodes.terminated)
        self.recent.extend(zip(episodes.return_, episodes.length, success, strict=True))
        self.gain_and_time.append(episodes.gain_and_time)
        return Report(
            **asdict(self.counters),
            seconds=time.perf_counter() - self.start,
            return_=mean(return_ for return_, _, _ in self.recent),
            length=mean(length for _, length, _ in self.recent),
            success_rate=mean(success for _, _, success in self.recent),
            rollout_return=mean(episodes.return_),
            rollout_length=mean(episodes.length),
            rollout_reward=episodes.mean_reward,
            rollout_steps=episodes.env_steps,
            times=self.clock.read(),
            metrics=read | self._long_run_average(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters, recent episodes and the time spent."""
        return {
            "counters": asdict(self.counters),
            "recent": [list(episode) for episode in self.recent],
            "gain_and_time": list(self.gain_and_time),
            "seconds": time.perf_counter() - self.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        self.counters = Counters(**state["counters"])
        self.recent = deque((tuple(episode) for episode in state["recent"]), maxlen=RECENT_EPISODES)
        self.gain_and_time = deque(state["gain_and_time"], maxlen=RECENT_ROLLOUTS)
        self.start = time.perf_counter() - state["seconds"]


def mean(values: Iterable[float]) -> float | None:
    """Their mean; None if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None

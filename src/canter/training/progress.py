"""Where the time of a run goes.

How far a run has come and how it does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from canter.core import distributed
from canter.core.specs import TrainingProgress
from canter.core.struct import Metrics
from canter.functional.statistics import batch_means
from canter.runs.policies import Progress
from canter.training.episodes import Episodes

PARTS: tuple[str, ...] = ("env", "policy", "update", "other")
"""Stepping environments, choosing actions and recording them, learning, and the rest: logs, console, checkpoints."""


class Stopwatch:
    """Divides the time between readings among the `PARTS`; no moment is counted twice or lost.

    This is the host's time, as asking a GPU when it is done would slow it down. There `env` and `policy` are the time
    it takes to queue the work, and `update`, which ends when its metrics are read, includes the wait for all of it. A
    collection that is replayed as one CUDA graph has no laps of its own, and counts as `update` too.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.last = time.perf_counter()

    def restart(self) -> None:
        """Leave out the time since the last lap."""
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


RECENT_EPISODES = 100
"""Return, length and success rate are means over this many episodes."""
RECENT_ROLLOUTS = 20
"""The long-run average `lta/mean`, the raw reward per unit of time, is that of this many rollouts."""


@dataclass(frozen=True, kw_only=True)
class SuccessConfig:
    """Which episodes are a success: those that end the right way with at least the required return.

    Where neither is set nobody has said what a success is: then the rate of terminated episodes is shown, by that name.
    """

    ending: Literal["terminated", "truncated", "any"] | None = None
    """How it must end: by itself (a goal was reached), at its time limit (nothing broke before), or either way; null
    is by itself."""
    min_return: float | None = None
    """Sum of raw rewards that it must reach; null for any."""

    @property
    def defined(self) -> bool:
        """Whether anybody has said what a success is."""
        return self.ending is not None or self.min_return is not None

    def holds(self, return_: float, terminated: bool) -> bool:
        """Whether an episode is a success."""
        ending = self.ending or "terminated"
        right_ending = ending == "any" or terminated == (ending == "terminated")
        return right_ending and (self.min_return is None or return_ >= self.min_return)


@dataclass(frozen=True, kw_only=True)
class UntilConfig:
    """What ends a run besides `total_steps`, whichever comes first; null for nothing."""

    mean_return: float | None = None
    """Mean return of the last 100 episodes, once as many have ended; looked at where a row is logged."""
    seconds: float | None = None
    """Time spent training, without the time in which the run was stopped. Such a run is not repeatable: a faster or
    less busy machine trains for longer."""
    iterations: int | None = None
    """Rollouts and their updates."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        if self.mean_return is not None and not math.isfinite(self.mean_return):
            raise ValueError(f"mean_return={self.mean_return} must be finite")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} must be above 0")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What has happened since the run began."""

    env_steps: int = 0
    """Transitions, over all environments; rows in which an environment only resets are not counted."""
    train_steps: int = 0
    """Steps of each environment."""
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
    """A row of the log: where a run stands after an iteration; all on the host.

    "Since the row before" is the last iteration, or the last `log_every` of them.
    """

    seconds: float
    """Since training started, without the time in which it was stopped."""
    return_: float | None
    """Mean return of the last 100 episodes; None before the first has ended."""
    length: float | None
    """Mean length of the same episodes."""
    success_rate: float | None
    """Fraction of them that were a success; where the settings do not say what that is, that terminated."""
    rollout_return: float | None
    """Mean return of the episodes that ended since the row before; None if none did."""
    rollout_length: float | None
    """Mean length of the same episodes."""
    rollout_reward: float
    """Mean reward of a step since the row before."""
    rollout_steps: int
    """Transitions since the row before."""
    times: dict[str, float]
    """Seconds since the row before by part, see `Stopwatch`: env, policy, update, other."""
    metrics: dict[str, float]
    """What the algorithm reports of its last update and the environment of its last rollout (`env/...`)."""

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
    """Counts what has happened and says when it is enough; `clock` tells what the time was spent on.

    An iteration is first added, which reads nothing from the device, and reported when a row of the log is due.
    `optimizer_steps` is the metric that counts them.
    """

    def __init__(
        self,
        total_steps: int | None,
        success: SuccessConfig,
        clock: Stopwatch,
        until: UntilConfig | None = None,
        optimizer_steps: str = "",
        recent_episodes: int = RECENT_EPISODES,
    ) -> None:
        self.total_steps, self.success, self.clock = total_steps, success, clock
        self.until, self.optimizer_steps = until or UntilConfig(), optimizer_steps
        self.counters = Counters()
        self.recent: deque[tuple[float, int, bool]] = deque(maxlen=recent_episodes)
        self.gain_and_time: deque[list[list[float]]] = deque(maxlen=RECENT_ROLLOUTS)
        self.spent, self.start = 0.0, time.perf_counter()
        """Seconds of training up to the end of the last iteration, and the time of day at which they would begin."""
        self.unread: list[Tensor] = []
        """After each iteration since the row before: transitions and optimiser steps since then, `[2]` float64 on the
        device."""
        self.unread_rows = 0
        """What those transitions are at most, as every row of a rollout may be one."""
        self.stopped = False
        """Whether the user's own function has asked for the end."""
        self.evaluation: float | None = None
        """Mean return of an evaluation after the last iteration; None without one."""

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.counters.rollouts

    @property
    def env_steps(self) -> int:
        """Transitions up to the last row of the log."""
        return self.counters.env_steps

    @property
    def fraction(self) -> float | Tensor:
        """Largest share of a budget of steps or iterations that is used up, 0 if there is none.

        A 0-d tensor on the device where the host does not know the number of steps yet.
        """
        if self.total_steps is None or not self.unread:
            return self._known_fraction()
        iterations = self.iteration / self.until.iterations if self.until.iterations else 0.0
        return ((self.env_steps + self.unread[-1][0]) / self.total_steps).clamp(min=iterations)

    def for_env(self) -> TrainingProgress:
        """How far the run is, as far as the host knows."""
        steps = self.env_steps + self.unread_rows
        shares = self._shares(steps)
        fraction = min(max(shares), 1.0) if shares else None
        return TrainingProgress(iteration=self.iteration, env_steps=steps, fraction=fraction)

    def _known_fraction(self) -> float:
        return max(self._shares(self.env_steps), default=0.0)

    def _shares(self, steps: int) -> list[float]:
        """How much of each budget that there is so many steps and the iterations use up."""
        used = (steps, self.total_steps), (self.iteration, self.until.iterations)
        return [spent / budget for spent, budget in used if budget is not None]

    @property
    def ended_by(self) -> str | None:
        """The setting that ends the run here, as far as the host knows; None while it goes on."""
        until = self.until
        if self.stopped:
            return "on_iteration"
        reached = (
            ("total_steps", self.total_steps, self.env_steps),
            ("until.mean_return", until.mean_return, None if until.mean_return is None else self.recent_return),
            ("until.iterations", until.iterations, self.iteration),
            ("until.seconds", until.seconds, self.spent),
        )
        ends = (key for key, end, now in reached if end is not None and now is not None and now >= end)
        return next(ends, None)

    @property
    def may_have_ended(self) -> bool:
        """Whether the run is over or, for all that the host knows, its budget of steps may be used up."""
        steps = self.env_steps + self.unread_rows
        return self.ended_by is not None or (self.total_steps is not None and steps >= self.total_steps)

    def progress(self) -> Progress:
        """How far the run had come at the last row of the log."""
        return Progress(
            iteration=self.iteration,
            env_steps=self.env_steps,
            fraction=self._known_fraction(),
            return_=self.recent_return,
            lta=self.recent_lta,
            evaluation=self.evaluation,
            ended_by=self.ended_by,
        )

    def start_clock(self) -> None:
        """Training goes on from here; what was since the last iteration is not counted."""
        self.start = time.perf_counter() - self.spent
        self.clock.restart()

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 episodes; None before as many have ended."""
        return mean(return_ for return_, _, _ in self.recent) if len(self.recent) == self.recent.maxlen else None

    @property
    def recent_lta(self) -> float | None:
        """Raw reward per unit of time in the last 20 rollouts; None before as many were collected."""
        average = self._long_run_average() if len(self.gain_and_time) == RECENT_ROLLOUTS else {}
        return average.get("lta/mean")

    def _long_run_average(self) -> dict[str, float]:
        """The long-run average and the half-width of its 95 % interval, as far as they are known."""
        average = batch_means(torch.tensor(list(self.gain_and_time), dtype=torch.float64))
        return {} if average is None else {"lta/mean": average[0], "lta/ci": average[1]}

    def add(self, metrics: Metrics, valid: Tensor) -> None:
        """Take note of an iteration and its rollout's transitions `[T, N]`, without waiting for the device."""
        steps = metrics.get(self.optimizer_steps)
        counts = (distributed.sum_(valid.sum()), valid.new_zeros(()) if steps is None else steps)
        numbers = torch.stack([count.double() for count in counts])
        self.unread.append(self.unread[-1] + numbers if self.unread else numbers)
        self.unread_rows += valid.numel() * distributed.world_size()
        self._count(rollouts=1, updates=1, train_steps=len(valid))
        self.spent = self._now()
        self.clock.lap("update")

    def _count(self, **more: int) -> None:
        """Add to counters."""
        self.counters = replace(self.counters, **{name: getattr(self.counters, name) + n for name, n in more.items()})

    def _now(self) -> float:
        """Seconds of training, alike on all ranks, as a run may end by them."""
        return distributed.largest(time.perf_counter() - self.start)

    def report(self, metrics: Metrics, episodes: Episodes) -> Report:
        """A row about the iterations added since the row before; reads the metrics of the last one from the device."""
        values = [*metrics.values(), self.unread[-1][1]]
        *values, steps = torch.stack([value.float() for value in values]).tolist()  # one read for all
        self.clock.lap("update")  # only now is it known to be done on a GPU
        self.spent = self._now()
        self.unread, self.unread_rows = [], 0
        self._count(
            env_steps=episodes.env_steps,
            episodes=len(episodes.return_),
            resets=episodes.resets,
            minibatch_updates=round(steps),
        )
        success = map(self.success.holds, episodes.return_, episodes.terminated)
        self.recent.extend(zip(episodes.return_, episodes.length, success, strict=True))
        self.gain_and_time.extend(episodes.gain_and_time)
        return Report(
            **asdict(self.counters),
            seconds=self.spent,
            return_=mean(return_ for return_, _, _ in self.recent),
            length=mean(length for _, length, _ in self.recent),
            success_rate=mean(success for _, _, success in self.recent),
            rollout_return=mean(episodes.return_),
            rollout_length=mean(episodes.length),
            rollout_reward=episodes.mean_reward,
            rollout_steps=episodes.env_steps,
            times=self.clock.read(),
            metrics=dict(zip(metrics, values, strict=True)) | self._long_run_average(),
        )

    def forget_after(self, good: int) -> None:
        """Forget all iterations since the row before but the first `good` of them."""
        lost = len(self.unread) - good
        del self.unread[good:]
        steps = self.counters.train_steps // max(self.iteration, 1)
        self._count(rollouts=-lost, updates=-lost, train_steps=-lost * steps)

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
        self.recent = deque((tuple(episode) for episode in state["recent"]), maxlen=self.recent.maxlen)
        self.gain_and_time = deque(state["gain_and_time"], maxlen=RECENT_ROLLOUTS)
        self.spent = state["seconds"]
        self.start = time.perf_counter() - self.spent
        self.progress()  # raises before anything is restored where the state makes no sense


def mean(values: Iterable[float]) -> float | None:
    """Their mean; None if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None

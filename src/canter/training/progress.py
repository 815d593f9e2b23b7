"""How far a run has come, how well it does, and where its time goes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from canter.algorithms.doctor.findings import Finding
from canter.core import distributed
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import TrainingProgress
from canter.core.struct import Metrics
from canter.functional.statistics import batch_means
from canter.runs.policies import ProgressSnapshot
from canter.runs.writers import LogRow
from canter.training.episodes import Episodes

PARTS: tuple[str, ...] = ("env", "policy", "update", "other")
"""Stepping environments, choosing and recording actions, learning, and the rest, such as logs."""


class Stopwatch:
    """Divides the time between readings among the `PARTS`; no moment is counted twice or lost.

    This is host time, since a sync with the GPU would slow it down. On a GPU, `env` and `policy`
    are the time to queue the work; `update` ends when its metrics are read, and includes the wait
    for all of it, and for a collection that is replayed as one CUDA graph.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.last = time.perf_counter()

    def restart(self) -> None:
        """Discard the time since the last lap."""
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def read(self) -> dict[str, float]:
        """Return the seconds of each part since the last reading."""
        seconds = self.seconds
        self.seconds = dict.fromkeys(PARTS, 0.0)
        return seconds


RECENT_EPISODES = 100
"""Number of episodes over which return, length and success rate are averaged."""
RECENT_ROLLOUTS = 20
"""Number of rollouts over which `lta/mean`, the raw reward per unit of time, is averaged."""


@dataclass(frozen=True, kw_only=True)
class SuccessConfig:
    """Definition of a successful episode: how it ends, and its least return.

    If neither is set, success is undefined and its rate is null.
    """

    ending: Literal["terminated", "truncated", "any"] | None = None
    """Required ending: terminated (a goal was reached), truncated (nothing failed before the time
    limit), or any; null is terminated."""
    min_return: float | None = None
    """Least sum of raw rewards; null for any."""

    @property
    def defined(self) -> bool:
        """True if the settings define a success."""
        return self.ending is not None or self.min_return is not None

    def rate(self, episodes: Iterable[tuple[float, bool]]) -> float | None:
        """Return the fraction of successes among episodes (return, terminated); None if undefined."""
        return mean(self.holds(*episode) for episode in episodes) if self.defined else None

    def holds(self, return_: float, terminated: bool) -> bool:
        """Return whether an episode with this return and ending is a success."""
        ending = self.ending or "terminated"
        ends_right = ending == "any" or terminated == (ending == "terminated")
        return ends_right and (self.min_return is None or return_ >= self.min_return)


@dataclass(frozen=True, kw_only=True)
class UntilConfig:
    """Conditions that end a run before `total_steps`, whichever comes first; null for none."""

    mean_return: float | None = None
    """Mean return of the last 100 episodes, once that many have ended."""
    seconds: float | None = None
    """Seconds of training, not counting the time in which the run was stopped. Such a run is not
    repeatable: a faster machine trains for more steps."""
    iterations: int | None = None
    """Iterations: rollouts and their updates."""
    steps: int | None = None
    """Transitions after which the run pauses. Schedules follow `total_steps` alone, so a run that
    resumes learns exactly what it would have learned without the pause."""

    def __post_init__(self) -> None:
        """Raise ValueError for values outside their range."""
        if self.mean_return is not None and not math.isfinite(self.mean_return):
            raise UserError(f"mean_return={self.mean_return} must be finite")
        check_range(self, "must be above 0", "seconds")
        check_range(self, "must be at least 1", "iterations", "steps")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Totals since the run began."""

    env_steps: int = 0
    """Transitions of all environments, without steps in which an environment only resets."""
    train_steps: int = 0
    """Steps of each environment."""
    rollouts: int = 0
    """Rollouts collected."""
    episodes: int = 0
    """Finished episodes."""
    resets: int = 0
    """Started episodes."""
    updates: int = 0
    """Rollouts learned from."""
    minibatch_updates: int = 0
    """Optimizer steps."""


@dataclass(frozen=True, kw_only=True)
class Report(Counters):
    """One row of the log: the state of a run after an iteration, on the host.

    "Since the last row" means one iteration, or `log_every` of them.
    """

    seconds: float
    """Seconds of training, not counting the time in which the run was stopped."""
    return_: float | None
    """Mean return of the last 100 episodes; None until one has ended."""
    length: float | None
    """Mean length of the same episodes."""
    success_rate: float | None
    """Fraction of them that succeeded; None if the settings do not define a success."""
    terminated_rate: float | None
    """Fraction of them that terminated."""
    rollout_return: float | None
    """Mean return of the episodes that ended since the last row; None if none did."""
    rollout_length: float | None
    """Mean length of the same episodes."""
    rollout_reward: float
    """Mean reward of a step since the last row."""
    rollout_steps: int
    """Transitions since the last row."""
    times: dict[str, float]
    """Seconds since the last row for each part (env, policy, update, other), see `Stopwatch`."""
    metrics: dict[str, float]
    """Metrics of the last update, of the environments (`env/...`), and of callbacks."""
    custom: list[str] = field(default_factory=list)
    """Names of the metrics that callbacks added."""
    findings: list[Finding] = field(default_factory=list)
    """Findings of `canter doctor` at its last look; [] for a healthy run."""

    @property
    def iteration(self) -> int:
        """Completed iterations, each a rollout and its update."""
        return self.rollouts

    def row(self) -> LogRow:
        """Return the report as a flat mapping; equal runs differ in `seconds` and `time/...`."""
        own = {name.rstrip("_"): getattr(self, name) for name in COLUMNS}
        times = {f"time/{part}": seconds for part, seconds in self.times.items()}
        times["time/steps_per_second"] = self.rollout_steps / max(sum(self.times.values()), 1e-9)
        # NaN: the environment reported nothing in this rollout.
        silent = {name: None for name, value in self.metrics.items() if name.startswith("env/") and math.isnan(value)}
        return LogRow({"iteration": self.iteration} | own | times | self.metrics | silent, self.custom)


COLUMNS = tuple(part.name for part in fields(Report) if part.name not in ("times", "metrics", "custom", "findings"))
"""Fields of `Report` that are columns of the log, but for a final underscore."""


class RunProgress:
    """Counts steps, episodes and time, and decides when the run is over.

    An iteration is added first, which reads nothing from the device, and reported when a row of the
    log is due. `clock` measures where the time goes; `optimizer_steps` names the metric that counts
    optimizer steps.
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
        self.total_steps = total_steps
        self.success = success
        self.clock = clock
        self.until = until or UntilConfig()
        self.optimizer_steps = optimizer_steps
        self.counters = Counters()
        self.recent: deque[tuple[float, int, bool]] = deque(maxlen=recent_episodes)
        """Return, length and whether it terminated, of each recent episode."""
        self.gain_and_time: deque[list[list[float]]] = deque(maxlen=RECENT_ROLLOUTS)
        self.spent = 0.0
        """Seconds of training up to the end of the last iteration."""
        self.start = time.perf_counter()
        """Clock reading at which training would have started without interruptions."""
        self.unread: list[Tensor] = []
        """Transitions and optimizer steps since the last row, after each iteration: `[2]` float64."""
        self.unread_transitions = 0
        """Upper bound of those transitions."""
        self.metrics: Metrics = {}
        """Metrics of the last iteration, on the device; {} if that iteration was undone."""
        self.stopped = False
        """The user's callback has ended the run."""
        self.evaluation: float | None = None
        """Mean return of an evaluation after the last iteration; None without one."""

    @property
    def iteration(self) -> int:
        """Completed iterations."""
        return self.counters.rollouts

    @property
    def env_steps(self) -> int:
        """Transitions up to the last row of the log."""
        return self.counters.env_steps

    @property
    def fraction(self) -> float | Tensor:
        """Completed fraction of the run by steps or iterations, the larger; 0 without a budget.

        A 0-d tensor on the device while the host has not read the number of steps.
        """
        if self.total_steps is None or not self.unread:
            return max(self._shares(self.env_steps), default=0.0)
        iterations = self.iteration / self.until.iterations if self.until.iterations else 0.0
        return ((self.env_steps + self.unread[-1][0]) / self.total_steps).clamp(min=iterations)

    def for_env(self) -> TrainingProgress:
        """Return the progress for environments with a curriculum, as far as the host knows it."""
        steps = self.env_steps + self.unread_transitions
        shares = self._shares(steps)
        fraction = min(max(shares), 1.0) if shares else None
        return TrainingProgress(iteration=self.iteration, env_steps=steps, fraction=fraction)

    def _shares(self, steps: int) -> list[float]:
        """Return the used fractions of the budgets of steps and of iterations, if set."""
        used = (steps, self.total_steps), (self.iteration, self.until.iterations)
        return [spent / budget for spent, budget in used if budget is not None]

    @property
    def ended_by(self) -> str | None:
        """Setting that ends the run now, as far as the host knows; None while it continues."""
        until = self.until
        if self.stopped:
            return "on_iteration"
        reached = (
            ("total_steps", self.total_steps, self.env_steps),
            ("until.mean_return", until.mean_return, None if until.mean_return is None else self.recent_return),
            ("until.iterations", until.iterations, self.iteration),
            ("until.seconds", until.seconds, self.spent),
            ("until.steps", until.steps, self.env_steps),
        )
        return next((key for key, end, now in reached if end is not None and now is not None and now >= end), None)

    @property
    def may_have_ended(self) -> bool:
        """True if the run is over, or its budget may be used up without the host knowing yet."""
        steps = self.env_steps + self.unread_transitions
        limits = [limit for limit in (self.total_steps, self.until.steps) if limit is not None]
        return self.ended_by is not None or any(steps >= limit for limit in limits)

    def progress(self) -> ProgressSnapshot:
        """Return the progress at the last row of the log."""
        return ProgressSnapshot(
            iteration=self.iteration,
            env_steps=self.env_steps,
            fraction=max(self._shares(self.env_steps), default=0.0),
            return_=self.recent_return,
            lta=self.recent_lta,
            evaluation=self.evaluation,
            ended_by=self.ended_by,
        )

    def start_clock(self) -> None:
        """Count time from now on; the time since the last iteration is discarded."""
        self.start = time.perf_counter() - self.spent
        self.clock.restart()

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 episodes; None until that many have ended."""
        return mean(return_ for return_, _, _ in self.recent) if len(self.recent) == self.recent.maxlen else None

    @property
    def recent_lta(self) -> float | None:
        """Raw reward per unit of time in the last 20 rollouts; None before there are 20."""
        average = self._long_run_average() if len(self.gain_and_time) == RECENT_ROLLOUTS else {}
        return average.get("lta/mean")

    def _long_run_average(self) -> dict[str, float]:
        """Return the long-run average and the half-width of its 95 % interval; {} while unknown."""
        average = batch_means(torch.tensor(list(self.gain_and_time), dtype=torch.float64))
        return {} if average is None else {"lta/mean": average[0], "lta/ci": average[1]}

    def add(self, metrics: Metrics, valid: Tensor) -> None:
        """Add an iteration with its metrics and the validity mask `[T, N]`, without a host sync."""
        self.metrics = metrics
        steps = metrics.get(self.optimizer_steps)
        counts = (distributed.sum_(valid.sum()), valid.new_zeros(()) if steps is None else steps)
        numbers = torch.stack([count.double() for count in counts])
        self.unread.append(self.unread[-1] + numbers if self.unread else numbers)
        self.unread_transitions += valid.numel() * distributed.world_size()
        self._count(rollouts=1, updates=1, train_steps=len(valid))
        self.spent = self._now()
        self.clock.lap("update")

    def _count(self, **more: int) -> None:
        """Increase counters."""
        self.counters = replace(self.counters, **{name: getattr(self.counters, name) + n for name, n in more.items()})

    def _now(self) -> float:
        """Return the seconds of training, equal on all ranks, since a run may end by them."""
        return distributed.largest(time.perf_counter() - self.start)

    def report(self, episodes: Episodes, from_env: Mapping[str, float] = {}) -> Report:
        """Return a row about the iterations since the last one; read metrics from the device."""
        on_device = [*self.metrics.values(), self.unread[-1][1]]
        *values, steps = torch.stack([value.float() for value in on_device]).tolist()  # one read for all
        self.clock.lap("update")  # on a GPU the update is only now known to be done
        self.spent = self._now()
        self.unread = []
        self.unread_transitions = 0
        self._count(
            env_steps=episodes.env_steps,
            episodes=len(episodes.return_),
            resets=episodes.resets,
            minibatch_updates=round(steps),
        )
        self.recent.extend(zip(episodes.return_, episodes.length, episodes.terminated, strict=True))
        self.gain_and_time.extend(episodes.gain_and_time)
        return Report(
            **asdict(self.counters),
            seconds=self.spent,
            return_=mean(return_ for return_, _, _ in self.recent),
            length=mean(length for _, length, _ in self.recent),
            success_rate=self.success.rate((return_, terminated) for return_, _, terminated in self.recent),
            terminated_rate=mean(terminated for _, _, terminated in self.recent),
            rollout_return=mean(episodes.return_),
            rollout_length=mean(episodes.length),
            rollout_reward=episodes.mean_reward,
            rollout_steps=episodes.env_steps,
            times=self.clock.read(),
            metrics=dict(zip(self.metrics, values, strict=True)) | dict(from_env) | self._long_run_average(),
        )

    def forget_after(self, good: int) -> None:
        """Undo all iterations since the last row but the first `good` of them."""
        lost = len(self.unread) - good
        self.metrics = {} if lost else self.metrics
        del self.unread[good:]
        steps = self.counters.train_steps // max(self.iteration, 1)
        self._count(rollouts=-lost, updates=-lost, train_steps=-lost * steps)

    def state_dict(self) -> dict[str, Any]:
        """Return counters, recent episodes and the time spent."""
        return {
            "counters": asdict(self.counters),
            "recent": [list(episode) for episode in self.recent],
            "gain_and_time": list(self.gain_and_time),
            "seconds": time.perf_counter() - self.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from a saved state."""
        self.counters = Counters(**state["counters"])
        self.recent = deque((tuple(episode) for episode in state["recent"]), maxlen=self.recent.maxlen)
        self.gain_and_time = deque(state["gain_and_time"], maxlen=RECENT_ROLLOUTS)
        self.spent = state["seconds"]
        self.start = time.perf_counter() - self.spent
        self.progress()  # raises now, before anything else is restored, if the state makes no sense


def mean(values: Iterable[float]) -> float | None:
    """Return the mean; None without values."""
    values = list(values)
    return sum(values) / len(values) if values else None

"""Settings of a run that do not depend on the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from canter.algorithms.base import AnyAlgorithmConfig
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.envs import EnvConfig
from canter.nn.schedules import schedules
from canter.runs.records import by_average
from canter.runs.run_folder import CheckpointConfig
from canter.training.execution import ExecutionConfig
from canter.training.progress import Report, SuccessConfig, UntilConfig
from canter.training.self_play import SelfPlayConfig


class Watcher(Protocol):
    """Called with every row of the log; may add values to the row, and does not affect training."""

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Return values to log by name, such as `eval/return`; {} most of the time."""
        ...

    def close(self) -> None:
        """Free resources at the end of the run."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Environment, algorithm, budget and seed: everything needed to repeat a run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """Environments to learn in."""
    algorithm: AnyAlgorithmConfig
    """Algorithm that learns."""
    total_steps: int | None = 100_000
    """Transitions to train for, over all environments; null only if `until` ends the run."""
    until: UntilConfig = field(default_factory=UntilConfig)
    """Further conditions that end the run, before `total_steps` or instead of it."""
    seed: int = 0
    """Seed of every random stream of the run."""
    device: str = "cpu"
    """Device of networks and rollouts: cpu, cuda, cuda:1, ..."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    """How computations run: mode, engine, precision and threads. Results differ by rounding
    only."""
    self_play: SelfPlayConfig | None = None
    """For two-player games: learn as one player against past policies; null learns as both
    players."""
    success: SuccessConfig = field(default_factory=SuccessConfig)
    """Definition of a successful episode, for the statistics."""
    recent_episodes: int = 100
    """Number of last episodes over which return, length and success rate are averaged;
    `until.mean_return` and the best policy by return use the same mean."""
    log_every: int = 1
    """Iterations between rows of the log; checkpoints and the end of the run write one in any case.
    The host waits for the device only to write a row. Counters and episodes cover all iterations
    since the last row, metrics the last update. For an algorithm with short iterations the unit is
    about a thousand steps. Does not affect training. Needs 24 bytes per step until the row is
    written."""
    doctor: bool = True
    """Look for faults while training: warnings, `report.findings` and `doctor/...` metrics. Does not
    affect training."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are saved, and how many are kept."""

    @property
    def by_average(self) -> bool:
        """True if runs are scored by reward per unit of time instead of the return of episodes."""
        objective = vars(self.algorithm).get("objective")
        return by_average({"algorithm.objective": objective, "checkpoints.best_by": self.checkpoints.best_by})

    @property
    def checkpoint_schedule(self) -> CheckpointConfig:
        """`checkpoints` with the score of the best policy; without one, the objective chooses it."""
        best_by = self.checkpoints.best_by or ("lta" if self.by_average else "return")
        return replace(self.checkpoints, best_by=best_by)

    def watchers(self, folder: Path | None) -> list[Watcher]:
        """Return the watchers of the run; `folder` is the run's."""
        return []

    def __post_init__(self) -> None:
        """Raise an error for invalid values, a run without end, or a missing run length."""
        check_range(self, "must be at least 1", "total_steps", "log_every", "recent_episodes")
        check_range(self, "must not be negative", "seed")
        if self.total_steps is None and self.until == UntilConfig():
            raise UserError("total_steps=null leaves the run without an end: set one of the keys of until")
        if self.total_steps is None and self.until.iterations is None:
            self._check_no_setting_needs_a_length()

    def _check_no_setting_needs_a_length(self) -> None:
        for key, schedule in _schedules_in(self, ""):
            if getattr(schedule, "follows_progress", True):
                raise UserError(
                    f"{key}: {type(schedule).__name__} follows the progress of the run, which is not known without "
                    "total_steps or until.iterations"
                )
        if self.checkpoints.num_checkpoints:
            raise UserError(
                f"checkpoints.num_checkpoints={self.checkpoints.num_checkpoints} are spread over the run, whose length "
                "is not known without total_steps or until.iterations"
            )


def _schedules_in(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield all schedules in a tree of settings, by key."""
    if isinstance(value, tuple(schedules.items().values())):
        yield key, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _schedules_in(item, f"{key}[{i}]")
    elif is_dataclass(value):
        for part in fields(value):
            yield from _schedules_in(getattr(value, part.name), f"{key}.{part.name}" if key else part.name)

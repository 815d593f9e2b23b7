"""Settings of a run, whatever it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from canter.algorithms.base import AnyAlgorithmConfig
from canter.core.registry import UserError
from canter.envs import EnvConfig
from canter.nn.schedules import schedules
from canter.runs.run_folder import CheckpointConfig
from canter.training.execution import ExecutionConfig
from canter.training.progress import Report, SuccessConfig, UntilConfig
from canter.training.self_play import SelfPlayConfig


class Watcher(Protocol):
    """Looks at a run wherever a row is logged, and may add values to the row; changes nothing that is learned."""

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Values to log by name, such as `eval/return`; mostly none."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Environment, algorithm, budget and seed: what is needed to repeat a run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """The environments to learn in."""
    algorithm: AnyAlgorithmConfig
    """The algorithm that learns."""
    total_steps: int | None = 100_000
    """Transitions to train for, over all environments; null only where `until` ends the run."""
    until: UntilConfig = field(default_factory=UntilConfig)
    """What else ends the run, before `total_steps` or instead of it."""
    seed: int = 0
    """Start of every random stream of the run."""
    device: str = "cpu"
    """Where environments' tensors and networks live: cpu, cuda, cuda:1, ..."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    """How the work is handed to the device; does not change what is learned."""
    self_play: SelfPlayConfig | None = None
    """For a game of two: learn in one of the seats, against past policies in the other; null learns in all seats."""
    success: SuccessConfig = field(default_factory=SuccessConfig)
    """Which episodes count as a success in the statistics."""
    recent_episodes: int = 100
    """Episodes over which return, length and success rate are means, and `until.mean_return` and the best policy by
    return are decided."""
    log_every: int = 1
    """Iterations between rows of the log; there is one with every checkpoint and at the end in any case. The host
    waits for the device only to write a row. Counters and episodes are of all iterations since the row before, metrics
    of the last update. With an algorithm of short iterations it counts a thousand steps or so instead. Does not
    change what is learned. Keeps 24 bytes for each step until the row."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state of the run is saved, and how much of it is kept."""

    def watchers(self, folder: Path | None) -> list[Watcher]:
        """What looks at the run while it goes on; `folder` is the run's."""
        return []

    def __post_init__(self) -> None:
        """Refuse values outside their range, a run without end, and what needs a length where there is none."""
        for name, least in (("total_steps", 1), ("log_every", 1), ("recent_episodes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}={value} must be at least {least}")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must not be negative")
        if self.total_steps is None and self.until == UntilConfig():
            raise UserError("total_steps=null leaves the run without an end: set one of the keys of until")
        if self.total_steps is None and self.until.iterations is None:
            self._refuse_what_needs_a_length()

    def _refuse_what_needs_a_length(self) -> None:
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
    """All schedules in a tree of settings, by their keys."""
    if isinstance(value, tuple(schedules.items().values())):
        yield key, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _schedules_in(item, f"{key}[{i}]")
    elif is_dataclass(value):
        for part in fields(value):
            yield from _schedules_in(getattr(value, part.name), f"{key}.{part.name}" if key else part.name)

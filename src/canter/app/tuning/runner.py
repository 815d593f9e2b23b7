"""Carry out the runs of a search or of a population, in processes of this and other sessions.

A plan says which runs are missing, from its journal alone. Each process that works on a folder
claims a run before it starts it; the system releases the claims of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from canter.app.experiments.launcher import LaunchedRun, Launcher
from canter.app.experiments.settings import with_overrides
from canter.app.experiments.sweep import POLL_SECONDS
from canter.app.tuning.space import plain_values
from canter.config import TrainConfig
from canter.config.files import dump_config, read_config
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import Malformed, read_json, replace_file, write_json
from canter.core.storage.lock import folder_mutex, is_locked

ATTEMPTS = 3
"""Times that a run is started whose process is killed."""
REFRESH_SECONDS = 1.0
"""Time between looks into the journal for results of other processes."""
T = TypeVar("T")
CLAIMS = ".claims"
BASE = "base.yaml"
BEST = "best.yaml"


@dataclass(frozen=True)
class Job:
    """A run, up to a number of steps."""

    candidate: str
    """`trial-003`, or `base` for the base settings."""
    seed: int
    steps: int

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the run of a result in the journal."""
        name, _, steps = key.rpartition("@")
        candidate, _, seed = name.rpartition("-seed")
        return cls(candidate, int(seed), int(steps))

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.candidate}-seed{self.seed}"

    @property
    def key(self) -> str:
        """Name of the result in the journal."""
        return f"{self.name}@{self.steps}"


class Plan(Protocol):
    """Runs that follow from a journal which several processes share."""

    folder: Path
    config: TrainConfig
    """Base settings."""
    spent: float
    """Seconds of work so far."""

    def refresh(self) -> None:
        """Read what other processes have written to the journal."""
        ...

    def next_jobs(self) -> list[Job]:
        """Return runs to do next, in any order; none once everything is done."""
        ...

    def is_done(self, job: Job) -> bool:
        """Return whether a run has ended as requested, also in a session that was killed."""
        ...

    def arguments(self, job: Job) -> list[str]:
        """Return the arguments of `canter` that start or resume a run."""
        ...

    def record(self, job: Job, *, failed: bool) -> str:
        """Record the result of a run that has ended and return a line about it."""
        ...

    def add_time(self, spent: float) -> None:
        """Record the seconds of work so far."""
        ...


def write_plan(file: Path, plan: Any, config: TrainConfig) -> None:
    """Write a plan and, beside it, the base settings."""
    replace_file(file.with_name(BASE), dump_config(config).encode())
    write_json(file, to_plain(plan))  # last: it makes the folder one that continues


def read_plan(file: Path, kind: type[T]) -> tuple[T, TrainConfig]:
    """Return what `write_plan` has written; raise UserError if it cannot be read."""
    try:
        plan = from_plain(read_json(file), kind)
    except (OSError, Malformed, ConfigError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return plan, read_config(file.with_name(BASE), within=file.parent).over(TrainConfig())


def write_best(plan: Plan, texts: Mapping[str, str], lead: str) -> Path:
    """Write settings as a file for `canter train ENV --config`, below a comment, and return it."""
    file = plan.folder / BEST
    config = with_overrides(plan.config, plain_values(texts))
    replace_file(file, f"# {lead}\n{dump_config(config)}".encode())
    return file


OnChange = Callable[[Any, str | None], Any]
"""Called now and then with the plan and a line about the run that has just ended, or None."""


@dataclass(frozen=True)
class _Started:
    """A run in a process of this session."""

    job: Job
    run: LaunchedRun
    claim: int


def claim(folder: Path, name: str) -> int | None:
    """Reserve a run for this process; return what `os.close` releases, None if another has it."""
    (folder / CLAIMS).mkdir(exist_ok=True)
    fd = os.open(folder / CLAIMS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def run_plan(plan: Plan, jobs: int, on_change: OnChange) -> None:
    """Run everything that is missing, `jobs` runs at a time.

    A run whose process was killed is resumed. Runs of an earlier session that was killed may still
    be alive; they end by themselves and count. When this is interrupted, all its runs stop and save
    before the error is raised.
    """
    with Launcher() as launcher, closing(_Session(plan, jobs, launcher)) as session:
        while session.todo or session.running:
            lines = session.advance()
            for line in lines or [None]:
                on_change(plan, line)
            if not lines:
                time.sleep(POLL_SECONDS)


class _Session:
    """The work of this process on a plan."""

    def __init__(self, plan: Plan, jobs: int, launcher: Launcher) -> None:
        self.plan = plan
        self.jobs = jobs
        self.launcher = launcher
        self.running: dict[str, _Started] = {}
        self.attempts: dict[str, int] = {}
        self.start = time.monotonic()
        self.todo: list[Job] = []
        self.before = plan.spent
        self._look()

    def close(self) -> None:
        """Release the runs of this session."""
        for started in self.running.values():
            os.close(started.claim)

    def _look(self) -> None:
        """Ask the plan for the missing runs, while no other process writes to its journal."""
        with folder_mutex(self.plan.folder):
            self.plan.refresh()
            self.plan.spent = max(self.plan.spent, self.before + time.monotonic() - self.start)
            self.todo = self.plan.next_jobs()
        self.looked = time.monotonic()

    def advance(self) -> list[str]:
        """Start runs, record those that have ended, and return a line about each of these."""
        lines = self._end_runs()
        for job in list(self.todo):
            if job.name not in self.running and len(self.running) < self.jobs and not lines:
                lines += self._start(job)
        if lines or time.monotonic() - self.looked > REFRESH_SECONDS:
            self._look()
        return lines

    def _start(self, job: Job) -> list[str]:
        """Start a run unless another process has it; record it if it has ended already."""
        held = claim(self.plan.folder, job.name)
        if held is None:
            return []
        self._look()
        if job not in self.todo or is_locked(self.plan.folder / job.name):
            os.close(held)  # another process has recorded it, or a run outlives the session that started it
            return []
        if self.plan.is_done(job):
            return [self._record(job, held, failed=False)]
        self.attempts[job.key] = self.attempts.get(job.key, 0) + 1
        with folder_mutex(self.plan.folder):
            arguments = self.plan.arguments(job)
        run = self.launcher.start(arguments, self.plan.folder / f"{job.name}.log")
        self.running[job.name] = _Started(job, run, held)
        return []

    def _end_runs(self) -> list[str]:
        self.launcher.update()
        lines: list[str] = []
        for name, started in list(self.running.items()):
            code = started.run.returncode
            if code is None:
                continue
            del self.running[name]
            killed = code < 0 or is_locked(self.plan.folder / name)
            if killed and self.attempts[started.job.key] < ATTEMPTS:
                os.close(started.claim)
            else:
                lines.append(self._record(started.job, started.claim, failed=code != 0))
        return lines

    def _record(self, job: Job, held: int, *, failed: bool) -> str:
        """Record a run that has ended, and release it."""
        with folder_mutex(self.plan.folder):
            self.plan.refresh()
            line = self.plan.record(job, failed=failed)
            self.plan.add_time(max(self.plan.spent, self.before + time.monotonic() - self.start))
        os.close(held)
        return line

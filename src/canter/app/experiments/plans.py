"""Plans of runs in a folder, and how processes carry them out: sweeps, searches and populations.

A plan says which runs are missing, from the files in its folder alone. Each process that works on a
folder claims a run before it starts it; the system releases the claims of a process that dies.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from canter.app.console.text import format_number
from canter.app.experiments.folders import numbered_names
from canter.app.experiments.launcher import LaunchedRun, Launcher
from canter.core.registry import UserError
from canter.core.storage.files import Malformed, parse_json, read_untrusted, replace_file
from canter.core.storage.lock import folder_mutex, is_locked, owner_text
from canter.runs.metrics import METRICS, read_last_row
from canter.runs.records import (
    CONFIG,
    SWEEP,
    by_average,
    is_complete,
    read_record,
    read_settings,
    run_status,
    score_value,
)

MAX_BYTES = 16 << 20
POLL_SECONDS = 0.2
REFRESH_SECONDS = 1.0
"""Time after which the results of other processes are read again."""
CLAIMS = ".claims"


class Plan(ABC):
    """Runs in a folder, of which several processes may each do some.

    A run has a `name`, that of its folder, and a `key`, that of its result: a run up to some steps
    may have another one than the same run up to more.
    """

    attempts = 3
    """Times that a run is started whose process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spent = 0.0
        """Seconds of work so far, over all sessions of all processes."""

    def refresh(self) -> None:  # noqa: B027 - a sweep has nothing to read
        """Read what other processes have written."""

    @abstractmethod
    def next_runs(self) -> Sequence[Any]:
        """Return runs to do next, in any order; none once everything is done."""

    @abstractmethod
    def is_done(self, run: Any, /) -> bool:
        """Return whether a run has ended as requested, also in a session that was killed."""

    @abstractmethod
    def arguments(self, run: Any, /) -> list[str]:
        """Return the arguments of `canter` that start or resume a run."""

    @abstractmethod
    def record(self, run: Any, /, *, failed: bool) -> str:
        """Record the result of a run that has ended and return a line about it."""

    def add_time(self, spent: float) -> None:
        """Record the seconds of work so far."""
        self.spent = spent

    @abstractmethod
    def progress(self) -> dict[str, str]:
        """Return how far the plan is, by name."""

    def table(self) -> dict[str, str]:
        """Return the rows of a live display, by name."""
        return self.progress()


OnChange = Callable[[Any, str | None], Any]
"""Called now and then with the plan and a line about the run that has just ended, or None."""


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
        self.running: dict[str, tuple[Any, LaunchedRun, int]] = {}
        """Run, process and the file descriptor of its claim, by name."""
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.in_use: set[str] = set()
        """Runs of other sessions that were reported."""
        self.start = time.monotonic() - plan.spent
        self.todo: Sequence[Any] = []
        self._refresh()

    def close(self) -> None:
        """Release the runs of this session."""
        for _, _, fd in self.running.values():
            os.close(fd)

    def _refresh(self) -> None:
        """Ask the plan for the missing runs, while no other process writes to its journal."""
        with folder_mutex(self.plan.folder):
            self.plan.refresh()
            self.plan.spent = max(self.plan.spent, time.monotonic() - self.start)
            self.todo = self.plan.next_runs()
        self.refreshed = time.monotonic()

    def advance(self) -> list[str]:
        """Start runs, record those that have ended, and return a line about each of these."""
        lines = self._end_runs()
        for run in self.todo:
            if run.name not in self.running and len(self.running) < self.jobs and not lines:
                lines += self._start(run)
        if lines or time.monotonic() - self.refreshed > REFRESH_SECONDS:
            self._refresh()
        return lines

    def _start(self, run: Any) -> list[str]:
        """Start a run unless another process has it; record it if it has ended already."""
        fd = claim(self.plan.folder, run.name)
        if fd is None:
            return []
        self._refresh()
        in_use = owner_text(self.plan.folder / run.name)
        if run not in self.todo or in_use is not None:
            os.close(fd)  # another process has recorded it, or a run outlives the session that started it
            if in_use is None or run.name in self.in_use:
                return []
            self.in_use.add(run.name)
            return [in_use]
        if self.plan.is_done(run):
            return [self._record(run, fd, failed=False)]
        self.attempts[run.name, run.key] += 1
        with folder_mutex(self.plan.folder):
            arguments = self.plan.arguments(run)
        process = self.launcher.start(arguments, self.plan.folder / f"{run.name}.log")
        self.running[run.name] = run, process, fd
        return []

    def _end_runs(self) -> list[str]:
        self.launcher.update()
        lines: list[str] = []
        for name, (run, process, fd) in list(self.running.items()):
            if process.returncode is None:
                continue
            del self.running[name]
            killed = process.returncode < 0 or is_locked(self.plan.folder / name)
            if killed and self.attempts[run.name, run.key] < self.plan.attempts:
                os.close(fd)
            else:
                lines.append(self._record(run, fd, failed=process.returncode != 0))
        return lines

    def _record(self, run: Any, fd: int, *, failed: bool) -> str:
        """Record a run that has ended, and release it."""
        with folder_mutex(self.plan.folder):
            self.plan.refresh()
            line = self.plan.record(run, failed=failed)
            self.plan.add_time(max(self.plan.spent, time.monotonic() - self.start))
        os.close(fd)
        return line


@dataclass(frozen=True)
class Commands:
    """The arguments of the runs of a plan, as stored in its folder."""

    folder: Path
    base: list[str]
    """Arguments of `canter` shared by all runs."""
    runs: dict[str, list[str]]
    """Arguments of each run, in addition to the shared ones, by its name."""

    @staticmethod
    def read(folder: Path) -> Commands:
        """Read the commands of a folder."""
        try:
            content = parse_json(read_untrusted(folder / SWEEP, MAX_BYTES, within=folder))
        except (OSError, Malformed) as error:
            raise UserError(f"{folder / SWEEP} cannot be read: {error}") from error
        match content:
            case {"base": list(base), "runs": dict(runs)}:
                arguments = {str(name): [*map(str, own)] for name, own in runs.items()}
                return Commands(folder, [*map(str, base)], arguments)
        raise UserError(f"{folder / SWEEP} is not the file of a sweep")

    def write(self) -> None:
        """Store the commands in the folder."""
        content = {"base": self.base, "runs": self.runs}
        replace_file(self.folder / SWEEP, (json.dumps(content, indent=1) + "\n").encode())

    def add(self, name: str, arguments: list[str]) -> None:
        """Add a run to the stored ones, to which other processes may add theirs."""
        if (self.folder / SWEEP).is_file():
            self.runs.update(Commands.read(self.folder).runs)
        self.runs[name] = arguments
        self.write()

    def arguments(self, name: str, *more: str) -> list[str]:
        """Return the arguments of `canter` that start a run, or resume it, with further settings."""
        path = self.folder / name
        if not (path / CONFIG).is_file():
            place = ["--run-dir", str(self.folder), "--name", name]
            return [*self.base, *self.runs[name], *more, *place, "--console", "lines"]
        has_checkpoint = any((path / "checkpoints").glob("step-*"))
        scratch = [] if has_checkpoint or not (path / METRICS).is_file() else ["--from-scratch"]
        return ["resume", str(path), *more, *scratch, "--console", "lines"]


class SweepRun(NamedTuple):
    """A run of a sweep, to its end."""

    name: str
    key: str = "end"


class Sweep(Plan):
    """Runs that are all known from the start."""

    attempts = 1

    def __init__(self, commands: Commands) -> None:
        super().__init__(commands.folder)
        self.commands = commands
        self.ended: set[str] = set()
        """Runs that have ended in this session."""
        self.failed: list[str] = []
        self._averages: dict[str, bool] = {}
        """Whether a run is scored by reward per unit of time, by its name, once its settings are there."""

    def next_runs(self) -> list[SweepRun]:
        """Return the runs that are not complete and have not ended in this session."""
        return [SweepRun(name) for name in self._unfinished() if name not in self.ended]

    def _unfinished(self) -> list[str]:
        return [name for name in self.commands.runs if not is_complete(self.folder / name)]

    def is_done(self, run: SweepRun) -> bool:
        """Return whether a run is trained and evaluated."""
        return is_complete(self.folder / run.name)

    def arguments(self, run: SweepRun) -> list[str]:
        """Return the arguments of `canter` that start or resume a run."""
        return self.commands.arguments(run.name)

    def record(self, run: SweepRun, *, failed: bool) -> str:
        """Note that a run has ended and return its state in a line."""
        self.ended.add(run.name)
        self.failed += [run.name] * failed
        return f"{run.name}: {self.state(run.name)}"

    def state(self, name: str) -> str:
        """Return status, steps, return and score of a run."""
        path = self.folder / name
        status = "failed" if name in self.failed else run_status(path)
        row = read_last_row(path / METRICS)
        if name not in self._averages and (path / CONFIG).is_file():
            self._averages[name] = by_average(read_settings(path / CONFIG))
        average = self._averages.get(name, False)
        steps = "no" if row.get("env_steps") is None else f"{row['env_steps']:,.0f}"
        return_ = format_number(row.get("lta/mean" if average else "return"))
        score = format_number(score_value(read_record(path).get("score"), average=average))
        shown = "waiting" if status == "unknown" else status
        return f"{shown}, {steps} steps, return {return_}, score {score}"

    def progress(self) -> dict[str, str]:
        """Return how many runs are missing."""
        return {"progress": f"{len(self._unfinished())} of {len(self.commands.runs)} to go"}

    def table(self) -> dict[str, str]:
        """Return the states of all runs, by name."""
        return {name: self.state(name) for name in self.commands.runs}


def combinations(varied: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the flags of every combination of values, by a name made of the settings that vary."""
    varying = [key for key, values in varied.items() if len(values) > 1]
    found: dict[str, list[str]] = {}
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        parts = [f"{key.rpartition('.')[2].replace('-', '_')}{chosen[key]}" for key in varying] or ["run"]
        stem = re.sub(r"[^\w.=-]+", "_", "-".join(parts))[:150]
        name = next(name for name in numbered_names(stem) if name not in found)
        found[name] = [f"--{key}={value}" for key, value in chosen.items()]
    return found

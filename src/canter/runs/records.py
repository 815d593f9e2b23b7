"""Records of runs: `run.json`, which says when, where and how a run was made and how it ended.

Also finds run folders by the name that a user types, and reads their settings. All of it does
without torch, so that `canter runs` starts quickly.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from canter.core.machine import describe_machine, describe_versions
from canter.core.plain import ConfigError
from canter.core.registry import UserError, nearest
from canter.core.storage.files import Malformed, read_json, read_yaml, write_json
from canter.core.storage.lock import is_locked

RECORD = "run.json"
TRACEBACK_IN = "The traceback is in"
"""Words before the name of the file, in messages about errors that ended a run."""
CONFIG = "config.yaml"
AVERAGE_SCORE = "long_run_average"
HALL = "hall_of_fame"
"""Folder of the best policies, next to the runs."""

Outcome = Literal["finished", "stopped", "failed"]
"""`finished`: the budget is used up or an end condition holds; `stopped`: by a signal or the
caller; `failed`: by an error."""
Status = Literal["running", "finished", "stopped", "failed", "interrupted", "unknown"]
"""`interrupted`: the process died without writing its outcome, by `kill -9` or with the machine."""

_log = logging.getLogger(__name__)


class RunRecord:
    """Writes the record of a run; a failure to write costs the record, never the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.content: dict[str, Any] = {}

    @property
    def identity(self) -> str | None:
        """Unique id of the run; None without a record."""
        identity = read_record(self.path.parent).get("id")
        return identity if isinstance(identity, str) else None

    def begin(self, identity: str, about: dict[str, Any]) -> None:
        """Record that this process runs it; `about` is the algorithm's description.

        A run that resumes keeps the time of its start.
        """
        from canter.core import distributed

        now = _now()
        before = read_record(self.path.parent)
        self.content = {
            "id": identity,
            "status": "running",
            "started": before.get("started", now),
            "resumed": now if before else None,
            "ended": None,
            "ended_by": None,
            "error": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ranks": distributed.world_size(),
            "command": sys.argv,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "about": about,
            "init_from": before.get("init_from"),
            "score": None,
            "evaluated": False,
        }
        self._write()

    def end(self, outcome: Outcome, error: BaseException | None = None, ended_by: str | None = None) -> None:
        """Record the outcome, and for a finished run the setting that ended it."""
        text = None if error is None else f"{type(error).__name__}: {error}"[:2000]
        self.content |= {"status": outcome, "ended": _now(), "ended_by": ended_by, "error": text}
        self._write()

    def note(self, **facts: Any) -> None:
        """Add facts to the record."""
        self.content |= facts
        self._write()

    def _write(self) -> None:
        try:
            write_json(self.path, self.content)
        except (OSError, ValueError) as error:
            _log.warning("%s could not be written (%s); the run is not affected", self.path, error)


def by_average(settings: Mapping[str, Any]) -> bool:
    """Return whether a run is scored by reward per unit of time; `settings` are flat, by key.

    The objective `average` says so, and so does `checkpoints.best_by: lta`.
    """
    return settings.get("algorithm.objective") == "average" or settings.get("checkpoints.best_by") == "lta"


def score_value(score: Any, *, average: bool) -> float | None:
    """Return the number to show of a stored score: the long-run average if a run is scored by that.

    Otherwise the mean return; the other one if there is only that, None without any.
    """
    value = score.get(_score_key(score, average)) if isinstance(score, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def is_average_score(score: Any, *, average: bool) -> bool:
    """Return whether `score_value` is the long-run average."""
    return isinstance(score, Mapping) and _score_key(score, average) == AVERAGE_SCORE


def _score_key(score: Mapping[str, Any], average: bool) -> str:
    first, second = (AVERAGE_SCORE, "mean") if average else ("mean", AVERAGE_SCORE)
    return second if second in score and first not in score else first


def write_score(folder: Path, score: dict[str, Any]) -> None:
    """Add the score of the final policy in new episodes to the record of a run."""
    _note_later(folder, score=score)


def write_evaluated(folder: Path) -> None:
    """Note that the evaluation of a run is over, with a score or without, or that there was to be none."""
    _note_later(folder, evaluated=True)


def is_complete(folder: Path) -> bool:
    """Return whether a run is trained and evaluated; earlier versions did not record the evaluation."""
    return run_status(folder) == "finished" and read_record(folder).get("evaluated", True)


def _note_later(folder: Path, **facts: Any) -> None:
    """Add facts to the record of a run that has ended."""
    record = RunRecord(folder)
    record.content = read_record(folder)
    record.note(**facts)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a run; empty if there is none or it cannot be read."""
    try:
        content = read_json(folder / RECORD)
    except (OSError, Malformed):
        return {}
    return content if isinstance(content, dict) else {}


def run_status(folder: Path) -> Status:
    """Return the status of a run; a process of another machine counts as running."""
    status = read_record(folder).get("status")
    if status == "running" and not is_locked(folder):
        return "interrupted"
    known = status in ("running", "finished", "stopped", "failed")
    return cast(Status, status) if known else "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


RUNS = Path("runs")
LATEST = "latest"
SWEEP = "sweep.json"
"""File with the plan of a sweep, in its folder."""


def find_run(text: str, runs: Path = RUNS) -> Path:
    """Return the run folder that `text` names.

    It is a path, `latest`, or the beginning of exactly one name in the folder `runs`.
    """
    if (exact := _exactly(text, runs)) is not None:
        return exact
    matching = list(_matching(text, runs))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(f"{text!r} could be any of {', '.join(sorted(path.name for path in matching))}")
    raise UserError(f"no run {text!r} here or under {runs}: {nearest(text, [path.name for path in run_folders(runs)])}")


def find_all(text: str, runs: Path = RUNS) -> list[Path]:
    """Return all runs that `text` names: one, those in a folder, or all with this prefix.

    The hall of fame, which `runs/*` names too, has none.
    """
    if Path(text).name == HALL and Path(text).is_dir():
        return []
    if (exact := _exactly(text, runs)) is not None:
        return [exact]
    for folder in (Path(text), runs / text):
        if folder.is_dir() and (inside := list(run_folders(folder))):
            return inside
    return list(_matching(text, runs)) or [find_run(text, runs)]


def run_folders(runs: Path, marks: tuple[str, ...] = (CONFIG,)) -> Iterator[Path]:
    """Yield the runs, folders with one of the files `marks`, in a folder and its sweeps."""
    for path in sorted(runs.iterdir()) if runs.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            continue
        if any(os.path.isfile(path / name) for name in marks):  # False, not an error, without permission to read it
            yield path
        elif os.path.isfile(path / SWEEP):
            yield from run_folders(path, marks)


def _exactly(text: str, runs: Path) -> Path | None:
    for candidate in (Path(text), runs / text):
        if (candidate / CONFIG).is_file():
            return candidate.resolve() if candidate.is_symlink() else candidate
    return None


def _matching(text: str, runs: Path) -> Iterator[Path]:
    """Yield runs whose name, or path in their sweep, begins with `text`."""
    for path in run_folders(runs):
        if path.name.startswith(text) or str(path.relative_to(runs)).startswith(text):
            yield path


MAX_SETTINGS = 1000


def read_settings(path: Path, translate: Callable[[Any], Any] = lambda content: content) -> dict[str, Any]:
    """Return a run's settings by dotted key path; empty if the file cannot be read.

    They are not checked, because other versions of Canter may have written them. `translate` may
    replace the plain content of the file before its keys are joined.
    """
    try:
        content, _ = read_yaml(path, within=path.parent)
    except ConfigError:
        return {}
    return dict(islice(flatten(translate(content)), MAX_SETTINGS))


def flatten(plain: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield dotted key paths and values of nested mappings; an empty mapping is a value."""
    if isinstance(plain, dict) and plain and depth < 20:
        for name, value in plain.items():
            yield from flatten(value, f"{key}.{name}" if key else str(name), depth + 1)
    elif key:
        yield key, plain


def is_unstarted(path: Path) -> bool:
    """Return whether a folder has at most files of a run that died before it began."""
    scraps = re.compile(r"\.?run\.(lock|json).*|\.config\.yaml\.partial")
    return path.is_dir() and all(scraps.fullmatch(entry.name) for entry in path.iterdir())


def link_latest(path: Path) -> None:
    """Point the link `latest`, next to a run, to it, if the file system has links."""
    fresh = path.with_name(f".{LATEST}-{os.getpid()}")
    try:
        fresh.symlink_to(path.name)
        os.replace(fresh, path.with_name(LATEST))
    except OSError:
        fresh.unlink(missing_ok=True)

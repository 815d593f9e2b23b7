"""`run.json`: when, where and how a run was made, and how it ended.

Finding runs by what people type, without torch: `canter runs` should not wait for it.

Reading what a run has left on disk, however damaged, without torch: `canter runs` should not wait for it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from canter.core.machine import describe_machine, describe_versions
from canter.core.plain import ConfigError
from canter.core.registry import UserError, nearest
from canter.core.storage.files import open_untrusted
from canter.core.storage.lock import is_locked
from canter.core.storage.strict import Malformed, read_json, read_yaml, write_json

RECORD, CONFIG, METRICS = "run.json", "config.yaml", "metrics.jsonl"

Outcome = Literal["finished", "stopped", "failed"]
"""It used up its budget or met a condition, it was asked to stop before, or an error ended it."""
Status = Literal["running", "finished", "stopped", "failed", "interrupted", "unknown"]
"""`interrupted`: its process died without reporting it, by `kill -9` or with the machine."""

_log = logging.getLogger(__name__)


class RunRecord:
    """Writes the record of a run; a disk that refuses costs the record, never the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.content: dict[str, Any] = {}

    @property
    def identity(self) -> str | None:
        """What tells the run from all others; None where nothing is written of it."""
        found = read_record(self.path.parent).get("id")
        return found if isinstance(found, str) else None

    def begin(self, identity: str, about: dict[str, Any]) -> None:
        """Note that this process works on the run, and what the algorithm says `about` itself.

        A run that goes on keeps the time of its start.
        """
        from canter.core import distributed

        now, before = _now(), read_record(self.path.parent)
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
        }
        self._write()

    def end(self, ending: Outcome, error: BaseException | None = None, ended_by: str | None = None) -> None:
        """Note how it ended, and for a finished run which setting ended it."""
        text = None if error is None else f"{type(error).__name__}: {error}"[:2000]
        self.content |= {"status": ending, "ended": _now(), "ended_by": ended_by, "error": text}
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


def write_score(folder: Path, score: dict[str, Any]) -> None:
    """Add to a record how good the final policy was in new episodes; a disk that refuses costs only that."""
    record = RunRecord(folder)
    record.content = read_record(folder)
    record.note(score=score)


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a run; empty if there is none, or it cannot be read."""
    try:
        content = read_json(folder / RECORD)
    except (OSError, Malformed):
        return {}
    return content if isinstance(content, dict) else {}


def run_status(folder: Path) -> Status:
    """Whether a run goes on, or how it ended; a process of another machine is believed to be alive."""
    status = read_record(folder).get("status")
    if status == "running" and not is_locked(folder):
        return "interrupted"
    return cast(Status, status) if status in ("running", "finished", "stopped", "failed") else "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


RUNS, LATEST = Path("runs"), "latest"
SWEEP = "sweep.json"
"""In the folder of a sweep: what is to be run."""


def find_run(text: str, parent: Path = RUNS) -> Path:
    """The run folder that `text` means: a path, `latest`, or the beginning of exactly one name under `parent`."""
    if (exact := _exactly(text, parent)) is not None:
        return exact
    matching = list(_matching(text, parent))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(f"{text!r} could be any of {', '.join(sorted(path.name for path in matching))}")
    raise UserError(
        f"no run {text!r} here or under {parent}: {nearest(text, [path.name for path in run_folders(parent)])}"
    )


def find_all(text: str, parent: Path = RUNS) -> list[Path]:
    """All runs that `text` means: one, those of a folder such as a sweep's, or all whose names begin with it."""
    if (exact := _exactly(text, parent)) is not None:
        return [exact]
    for folder in (Path(text), parent / text):
        if folder.is_dir() and (inside := list(run_folders(folder))):
            return inside
    return list(_matching(text, parent)) or [find_run(text, parent)]


def run_folders(parent: Path, marks: tuple[str, ...] = (CONFIG,)) -> Iterator[Path]:
    """The runs in a folder, and in the folders of sweeps within it, by name: folders with one of the files `marks`."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            continue
        if any(os.path.isfile(path / name) for name in marks):  # False, not an error, in a folder of somebody else
            yield path
        elif os.path.isfile(path / SWEEP):
            yield from run_folders(path, marks)


def _exactly(text: str, parent: Path) -> Path | None:
    for candidate in (Path(text), parent / text):
        if (candidate / CONFIG).is_file():
            return candidate.resolve() if candidate.is_symlink() else candidate
    return None


def _matching(text: str, parent: Path) -> Iterator[Path]:
    """Runs whose name, or name in their sweep, begins so."""
    for path in run_folders(parent):
        if path.name.startswith(text) or str(path.relative_to(parent)).startswith(text):
            yield path


MAX_ROWS = 4000
"""Of longer files only every n-th row is read."""
MAX_LINE = 1 << 20
MAX_BYTES = 4 << 30
MAX_SETTINGS = 1000
TAIL = 1 << 16
"""Where the last row is looked for."""

Row = dict[str, float]
"""One iteration: names to finite numbers."""


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a metrics file, thinned out to about `MAX_ROWS`; what is no row is passed over."""
    try:
        with open_untrusted(path, MAX_BYTES, within=path.parent) as file:
            start = file.read(TAIL)
            length = max(1.0, len(start) / max(1, start.count(b"\n")))
            stride = max(1, math.ceil(os.fstat(file.fileno()).st_size / length / MAX_ROWS))
            file.seek(0)
            number, line = 0, b""
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b"")):
                if number % stride == 0 and (row := parse_row(line)):
                    yield row
            if number % stride and (row := parse_row(line)):  # the last one is always shown
                yield row
    except OSError:
        return


def read_last_row(path: Path) -> Row:
    """The last whole row of a metrics file, without reading the others; empty if there is none near the end."""
    try:
        with open_untrusted(path, MAX_BYTES, within=path.parent) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).splitlines()
    except OSError:
        return {}
    return next((row for line in reversed(lines) if (row := parse_row(line))), {})


def parse_row(line: bytes) -> Row:
    """The finite numbers of one line; empty where the line is torn or holds no `env_steps`."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    row: Row = {}
    for name, value in content.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            row[name] = float(value)
    return row if "env_steps" in row else {}


def read_settings(path: Path) -> dict[str, Any]:
    """A run's settings as dotted key paths; empty where the file cannot be read.

    Older or newer versions may know other settings, so they are shown as they are and not checked.
    """
    try:
        content, _ = read_yaml(path, within=path.parent)
    except ConfigError:
        return {}
    return dict(islice(flatten(content), MAX_SETTINGS))


def flatten(plain: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted key paths and values of nested mappings; an empty mapping is a value."""
    if isinstance(plain, dict) and plain and depth < 20:
        for name, value in plain.items():
            yield from flatten(value, f"{key}.{name}" if key else str(name), depth + 1)
    elif key:
        yield key, plain

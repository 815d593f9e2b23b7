"""`run.json`: when, where and how a run was made, and how it ended."""

from __future__ import annotations

import logging
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from canter.machine import describe_machine, describe_versions
from canter.storage.lock import is_held
from canter.storage.strict_json import Malformed, read_json, write_json

RECORD, CONFIG, METRICS = "run.json", "config.yaml", "metrics.jsonl"

Ending = Literal["finished", "stopped", "failed"]
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
        from canter import distributed  # brings torch, for which `canter runs` should not wait

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

    def end(self, ending: Ending, error: BaseException | None = None, ended_by: str | None = None) -> None:
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
    if status == "running" and not is_held(folder):
        return "interrupted"
    return cast(Status, status) if status in ("running", "finished", "stopped", "failed") else "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

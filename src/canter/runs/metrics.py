"""The metrics log of a run, `metrics.jsonl`: writing, truncating and reading it, however damaged.

Reading does without torch, so that `canter runs` starts quickly.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from canter.core.storage.files import Malformed, append, open_untrusted, parse_json, replace_file

METRICS = "metrics.jsonl"
DAMAGED = "metrics.damaged.jsonl"
MAX_PENDING = 10_000
"""Limit of rows that wait for space on the disk."""
MAX_ROWS = 4000
"""Number of rows above which only every n-th is read."""
MAX_LINE = 1 << 20
MAX_BYTES = 4 << 30
TAIL = 1 << 16
"""Bytes at the end of the file in which the last row is searched."""

Row = dict[str, float]
"""One row of the log, usually of one iteration: finite numbers by name."""

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows to the file; a disk that is full costs rows at most, never the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: deque[str] = deque(maxlen=MAX_PENDING)
        """Lines that could not be written yet."""

    def append(self, row: dict[str, Any]) -> None:
        """Append a row and its `wall_time`; if writing fails, retry with the next row."""
        # JSON has neither NaN nor infinity.
        finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        self.pending.append(json.dumps({**finite, "wall_time": time.time()}, allow_nan=False) + "\n")
        try:
            append(self.path, "".join(self.pending).encode())
            self.pending.clear()
        except OSError as error:
            _log.warning("%s could not be written (%s); training goes on", self.path, error)

    def truncate_after(self, iteration: int) -> None:
        """Remove rows of later iterations, which are about to be repeated.

        Damaged lines are moved to a separate file.
        """
        if not self.path.exists():
            return
        damaged_path = self.path.with_name(DAMAGED)
        damaged = 0

        def kept_lines() -> Iterator[bytes]:
            nonlocal damaged
            with open_untrusted(self.path, MAX_BYTES, within=self.path.parent) as file:
                for line in iter(lambda: file.readline(MAX_LINE), b""):
                    number = _iteration_of(line)
                    if number is None:
                        damaged += 1
                        append(damaged_path, line.rstrip(b"\n") + b"\n")
                    elif number <= iteration:
                        yield line.rstrip(b"\n") + b"\n"

        try:
            replace_file(self.path, kept_lines())
        except OSError as error:
            _log.warning("%s may contain some iterations twice (%s)", self.path, error)
        if damaged:
            _log.warning("%d damaged lines of %s are kept in %s", damaged, self.path, damaged_path)


def _iteration_of(line: bytes) -> float | None:
    """Return the iteration of a row; None if the line is damaged."""
    try:
        return float(parse_json(line)["iteration"])
    except (Malformed, ValueError, LookupError, TypeError, OverflowError):
        return None


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a metrics log, about `MAX_ROWS` at most; skip damaged lines."""
    try:
        with open_untrusted(path, MAX_BYTES, within=path.parent) as file:
            start = file.read(TAIL)
            length = max(1.0, len(start) / max(1, start.count(b"\n")))
            stride = max(1, math.ceil(os.fstat(file.fileno()).st_size / length / MAX_ROWS))
            file.seek(0)
            number = 0
            line = b""
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b"")):
                if number % stride == 0 and (row := parse_row(line)):
                    yield row
            if number % stride and (row := parse_row(line)):  # always include the last one
                yield row
    except OSError:
        return


def read_last_row(path: Path) -> Row:
    """Return the last undamaged row, from the end of the file only; empty if there is none."""
    try:
        with open_untrusted(path, MAX_BYTES, within=path.parent) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).splitlines()
    except OSError:
        return {}
    return next((row for line in reversed(lines) if (row := parse_row(line))), {})


def parse_row(line: bytes) -> Row:
    """Return the finite numbers of a line; empty if it is damaged or has no `env_steps`."""
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

"""Reading what a run has left on disk, however damaged: a report shows what there is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from canter.plain import ConfigError
from canter.runs.run_folder import CONFIG, METRICS
from canter.runs.run_record import Status, read_record, run_status
from canter.storage.strict_yaml import read_yaml
from canter.storage.untrusted import open_untrusted

MAX_ROWS = 4000
"""Of longer files only every n-th row is read."""
MAX_LINE = 1 << 20
MAX_COLUMNS = 300
MAX_BYTES = 4 << 30
MAX_SETTINGS = 1000
TAIL = 1 << 16
"""Where the last row is looked for."""

Row = dict[str, float]
"""One iteration: names to finite numbers."""


@dataclass(frozen=True)
class RunData:
    """One run: its settings, its record and its metrics."""

    path: Path
    settings: dict[str, Any]
    """Dotted key paths to plain values; empty if they cannot be read."""
    record: dict[str, Any]
    """`run.json`; empty if it cannot be read."""
    status: Status
    columns: dict[str, np.ndarray]
    """Metrics by name, float64 `[rows]`, NaN where a row has none; `env_steps` is among them and grows."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.path.resolve().name

    @property
    def env_id(self) -> str:
        """The environment."""
        return str(self.settings.get("env.id", "unknown environment"))

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.settings.get("seed", "?"))

    @property
    def rows(self) -> int:
        """Iterations that were read."""
        return len(self.column("env_steps"))

    def column(self, name: str) -> np.ndarray:
        """A metric `[rows]`; all NaN if there is none of the name."""
        found = self.columns.get(name)
        return np.full(len(self.columns["env_steps"]), np.nan) if found is None else found

    def points(self, name: str, x: str = "env_steps") -> tuple[np.ndarray, np.ndarray]:
        """Where a metric has a value, and the value."""
        values, place = self.column(name), self.column(x)
        there = np.isfinite(values) & np.isfinite(place)
        return place[there], values[there]

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        _, values = self.points(name)
        return float(values[-1]) if len(values) else None

    @property
    def speed(self) -> float | None:
        """Env steps per second over the whole run."""
        steps, seconds = self.last("env_steps"), self.last("seconds")
        return steps / seconds if steps and seconds else None

    @cached_property
    def time_split(self) -> dict[str, float]:
        """Seconds of the whole run by part, from the rows that were read."""
        parts = {
            name.removeprefix("time/"): float(np.nansum(values))
            for name, values in self.columns.items()
            if name.startswith("time/") and name != "time/steps_per_second"
        }
        measured, whole = sum(parts.values()), self.last("seconds")
        scale = whole / measured if whole and measured > 0 else 1.0
        return {name: seconds * scale for name, seconds in parts.items() if seconds > 0}


def read_run(path: Path) -> RunData:
    """All that is to be known of a run; raises `ValueError` where there is no row of metrics."""
    rows = _forward(read_rows(path / METRICS))
    if not rows:
        raise ValueError(f"{path}: no metrics to report; {METRICS} is missing, empty or damaged throughout")
    names = list(dict.fromkeys(name for row in rows for name in row))[:MAX_COLUMNS]
    if "env_steps" not in names:
        names.append("env_steps")
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    return RunData(path, read_settings(path / CONFIG), read_record(path), run_status(path), columns)


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


def _forward(rows: Iterator[Row]) -> list[Row]:
    """Rows in the order of their steps; where a run went back and repeated some, the later ones count."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["env_steps"] >= row["env_steps"]:
            kept.pop()
        kept.append(row)
    return kept


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

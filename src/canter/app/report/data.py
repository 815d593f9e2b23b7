"""Reading what a run has left on disk, however damaged: a report shows what there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from canter.core.registry import UserError
from canter.core.storage.files import read_untrusted
from canter.runs.records import CONFIG, METRICS, Row, Status, flatten, read_record, read_rows, read_settings, run_status

__all__ = ["RunData", "flatten", "read_run"]

MAX_COLUMNS, MAX_STRIP = 300, 4 << 20
PNG = b"\x89PNG\r\n\x1a\n"


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

    def column(self, name: str) -> np.ndarray:
        """A metric `[rows]`; all NaN if there is none of the name."""
        return self.columns.get(name, np.full(len(self.columns["env_steps"]), np.nan))

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
    def score(self) -> float | None:
        """Mean return of the final policy in new episodes, or its long-run average where none end; without noise."""
        score = self.record.get("score")
        mean = score.get("mean", score.get("long_run_average")) if isinstance(score, dict) else None
        return float(mean) if isinstance(mean, int | float) and math.isfinite(mean) else None

    @cached_property
    def strip(self) -> bytes | None:
        """Pictures of the newest video, as a PNG file; None without one."""
        newest = max((self.path / "videos").glob("step-*.png"), default=None)
        try:
            data = b"" if newest is None else read_untrusted(newest, MAX_STRIP, within=self.path)
        except OSError:
            return None
        return data if data.startswith(PNG) else None

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
        raise UserError(f"{path}: no metrics to report; {METRICS} is missing, empty or damaged throughout")
    names = list(dict.fromkeys(["env_steps", *(name for row in rows for name in row)]))[:MAX_COLUMNS]
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    return RunData(path, read_settings(path / CONFIG), read_record(path), run_status(path), columns)


def _forward(rows: Iterator[Row]) -> list[Row]:
    """Rows in the order of their steps; where a run went back and repeated some, the later ones count."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["env_steps"] >= row["env_steps"]:
            kept.pop()
        kept.append(row)
    return kept

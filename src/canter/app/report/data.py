"""Reading a run folder for a report, however damaged it is: the report shows what can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from canter.config import TrainConfig
from canter.core.plain import with_current_names
from canter.core.registry import UserError
from canter.core.storage.files import read_untrusted
from canter.runs.metrics import METRICS, Row, read_rows
from canter.runs.records import CONFIG, Status, read_record, read_settings, run_status

MAX_COLUMNS = 300
"""Metrics of a run that are read."""
MAX_STRIP_BYTES = 4 << 20
"""Largest film strip that is put into a report."""
PNG = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""


@dataclass(frozen=True)
class RunData:
    """One run: its settings, its record and its metrics."""

    path: Path
    settings: dict[str, Any]
    """Dotted key paths to plain values; empty if they cannot be read."""
    record: dict[str, Any]
    """Content of `run.json`; empty if it cannot be read."""
    status: Status
    columns: dict[str, np.ndarray]
    """Metrics by name, float64 `[rows]`, NaN where a row has none; `env_steps` always increases."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.path.resolve().name

    @property
    def env_id(self) -> str:
        """Id of the environment."""
        return str(self.settings.get("env.id", "unknown environment"))

    @property
    def seed(self) -> str:
        """Seed, as text."""
        return str(self.settings.get("seed", "?"))

    def column(self, name: str) -> np.ndarray:
        """Return a metric `[rows]`; all NaN if the run has none of that name."""
        return self.columns.get(name, np.full(len(self.columns["env_steps"]), np.nan))

    def points(self, name: str, x: str = "env_steps") -> tuple[np.ndarray, np.ndarray]:
        """Return the x values at which a metric has a finite value, and these values."""
        values = self.column(name)
        positions = self.column(x)
        finite = np.isfinite(values) & np.isfinite(positions)
        return positions[finite], values[finite]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None without one."""
        _, values = self.points(name)
        return float(values[-1]) if len(values) else None

    @property
    def score(self) -> float | None:
        """Mean return of the final policy in new episodes without noise; None without one.

        The long-run average if no episodes end.
        """
        score = self.record.get("score")
        mean = score.get("mean", score.get("long_run_average")) if isinstance(score, dict) else None
        return float(mean) if isinstance(mean, int | float) and math.isfinite(mean) else None

    @cached_property
    def strip(self) -> bytes | None:
        """Film strip of the newest video as a PNG file; None without one."""
        newest = max((self.path / "videos").glob("step-*.png"), default=None)
        if newest is None:
            return None
        try:
            data = read_untrusted(newest, MAX_STRIP_BYTES, within=self.path)
        except OSError:
            return None
        return data if data.startswith(PNG) else None

    @property
    def speed(self) -> float | None:
        """Env steps per second over the whole run."""
        steps = self.last("env_steps")
        seconds = self.last("seconds")
        return steps / seconds if steps and seconds else None

    @cached_property
    def time_split(self) -> dict[str, float]:
        """Seconds of the whole run by part, extrapolated from the rows that were read."""
        parts = {
            name.removeprefix("time/"): float(np.nansum(values))
            for name, values in self.columns.items()
            if name.startswith("time/") and name != "time/steps_per_second"
        }
        measured = sum(parts.values())
        total = self.last("seconds")
        scale = total / measured if total and measured > 0 else 1.0
        return {name: seconds * scale for name, seconds in parts.items() if seconds > 0}


def read_run(path: Path) -> RunData:
    """Return everything that can be read of a run; raise UserError if it has no metrics."""
    rows = _increasing(read_rows(path / METRICS))
    if not rows:
        raise UserError(f"{path}: no metrics to report; {METRICS} is missing, empty or has no readable row")
    names = list(dict.fromkeys(["env_steps", *(name for row in rows for name in row)]))[:MAX_COLUMNS]
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    settings = read_settings(path / CONFIG, _with_current_names)
    return RunData(path, settings, read_record(path), run_status(path), columns)


def _with_current_names(content: Any) -> Any:
    """Return plain settings with renamed ones under their current names, as far as they are valid."""
    try:
        return with_current_names(content, TrainConfig)
    except (TypeError, ValueError):
        return content


def _increasing(rows: Iterator[Row]) -> list[Row]:
    """Return rows of increasing steps; if a resumed run repeated some, the later ones count."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["env_steps"] >= row["env_steps"]:
            kept.pop()
        kept.append(row)
    return kept

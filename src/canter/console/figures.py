"""Numbers as people read them."""

from __future__ import annotations

from collections import deque
from typing import Any

from canter.training.stopwatch import PARTS

PACE_ITERATIONS = 50


class Pace:
    """How fast a run goes, and what takes the time: means over the last iterations."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.rows: deque[dict[str, Any]] = deque(maxlen=PACE_ITERATIONS)

    def add(self, row: dict[str, Any]) -> None:
        """Take the row of another iteration."""
        self.rows.append(row)

    @property
    def steps_per_second(self) -> float:
        """Transitions per second."""
        rows = list(self.rows)
        return sum(row["rollout_steps"] for row in rows) / max(sum(_seconds(rows).values()), 1e-9)

    @property
    def seconds_left(self) -> float:
        """Until the budget is used up, at this speed."""
        return max(self.total_steps - self.rows[-1]["env_steps"], 0) / max(self.steps_per_second, 1e-9)

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the time by part."""
        seconds = _seconds(list(self.rows))
        total = max(sum(seconds.values()), 1e-9)
        return {part: spent / total for part, spent in seconds.items()}


def _seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {part: sum(row[f"time/{part}"] for row in rows) for part in PARTS}


def number(value: float | None) -> str:
    """About four significant digits; a hyphen for none."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 1 else 4}f}"


def percent(value: float | None) -> str:
    """A fraction as a percentage; a hyphen for none."""
    return "-" if value is None else f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def reported(row: dict[str, Any]) -> dict[str, str]:
    """What the environment itself reported, by name."""
    return {name.removeprefix("env/"): number(value) for name, value in row.items() if name.startswith("env/")}


def counts_by_average(settings: dict[str, Any]) -> bool:
    """Whether the best policy of a run is the one with the best long-run average."""
    return settings.get("checkpoints", {}).get("best_by") == "lta"


def long_run(row: dict[str, Any]) -> str:
    """The reward per unit of time in words, `-` before there is one."""
    return "-" if "lta/mean" not in row else f"{number(row['lta/mean'])} ± {number(row['lta/ci'])}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds; hours only where there are some."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

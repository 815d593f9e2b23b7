"""What a run shows in numbers, and how fast it goes."""

from __future__ import annotations

from collections import deque
from typing import Any

from canter.algorithms.base import Headline, declared_under
from canter.console.numbers import duration as duration
from canter.console.numbers import number as number
from canter.console.numbers import percent as percent
from canter.training.stopwatch import PARTS

PACE_ITERATIONS = 50
UNDECLARED = 4
"""Metrics to show of an algorithm that does not say which."""


class Pace:
    """How far a run is, how fast it goes, what takes the time (means over the last rows), and what counts in it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.total_steps: int | None = settings.get("total_steps")
        until = settings.get("until", {})
        budgets = {"env_steps": self.total_steps, "iteration": until.get("iterations"), "seconds": until.get("seconds")}
        self.budgets = {name: budget for name, budget in budgets.items() if budget is not None}
        """What ends the run at the latest, by the column of a row that counts it."""
        self.rows: deque[dict[str, Any]] = deque(maxlen=PACE_ITERATIONS)
        self.by_average = settings.get("checkpoints", {}).get("best_by") == "lta"
        """Whether the best policy of the run is the one with the best long-run average."""
        success = settings.get("success") or {}
        self.success = "success" if any(value is not None for value in success.values()) else "terminated"
        """What the rate of successes is called: by what it is where nobody has said what a success is."""
        self.recent: int = settings.get("recent_episodes", 100)
        """Episodes that means are over."""
        self.learning: dict[str, Any] = settings.get("algorithm") or {}
        """The settings of the algorithm."""
        self.declared = declared_under(self.learning.get("kind"))

    def headlines(self, row: dict[str, Any]) -> tuple[Headline, ...]:
        """The metrics to show of a row: those that the algorithm declares, or else the first few that it reports."""
        if self.declared.headlines:
            return self.declared.headlines
        own = [name for name in row if "/" in name and not name.startswith(("time/", "lta/", "self_play/"))]
        names = own[:UNDECLARED]
        return tuple(Headline(metric=name, label=name, topic="metrics", line=name, block=name) for name in names)

    def progress(self, row: dict[str, Any]) -> float:
        """Fraction of the run that is done, at most 1; 0 where it is not known how long it will be."""
        return min(max((row[name] / budget for name, budget in self.budgets.items()), default=0.0), 1.0)

    @property
    def steps_per_second(self) -> float:
        """Transitions per second."""
        rows = list(self.rows)
        return sum(row["rollout_steps"] for row in rows) / max(sum(_seconds(rows).values()), 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Until a budget is used up, at this speed; None where there is none."""
        row, steps = self.rows[-1], self.steps_per_second
        iterations = steps * row["iteration"] / max(row["env_steps"], 1)
        speeds = {"env_steps": steps, "iteration": iterations, "seconds": 1.0}
        left = [max(budget - row[name], 0) / max(speeds[name], 1e-9) for name, budget in self.budgets.items()]
        return min(left, default=None)

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the time by part."""
        seconds = _seconds(list(self.rows))
        total = max(sum(seconds.values()), 1e-9)
        return {part: spent / total for part, spent in seconds.items()}


def _seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {part: sum(row[f"time/{part}"] for row in rows) for part in PARTS}


def reported(row: dict[str, Any]) -> dict[str, str]:
    """What the environment itself reported, by name."""
    return {name.removeprefix("env/"): number(value) for name, value in row.items() if name.startswith("env/")}


def long_run(row: dict[str, Any]) -> str:
    """The reward per unit of time in words, `-` before there is one."""
    return "-" if "lta/mean" not in row else f"{number(row['lta/mean'])} ± {number(row['lta/ci'])}"


def name_of(headline: Headline, row: dict[str, Any]) -> str | None:
    """The name of a metric in a row, or of the first that begins with it; None where it has none."""
    return next((name for name in row if f"{name}/".startswith(f"{headline.metric}/")), None)


def shown(headline: Headline, row: dict[str, Any]) -> str:
    """The value of a metric, or of the first whose name begins with it; a hyphen for none."""
    value = row.get(name_of(headline, row) or "")
    return percent(value) if headline.percent else number(value)

"""Scores of the runs of a search or a population, read from their folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from canter.runs.metrics import METRICS, read_last_row, read_rows
from canter.runs.records import read_record, score_value

UNREACHED = 1e6
"""Seconds that count for a run that does not reach the goal of `seconds-to:GOAL`."""
SECONDS_TO = "seconds-to:"
RETURN_IN = "return-in:"


def objective_number(objective: str, prefix: str) -> float | None:
    """Return the finite number after the prefix of an objective; None without the prefix or a number."""
    try:
        number = float(objective.removeprefix(prefix)) if objective.startswith(prefix) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def read_return(path: Path, *, average: bool) -> float | None:
    """Return the mean return of the policy in new episodes, or its reward rate if they do not end."""
    score = read_record(path).get("score")
    value = score_value(score, average=average)
    if value is None and isinstance(score, Mapping):
        value = score.get("reward_per_step")
    return value if value is not None else read_last_row(path / METRICS).get("lta/mean" if average else "return")


def mean_over_steps(metrics: Path) -> float | None:
    """Return the area under the curve of the return, divided by its steps; None without one."""
    rows = [row for row in read_rows(metrics) if "return" in row and "env_steps" in row]
    if len(rows) < 2:
        return rows[0]["return"] if rows else None
    steps = np.array([row["env_steps"] for row in rows])
    returns = np.array([row["return"] for row in rows])
    return float(np.sum((returns[1:] + returns[:-1]) / 2 * np.diff(steps)) / (steps[-1] - steps[0]))


def seconds_score(metrics: Path, goal: float) -> float | None:
    """Return minus the seconds of training until the return reached a goal; None without a return.

    A run that did not reach it has the score of `UNREACHED` seconds, and less the further it was away.
    """
    rows = [row for row in read_rows(metrics) if row.get("return") is not None and "seconds" in row]
    reached = next((row["seconds"] for row in rows if row["return"] >= goal), None)
    if reached is not None or not rows:
        return None if reached is None else -float(reached)
    return -UNREACHED - (goal - max(row["return"] for row in rows))


def format_score(score: float) -> str:
    """Return a score as text."""
    return "the goal was not reached" if score <= -UNREACHED else f"{score:.5g}"

"""Statistics over several runs: groups of seeds, curves with bands, time to a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canter.app.report.data import RunData
from canter.app.report.drawing import Line
from canter.config import TrainConfig
from canter.core.plain import to_plain
from canter.functional.statistics import bootstrap_interval, interquartile_mean
from canter.runs.records import flatten

GRID = 200
"""Points of a curve over several runs."""
IGNORED_SECTIONS = ("seed.", "checkpoints.")
"""Settings in which runs of one group may differ: they do not change what is learned."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only by their seed."""

    label: str
    runs: list[RunData]

    @property
    def env_id(self) -> str:
        """Id of the environment, the same for all runs."""
        return self.runs[0].env_id

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that all runs have in common."""
        return shared_settings(self.runs[0])


@dataclass(frozen=True)
class ThresholdCrossing:
    """Steps and seconds after which a run first reached a return."""

    steps: float
    seconds: float | None


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Return the runs grouped by environment and settings, in the order of the first of each."""
    grouped: dict[str, list[RunData]] = {}
    for run in runs:
        key = repr(sorted(shared_settings(run).items())) if run.settings else str(run.path)
        grouped.setdefault(key, []).append(run)
    groups = [Group("", members) for members in grouped.values()]
    labels = [_label(group, [other for other in groups if other.env_id == group.env_id]) for group in groups]
    unique = [label if labels.count(label) == 1 else f"{label} ({i + 1})" for i, label in enumerate(labels)]
    return [Group(label, group.runs) for label, group in zip(unique, groups, strict=True)]


def shared_settings(run: RunData) -> dict[str, Any]:
    """Return the settings of a run without those that may differ within a group.

    Settings that an older version did not have take their defaults.
    """
    defaults = dict(flatten(to_plain(TrainConfig())))
    # A setting may be a number in one run and a mapping in another: do not mix parts of both.
    added = {key: defaults[key] for key in defaults if not any(_nested(key, existing) for existing in run.settings)}
    return {key: value for key, value in (run.settings | added).items() if not f"{key}.".startswith(IGNORED_SECTIONS)}


def _nested(key: str, other: str) -> bool:
    """Return whether two key paths are equal, or one lies within the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def differing_settings(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the settings that differ between groups: key -> one value per group, or None."""
    settings = [group.settings for group in groups]
    keys = dict.fromkeys(key for group_settings in settings for key in group_settings)
    values_by_key = {key: [group_settings.get(key) for group_settings in settings] for key in keys}
    return {key: values for key, values in values_by_key.items() if any(value != values[0] for value in values[1:])}


def _label(group: Group, rivals: list[Group]) -> str:
    if len(group.runs) == 1:
        return group.runs[0].name
    # Short names of a few settings say more than a list of all seeds.
    differing = differing_settings(rivals)
    parts = [f"{key.rpartition('.')[2]} {format_value(group.settings.get(key))}" for key in list(differing)[:3]]
    return ", ".join(parts) or f"{len(group.runs)} seeds"


def format_value(value: Any) -> str:
    """Return the value of a setting for people: 100,000, yes, none."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        items = (f"({format_value(item)})" if isinstance(item, list | tuple) else format_value(item) for item in value)
        return ", ".join(items) or "none"
    return str(value)


def aggregate_curve(group: Group, metric: str, x: str = "env_steps") -> Line | None:
    """Return a metric over the runs of a group; None if they share no steps.

    The curve is the interquartile mean over the runs with its 95 % bootstrap interval; a single run
    is its own curve without an interval. Over steps, runs that have ended leave the others to
    continue alone: a curve that stopped with the first would hide them. Over seconds they keep
    their last value, as the fastest run is not a special one.
    """
    curves = [points for run in group.runs if len((points := run.points(metric, x))[0])]
    if not curves:
        return None
    if len(curves) == 1:
        return Line(group.label, *curves[0])
    start = max(positions[0] for positions, _ in curves)
    common_end = min(positions[-1] for positions, _ in curves)
    if common_end <= start:
        return None
    grid = np.linspace(start, max(positions[-1] for positions, _ in curves), GRID)
    ends = [np.inf if x == "seconds" else positions[-1] for positions, _ in curves]
    counts = np.array([sum(end >= position for end in ends) for position in grid])
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for count in dict.fromkeys(counts.tolist()):
        section = grid[counts == count]
        going_on = [curve for curve, end in zip(curves, ends, strict=True) if end >= section[-1]]
        values = np.stack([np.interp(section, *curve) for curve in going_on])
        parts.append((interquartile_mean(values), *bootstrap_interval(values)))
    center, low, high = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Line(group.label, grid, center, low=low, high=high)


def final_score(group: Group, metric: str = "return") -> tuple[float, float | None, float | None] | None:
    """Return the interquartile mean of the runs' last values and its interval.

    The interval is None for a single run, the result is None if no run has the metric.
    """
    values = np.array([value for run in group.runs if (value := run.last(metric)) is not None])
    if not len(values):
        return None
    center = float(interquartile_mean(values))
    if len(values) == 1:
        return center, None, None
    low, high = bootstrap_interval(values)
    return center, float(low), float(high)


def default_threshold(runs: Sequence[RunData]) -> float | None:
    """Return 90 % of the way from the lowest first return to the best last one.

    None if nothing was learned.
    """
    curves = [values for run in runs if len(values := run.points("return")[1])]
    if not curves:
        return None
    start = min(values[0] for values in curves)
    best = max(values[-1] for values in curves)
    return float(start + 0.9 * (best - start)) if best > start else None


def time_to_threshold(run: RunData, threshold: float) -> ThresholdCrossing | None:
    """Return when the return of a run was first at least `threshold`; None if it never was."""
    reached = np.flatnonzero(run.column("return") >= threshold)
    if not len(reached):
        return None
    steps = run.column("env_steps")[reached[0]]
    seconds = run.column("seconds")[reached[0]]
    return ThresholdCrossing(float(steps), float(seconds) if np.isfinite(seconds) else None)

"""What several runs say together: groups of seeds, curves with bands, time to a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canter.app.report.data import RunData, flatten
from canter.app.report.drawing import Line
from canter.config import TrainConfig
from canter.core.plain import to_plain
from canter.functional.statistics import bootstrap_interval, interquartile_mean

GRID = 200
"""Points of a curve over several runs."""
NO_MATTER = ("seed.", "checkpoints.")
"""Sections of settings in which runs of one group may differ: they change luck at most."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[RunData]

    @property
    def env_id(self) -> str:
        """The environment, the same for all."""
        return self.runs[0].env_id

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all have in common."""
        return shared_settings(self.runs[0])


@dataclass(frozen=True)
class Reached:
    """When a run first reached a return."""

    steps: float
    seconds: float | None


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Runs by environment and settings, in the order in which they are given."""
    grouped: dict[str, list[RunData]] = {}
    for run in runs:
        key = repr(sorted(shared_settings(run).items())) if run.settings else str(run.path)
        grouped.setdefault(key, []).append(run)
    groups = [Group("", members) for members in grouped.values()]
    labels = [_label(group, [other for other in groups if other.env_id == group.env_id]) for group in groups]
    unique = [label if labels.count(label) == 1 else f"{label} ({i + 1})" for i, label in enumerate(labels)]
    return [Group(label, group.runs) for label, group in zip(unique, groups, strict=True)]


def shared_settings(run: RunData) -> dict[str, Any]:
    """The settings of a run without those that do not matter; what an older version did not know is the default."""
    defaults = dict(flatten(to_plain(TrainConfig())))
    # A setting may be a number in one run and a mapping in another: neither is completed by parts of the other.
    added = {key: defaults[key] for key in defaults if not any(_nested(key, own) for own in run.settings)}
    return {key: value for key, value in (run.settings | added).items() if not f"{key}.".startswith(NO_MATTER)}


def _nested(key: str, other: str) -> bool:
    """Whether two key paths are the same, or one lies within the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def differing_settings(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Settings that are not the same in all groups: key to one value for each group, None where there is none."""
    settings = [group.settings for group in groups]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = {key: [one.get(key) for one in settings] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values[1:])}


def _label(group: Group, rivals: list[Group]) -> str:
    if len(group.runs) == 1:
        return group.runs[0].name
    # Short names of a few settings say more than a list of all seeds.
    differing = differing_settings(rivals)
    parts = [f"{key.rpartition('.')[2]} {shown(group.settings.get(key))}" for key in list(differing)[:3]]
    return ", ".join(parts) or f"{len(group.runs)} seeds"


def shown(value: Any) -> str:
    """A setting's value as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        inner = (f"({shown(item)})" if isinstance(item, list | tuple) else shown(item) for item in value)
        return ", ".join(inner) or "none"
    return str(value) if value != {} else "none"


def curve(group: Group, metric: str, x: str = "env_steps") -> Line | None:
    """The metric over what runs of the group have seen; None where they share no steps.

    It is the interquartile mean over the runs, with its 95 % bootstrap interval; a single run is itself, without one.
    Over steps, those that have ended leave the others to go on by themselves: a curve that stopped with the first would
    hide them. Over seconds they keep their last value, as the fastest run is no other than the rest.
    """
    points = [points for run in group.runs if len((points := run.points(metric, x))[0])]
    if not points:
        return None
    if len(points) == 1:
        return Line(group.label, *points[0])
    start, common = max(steps[0] for steps, _ in points), min(steps[-1] for steps, _ in points)
    if common <= start:
        return None
    grid = np.linspace(start, max(steps[-1] for steps, _ in points), GRID)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    ends = [np.inf if x == "seconds" else steps[-1] for steps, _ in points]
    counts = np.array([sum(end >= here for end in ends) for here in grid])
    for count in dict.fromkeys(counts.tolist()):
        here = grid[counts == count]
        values = np.stack([np.interp(here, *run) for run, end in zip(points, ends, strict=True) if end >= here[-1]])
        parts.append((interquartile_mean(values), *bootstrap_interval(values)))
    center, low, high = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Line(group.label, grid, center, low=low, high=high)


def final_score(group: Group, metric: str = "return") -> tuple[float, float | None, float | None] | None:
    """Interquartile mean of the runs' last values, and its interval where there are several runs."""
    values = np.array([value for run in group.runs if (value := run.last(metric)) is not None])
    if not len(values):
        return None
    center = float(interquartile_mean(values))
    if len(values) == 1:
        return center, None, None
    low, high = bootstrap_interval(values)
    return center, float(low), float(high)


def default_threshold(runs: Sequence[RunData]) -> float | None:
    """Nine tenths of the way from the lowest first return to the best last one; None if nothing was learned."""
    curves = [values for run in runs if len(values := run.points("return")[1])]
    if not curves:
        return None
    start, best = min(values[0] for values in curves), max(values[-1] for values in curves)
    return float(start + 0.9 * (best - start)) if best > start else None


def time_to(run: RunData, threshold: float) -> Reached | None:
    """When the return of a run was first at least `threshold`; None if it never was."""
    reached = np.flatnonzero(run.column("return") >= threshold)
    if not len(reached):
        return None
    seconds = run.column("seconds")[reached[0]]
    return Reached(float(run.column("env_steps")[reached[0]]), float(seconds) if np.isfinite(seconds) else None)

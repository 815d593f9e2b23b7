"""Reading run folders for a report, however damaged they are, and statistics over several runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from canter.algorithms.base import report_spec_for
from canter.algorithms.doctor.findings import Finding, Signals, diagnose_signals
from canter.algorithms.doctor.task import TASK_RULES
from canter.app.report.drawing import Line
from canter.config import TrainConfig
from canter.core.plain import from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import read_untrusted
from canter.functional.statistics import bootstrap_interval, interquartile_mean
from canter.runs.metrics import METRICS, Row, read_rows
from canter.runs.records import CONFIG, Status, by_average, read_record, read_settings, run_status, score_value

MAX_COLUMNS = 300
"""Metrics of a run that are read."""
MAX_STRIP_BYTES = 4 << 20
"""Largest film strip that is put into a report."""
PNG = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""


RETURN = "return"
AVERAGE = "lta/mean"
AVERAGE_CI = "lta/ci"
"""Half the width of the 95 % interval of `lta/mean`."""
GOALS = {RETURN: "Return", AVERAGE: "Reward per unit of time"}
"""Metrics that runs are scored by, with their titles."""


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
    def goal(self) -> str:
        """The metric that the run is scored by: the return, or the reward per unit of time."""
        return AVERAGE if by_average(self.settings) else RETURN

    @property
    def score(self) -> float | None:
        """Score of the final policy in new episodes, without noise; None without one.

        It is the long-run average if the run is scored by that, or if no episodes end.
        """
        return score_value(self.record.get("score"), average=self.goal == AVERAGE)

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
    settings = read_settings(path / CONFIG, complete_settings)
    return RunData(path, settings, read_record(path), run_status(path), columns)


def complete_settings(content: Any) -> Any:
    """Return valid settings under their current names, with the defaults of absent ones; others as they are."""
    try:
        return to_plain(from_plain(content, TrainConfig()))
    except (TypeError, ValueError):
        return content


def findings_of(path: Path) -> list[Finding]:
    """Return the findings about a run, finished or running; raise UserError if it has no metrics."""
    rows = list(read_rows(path / METRICS))
    if not rows:
        raise UserError(f"{path}: no metrics to diagnose; {METRICS} is missing, empty or has no readable row")
    signals = Signals(read_settings(path / CONFIG, complete_settings), rows)
    return diagnose_signals(signals, (TASK_RULES, *report_spec_for(signals.setting("algorithm.kind")).rules))


def _increasing(rows: Iterator[Row]) -> list[Row]:
    """Return rows of increasing steps; if a resumed run repeated some, the later ones count."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["env_steps"] >= row["env_steps"]:
            kept.pop()
        kept.append(row)
    return kept


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
    """Return the settings of a run without those that may differ within a group."""
    return {key: value for key, value in run.settings.items() if not f"{key}.".startswith(IGNORED_SECTIONS)}


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
    is its own curve, with an interval only for the long-run average, which logs one. Over steps,
    runs that have ended leave the others to continue alone: a curve that stopped with the first
    would hide them. Over seconds they keep their last value, as the fastest run is not a special
    one.
    """
    with_curve = [(run, points) for run in group.runs if len((points := run.points(metric, x))[0])]
    curves = [points for _, points in with_curve]
    if not curves:
        return None
    if len(curves) == 1:
        return _single_curve(group.label, with_curve[0][0], metric, x)
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


def _single_curve(label: str, run: RunData, metric: str, x: str) -> Line:
    """Return the curve of one run; the long-run average has the interval that its run has logged."""
    positions, values = run.points(metric, x)
    if metric != AVERAGE:
        return Line(label, positions, values)
    drawn = np.isfinite(run.column(metric)) & np.isfinite(run.column(x))
    half = np.nan_to_num(run.column(AVERAGE_CI)[drawn], nan=0.0, posinf=0.0)
    return Line(label, positions, values, low=values - half, high=values + half)


def goal_of(runs: Iterable[RunData]) -> str:
    """Return the metric that these runs are compared by: the average if all are scored by it."""
    return AVERAGE if {run.goal for run in runs} == {AVERAGE} else RETURN


def final_score(group: Group, metric: str = RETURN) -> tuple[float | None, tuple[float, float] | None]:
    """Return the interquartile mean of the runs' last values, None without one, and its interval.

    The interval is None for a single run.
    """
    values = np.array(last_values(group, metric))
    if len(values) < 2:
        return (float(values[0]) if len(values) else None), None
    low, high = bootstrap_interval(values)
    return float(interquartile_mean(values)), (float(low), float(high))


def final_scores(group: Group, goal: str) -> list[float]:
    """Return the scores of the final policies in new episodes, of the runs that have one."""
    scores = (score_value(run.record.get("score"), average=goal == AVERAGE) for run in group.runs)
    return [score for score in scores if score is not None and math.isfinite(score)]


def last_values(group: Group, metric: str) -> list[float]:
    """Return the last value of a metric in training, of the runs that have one."""
    return [value for run in group.runs if (value := run.last(metric)) is not None]


def default_threshold(runs: Sequence[RunData]) -> float | None:
    """Return 90 % of the way from the lowest first return to the best last one.

    None if nothing was learned.
    """
    goal = goal_of(runs)
    curves = [values for run in runs if len(values := run.points(goal)[1])]
    if not curves:
        return None
    start = min(values[0] for values in curves)
    best = max(values[-1] for values in curves)
    return float(start + 0.9 * (best - start)) if best > start else None


def time_to_threshold(run: RunData, threshold: float) -> ThresholdCrossing | None:
    """Return when the run's goal was first at least `threshold`; None if it never was."""
    reached = np.flatnonzero(run.column(run.goal) >= threshold)
    if not len(reached):
        return None
    steps = run.column("env_steps")[reached[0]]
    seconds = run.column("seconds")[reached[0]]
    return ThresholdCrossing(float(steps), float(seconds) if np.isfinite(seconds) else None)

"""Differences between the settings of a comparison: means over seeds, intervals and a test.

Every group is compared with one base, which is chosen by its settings and never by its score. Runs
of a group are independent samples: the seeds of two groups are not paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.app.console.text import format_number
from canter.app.report.data import (
    GOALS,
    Group,
    differing_settings,
    final_scores,
    goal_of,
    group_runs,
    last_values,
    read_run,
)
from canter.functional.statistics import MeanDifference, mean_interval, welch_differences


@dataclass(frozen=True)
class GroupScore:
    """A group, and its difference from the base."""

    group: Group
    changes: dict[str, list[Any]]
    """Settings that differ: key -> value of the base and of this group; empty for the base."""
    scores: list[float]
    """Scores of the runs that have one."""
    test: MeanDifference | None = None
    """Difference from the base; None if a group has fewer than two scores, or no spread."""
    adjusted_p: float | None = None
    """p-value of `test` by Holm's method, for the number of groups that were tested."""

    @property
    def mean(self) -> float | None:
        """Mean over the runs."""
        return math.fsum(self.scores) / len(self.scores) if self.scores else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean; None for fewer than two runs."""
        return mean_interval(self.scores)


@dataclass(frozen=True)
class SettingsComparison:
    """The groups of one environment and a base, from which most others differ in one setting."""

    measure: str
    """Name of the score that is compared."""
    base: GroupScore
    others: list[GroupScore]
    """Pairs, those that differ in one setting first."""


def compare_settings(groups: Sequence[Group]) -> SettingsComparison:
    """Compare the groups of one environment.

    The scores are those of the final policies in new episodes. If a group has none, they are the
    last means of training.
    """
    goal = goal_of(run for group in groups for run in group.runs)
    scores = [final_scores(group, goal) for group in groups]
    measure = "final score"
    if not all(scores):
        scores = [last_values(group, goal) for group in groups]
        measure = f"last {GOALS[goal].lower()} of training"
    changes = [[differing_settings([base, other]) for other in groups] for base in groups]
    number = max(range(len(groups)), key=lambda i: sum(len(keys) == 1 for keys in changes[i]))
    tests = welch_differences(scores[number], {i: scores[i] for i in range(len(groups)) if i != number})
    others = [GroupScore(groups[i], changes[number][i], scores[i], *tests[i]) for i in tests]
    others.sort(key=lambda other: len(other.changes) != 1)
    return SettingsComparison(measure, GroupScore(groups[number], {}, scores[number]), others)


def format_p(p: float | None) -> str:
    """Return a p-value as people write it; nothing for None."""
    if p is None:
        return ""
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def comparison_lines(paths: Sequence[Path]) -> list[str]:
    """Return the scores of runs by their settings, and the differences between these, as text."""
    groups = group_runs([read_run(path) for path in paths])
    lines: list[str] = []
    for env_id in dict.fromkeys(group.env_id for group in groups):
        compared = compare_settings([group for group in groups if group.env_id == env_id])
        lines.append(f"{env_id}, {compared.measure}: mean over seeds (95 % interval)")
        lines.append(_score_line(compared.base))
        for other in compared.others:
            lines.append(_score_line(other) + _difference_text(compared.base, other))
        if any(other.test for other in compared.others):
            lines.append("  Differences by Welch's t-test, p by Holm for all of them; seeds are not paired.")
    return lines


def _score_line(score: GroupScore) -> str:
    interval = ""
    if score.interval is not None:
        interval = f" ({format_number(score.interval[0])} to {format_number(score.interval[1])})"
    runs = "1 run" if len(score.scores) == 1 else f"{len(score.scores)} runs"
    return f"  {score.group.label}: {format_number(score.mean)}{interval}, {runs}"


def _difference_text(base: GroupScore, other: GroupScore) -> str:
    if base.mean is None or other.mean is None:
        return ""
    text = f"; {other.mean - base.mean:+.4g} from {base.group.label}"
    if other.test is None:
        return text
    return f"{text} ({other.test.low:+.4g} to {other.test.high:+.4g}), p {format_p(other.adjusted_p).strip()}"

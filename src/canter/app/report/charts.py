"""The charts of a report: which metrics are drawn, in what order and with what titles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from canter.algorithms.base import ReportSpec, report_spec_for
from canter.app.report.data import AVERAGE, AVERAGE_CI, GOALS, RETURN, Group, RunData, aggregate_curve, goal_of
from canter.app.report.drawing import Frame, Line, Markup, element, join, legend, line_chart

WIDE = (1040.0, 340.0)
"""Size of the learning curve."""
NARROW = (400.0, 270.0)
"""Size of the learning curve on a phone."""
SMALL = (336.0, 176.0)
"""Size of the other charts."""


@dataclass(frozen=True)
class Chart:
    """One metric, or all metrics whose names begin with `metric` and a slash."""

    metric: str
    title: str
    text: str = ""
    floor: float = -math.inf


RETURN_CHART = Chart(RETURN, "Return", "mean of recent episodes")
AVERAGE_CHART = Chart(AVERAGE, "Long-run average", "reward per unit of time in the last 20 rollouts")
EPISODES = (
    Chart("length", "Episode length", "steps, mean of recent episodes"),
    Chart("success_rate", "Success rate", "of recent episodes"),
    Chart("rollout_reward", "Reward", "mean per step of each rollout"),
    Chart("eval/return", "Evaluation", "mean return of new episodes during training"),
)
TERMINATED = Chart("terminated_rate", "Terminated", "share of recent episodes; the settings define no success")
TIME = (Chart("time/steps_per_second", "Speed", "env steps per second of each iteration"),)
COUNTERS = {
    "iteration": "Iterations",
    "env_steps": "Env steps",
    "episodes": "Episodes ended",
    "resets": "Episodes started",
    "minibatch_updates": "Minibatch updates",
}
"""Counters of every run."""
COVERED_METRICS = {
    *(*COUNTERS, "train_steps", "rollouts", "rollout_steps", "updates", "seconds", "wall_time"),
    *(RETURN, "rollout_return", "rollout_length", AVERAGE, AVERAGE_CI),
}
"""Metrics for which the report draws no separate chart, as it shows them elsewhere."""


def learning_curve(
    groups: Sequence[Group], threshold: float | None, x: str = "env_steps", size: tuple[float, float] = WIDE
) -> Markup:
    """Return the chart of the return: each group's curve with its band, and its runs behind it."""
    alone = len(groups) == 1
    goal = goal_of(runs_of(groups))
    lines = [line for color, group in enumerate(groups) for line in _goal_lines(group, goal, color, x, alone)]
    if not any(len(line.x) for line in lines):
        missing = "No episode has ended yet, so there is no return to show."
        if goal == AVERAGE:
            missing = "There are not enough rollouts yet for the long-run average."
        return element("p", missing, class_="muted")
    frame = Frame(
        GOALS[goal],
        *size,
        x_label="env steps" if x == "env_steps" else "seconds of training",
        threshold=threshold,
        readouts=80 if size is WIDE else 40,
    )
    return join([legend(lines), line_chart(lines, frame)])


def _goal_lines(group: Group, goal: str, color: int, x: str, alone: bool) -> list[Line]:
    behind = [Line("", *run.points(goal, x), color, faint=True) for run in group.runs]
    front: list[Line] = []
    if len(group.runs) == 1 and alone and goal == RETURN:
        # The mean of recent episodes lags behind that of each rollout; in a chart with other
        # groups the latter would be noise.
        front = _curve_lines(group, "rollout_return", group.label, color, x)
    return [*behind, *(front or _curve_lines(group, goal, group.label, color, x))]


def _curve_lines(group: Group, metric: str, label: str, color: int, x: str = "env_steps") -> list[Line]:
    line = aggregate_curve(group, metric, x)
    return [replace(line, label=label, color=color)] if line else []


def small_charts(charts: Sequence[Chart], groups: Sequence[Group]) -> Markup:
    """Return a figure for each chart that has data."""
    figures = [figure for chart in charts if (figure := small_chart(chart, groups))]
    return element("div", *figures, class_="multiples") if figures else Markup("")


def small_chart(chart: Chart, groups: Sequence[Group]) -> Markup | None:
    """Return a figure with its caption; None if no run has the metric, or it never changed."""
    names = [name for name in metric_names(groups) if _belongs(name, chart.metric)]
    lines: list[Line] = []
    for number, group in enumerate(groups):
        for name in names:
            words: list[str] = []
            if len(groups) > 1:
                words.append(group.label)
            if len(names) > 1:
                words.append(name.removeprefix(chart.metric).strip("/"))
            color = number if len(groups) > 1 else names.index(name)
            lines += _curve_lines(group, name, " ".join(words) or chart.title, color)
    if not any(len(line.y) == 1 or np.any(line.y != line.y[0]) for line in lines):
        return None
    keys = legend(lines) if len(names) > 1 else None
    return figure(chart.title, chart.text, keys, line_chart(lines, Frame(chart.title, *SMALL, floor=chart.floor)))


def figure(title: str, text: str, *content: Markup | None) -> Markup:
    """Return a figure below its title and a text."""
    caption = element("figcaption", element("b", title), element("span", text) if text else None)
    return element("figure", caption, *content)


def episode_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return the charts of episodes; the success rate is named so only if a run defines success.

    The first is the long-run average, or the return if the average is the learning curve above.
    """
    first = RETURN_CHART if goal_of(runs_of(groups)) == AVERAGE else AVERAGE_CHART
    keys = ("success.ending", "success.min_return")
    defined = any(run.settings.get(key) is not None for run in runs_of(groups) for key in keys)
    others = [TERMINATED if chart.metric == "success_rate" and not defined else chart for chart in EPISODES]
    return [first, *others]


def declared_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return the charts of metrics that the algorithms of these runs declare."""
    headlines = dict.fromkeys(headline for spec in _report_specs(groups) for headline in spec.headlines)
    return [
        Chart(headline.metric, headline.title or headline.label, headline.text, headline.floor)
        for headline in headlines
    ]


def other_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return the charts of undeclared metrics, under their own names."""
    covered = COVERED_METRICS.copy()
    for spec in _report_specs(groups):
        covered |= {spec.optimizer_steps, *spec.counters}
    drawn = [chart.metric for chart in (*EPISODES, *declared_charts(groups))]
    names = [name for name in metric_names(groups) if name not in covered and not name.startswith("time/")]
    return [Chart(name, name) for name in names if not any(_belongs(name, metric) for metric in drawn)]


def _belongs(name: str, metric: str) -> bool:
    return f"{name}/".startswith(f"{metric}/")


def _report_specs(groups: Sequence[Group]) -> list[ReportSpec]:
    return [report_spec_for(run.settings.get("algorithm.kind")) for run in runs_of(groups)]


def metric_names(groups: Sequence[Group]) -> list[str]:
    """Return the metrics that at least one run has, in the order of the first that has them."""
    return list(dict.fromkeys(name for run in runs_of(groups) for name in run.columns))


def runs_of(groups: Sequence[Group]) -> list[RunData]:
    """Return the runs of all groups."""
    return [run for group in groups for run in group.runs]

"""Which metrics are drawn, in what order and with what words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from canter.algorithms.base import Declared, declared_under
from canter.app.report.data import RunData
from canter.app.report.drawing import Frame, Line, Markup, element, joined, legend, line_chart
from canter.app.report.stats import Group, curve

WIDE, NARROW, SMALL = (1040.0, 340.0), (400.0, 270.0), (336.0, 176.0)
"""Sizes of the learning curve, of the same on a phone, and of the other charts."""


@dataclass(frozen=True)
class Chart:
    """One metric, or several that belong together: those whose names begin with `metric` and a slash."""

    metric: str
    title: str
    text: str = ""
    floor: float = -math.inf


EPISODES = (
    Chart("length", "Episode length", "steps, mean of recent episodes"),
    Chart("success_rate", "Success rate", "of recent episodes"),
    Chart("rollout_reward", "Reward", "mean of a step in each rollout"),
    Chart("eval/return", "Evaluation", "mean return of new episodes while training"),
)
TERMINATED = Chart("success_rate", "Terminated", "share of recent episodes; no settings say what a success is")
TIME = (Chart("time/steps_per_second", "Speed", "env steps per second of each iteration"),)
COUNTERS = {
    "iteration": "Iterations",
    "env_steps": "Env steps",
    "episodes": "Episodes ended",
    "resets": "Episodes begun",
    "minibatch_updates": "Minibatch updates",
}
"""What every run counts."""
TOLD_ELSEWHERE = {
    *(*COUNTERS, "train_steps", "rollouts", "rollout_steps", "updates", "seconds", "wall_time"),
    *("return", "rollout_return", "rollout_length"),
}
"""Metrics that are told in other ways than by a chart of their own."""


def learning_curve(
    groups: Sequence[Group], threshold: float | None, x: str = "env_steps", size: tuple[float, float] = WIDE
) -> Markup:
    """The return over steps: each group's curve with its band, and its runs behind it."""
    lines = [line for number, group in enumerate(groups) for line in _return_lines(group, number, x, len(groups) == 1)]
    if not any(len(line.x) for line in lines):
        return element("p", "No episode has ended yet, so there is no return to show.", class_="muted")
    label = {"env_steps": "env steps", "seconds": "seconds of training"}[x]
    frame = Frame("Return", *size, x_label=label, threshold=threshold, readouts=80 if size is WIDE else 40)
    return joined([legend(lines), line_chart(lines, frame)])


def _return_lines(group: Group, color: int, x: str, alone: bool) -> list[Line]:
    behind = [Line("", *run.points("return", x), color, faint=True) for run in group.runs]
    if len(group.runs) == 1:
        # What each rollout had; the mean of recent episodes lags behind it. Beside other groups it would only be noise.
        own = _lines(group, "rollout_return", group.label, color, x) if alone else []
        return [*behind, *own] if own else _lines(group, "return", group.label, color, x)
    return [*behind, *_lines(group, "return", group.label, color, x)]


def _lines(group: Group, metric: str, label: str, color: int, x: str = "env_steps") -> list[Line]:
    found = curve(group, metric, x)
    return [replace(found, label=label, color=color)] if found else []


def small_charts(charts: Sequence[Chart], groups: Sequence[Group]) -> Markup:
    """A figure for each chart of which there are data."""
    figures = [figure for chart in charts if (figure := small_chart(chart, groups))]
    return element("div", *figures, class_="multiples") if figures else Markup("")


def small_chart(chart: Chart, groups: Sequence[Group]) -> Markup | None:
    """A figure with title and words; None if no run has the metric, or it never changed."""
    names = [name for name in metric_names(groups) if _belongs(name, chart.metric)]
    lines: list[Line] = []
    for number, group in enumerate(groups):
        for name in names:
            part = name.removeprefix(chart.metric).strip("/")
            label = " ".join([group.label] * (len(groups) > 1) + [part] * (len(names) > 1))
            color = number if len(groups) > 1 else names.index(name)
            lines += _lines(group, name, label or chart.title, color)
    if not any(len(line.y) == 1 or np.any(line.y != line.y[0]) for line in lines):
        return None
    title = element("figcaption", element("b", chart.title), element("span", chart.text) if chart.text else None)
    keys = legend(lines) if len(names) > 1 else None
    return element("figure", title, keys, line_chart(lines, Frame(chart.title, *SMALL, floor=chart.floor)))


def episode_charts(groups: Sequence[Group]) -> list[Chart]:
    """What is drawn of episodes; success only by that name where some run's settings say what it is."""
    keys = ("success.ending", "success.min_return")
    defined = any(run.settings.get(key) is not None for run in runs_of(groups) for key in keys)
    return [TERMINATED if chart.metric == "success_rate" and not defined else chart for chart in EPISODES]


def declared_charts(groups: Sequence[Group]) -> list[Chart]:
    """The metrics that the algorithms of these runs declare."""
    lines = dict.fromkeys(line for declared in _declared(groups) for line in declared.headlines)
    return [Chart(line.metric, line.title or line.label, line.text, line.floor) for line in lines]


def other_charts(groups: Sequence[Group]) -> list[Chart]:
    """Metrics that nobody declared, under their own names."""
    told = TOLD_ELSEWHERE.copy()
    for declared in _declared(groups):
        told |= {declared.optimizer_steps, *declared.counters}
    drawn = [chart.metric for chart in (*EPISODES, *declared_charts(groups))]
    names = [name for name in metric_names(groups) if name not in told and not name.startswith("time/")]
    return [Chart(name, name) for name in names if not any(_belongs(name, metric) for metric in drawn)]


def _belongs(name: str, metric: str) -> bool:
    return f"{name}/".startswith(f"{metric}/")


def _declared(groups: Sequence[Group]) -> list[Declared]:
    return [declared_under(run.settings.get("algorithm.kind")) for run in runs_of(groups)]


def metric_names(groups: Sequence[Group]) -> list[str]:
    """Metrics that at least one run has, in the order of the first that has them."""
    return list(dict.fromkeys(name for run in runs_of(groups) for name in run.columns))


def runs_of(groups: Sequence[Group]) -> list[RunData]:
    """The runs of all groups."""
    return [run for group in groups for run in group.runs]

"""The report of a search: winner, curves of all trials, importance of settings, and the settings of all trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from canter.app.console.text import format_duration
from canter.app.report.data import AVERAGE, GOALS, RETURN, Group, RunData, aggregate_curve, read_run
from canter.app.report.differences import format_p
from canter.app.report.drawing import (
    Frame,
    Line,
    Markup,
    css_color,
    drawing,
    element,
    format_si,
    join,
    key_mark,
    legend,
    line_chart,
    points,
    stacked_bar,
)
from canter.app.report.page import REPORT, heading, write_page
from canter.app.report.sections import mean_cell, section, setting, table
from canter.functional.statistics import mean_interval, welch_differences
from canter.runs.metrics import METRICS

if TYPE_CHECKING:  # experiments write reports
    from canter.app.tuning.outcome import Outcome
    from canter.app.tuning.plan import Job
    from canter.app.tuning.search import Search

WIDTH = 1040.0
HEIGHT = 330.0
MARGIN = 60.0
TOP = 34.0


def write_search_report(search: Search, outcome: Outcome) -> Path:
    """Write the report of a search that is done into its folder and return the file."""
    trials = len(search.study.trials)
    scores = outcome.scores[outcome.winner]
    facts = (
        f"{outcome.winner} wins with a mean of {format_si(float(np.mean(scores)))} on {len(scores)} fresh seeds; "
        f"{format_si(outcome.corrected)} corrected for the choice among {len(outcome.scores)}."
    )
    finalists = (
        "Final scores on fresh seeds, which the search did not use, with Student's 95 % interval, and the "
        "difference from the base settings (Welch's t-test, p by Holm). The mean on the seeds of the search is "
        "optimistic, since finalists were chosen by it."
    )
    first = search.rungs[0]
    shares, measure = search.study.importances(search.rung_scores(first))
    importance = f"Share of each setting {measure}, over all trials at {first:,} steps."
    front = "Dots: each trial on the first seed, wherever it paused. Line: no trial has a higher return in less time."
    curves = (
        "Thin: all trials on the first seed, as far as they trained. Bold: finalists, interquartile mean over the "
        "fresh seeds with its 95 % bootstrap band."
    )
    body = [
        heading(f"{trials} trials on {search.config.env.id}", facts),
        section("Finalists", finalists, finalist_table(search, outcome)),
        section("Return", curves, trial_curves(search, outcome)),
        section("Return and time", front, front_chart(search, outcome)),
        section("Importance", importance, importance_bar(search, shares)),
        section("Settings and score", f"Score at {first:,} steps. Bold: finalists.", coordinates(search, outcome)),
        section("Trials", "Scores on the first seed by steps.", trial_table(search)),
    ]
    return write_page(search.folder / REPORT, f"Search on {search.config.env.id}", body)


def colors(outcome: Outcome) -> dict[str, int]:
    """Return the number of the colour of each finalist."""
    return {name: number for number, name in enumerate(outcome.scores)}


def finalist_table(search: Search, outcome: Outcome) -> Markup:
    """Return a table of the finalists: settings, and scores on old and fresh seeds."""
    base = outcome.scores["base"]
    tests = welch_differences(base, {name: own for name, own in outcome.scores.items() if name != "base"})
    rows: list[list[object]] = []
    for name, own in outcome.scores.items():
        test, adjusted_p = tests.get(name, (None, None))
        difference = "" if test is None else f"{test.difference:+.4g} ({test.low:+.4g} to {test.high:+.4g})"
        old = search.search_scores(name)
        label = element("b", name, " (winner)" if name == outcome.winner else "")
        texts = search.settings_text(name)
        rows.append(
            [
                join([key_mark(colors(outcome)[name]), label, element("small", texts) if texts else None]),
                mean_cell(float(np.mean(own)), mean_interval(own)),
                difference,
                format_p(adjusted_p),
                f"{format_si(float(np.mean(old)))} ({len(old)})" if old else "",
            ]
        )
    head = ["", f"Mean of {len(base)} fresh seeds", "From base", "p", "Seeds of the search"]
    return table(head, rows, class_="numbers")


def trial_curves(search: Search, outcome: Outcome) -> Markup:
    """Return the learning curves of all trials, and those of the finalists on top."""
    metric = AVERAGE if search.config.by_average else RETURN
    lines = [Line("", *run.points(metric), 6, faint=True) for run in runs_of(search, search.first_jobs(search.total))]
    for name, color in colors(outcome).items():
        bold = aggregate_curve(Group(name, runs_of(search, search.fresh_jobs(name))), metric)
        lines += [replace(bold, color=color)] if bold else []
    return join([legend(lines), line_chart(lines, Frame(GOALS[metric], WIDTH, HEIGHT, x_label="env steps"))])


def runs_of(search: Search, jobs: Iterable[Job]) -> list[RunData]:
    """Return the runs that have rows of metrics; others failed before their first one."""
    paths = [search.path(job) for job in jobs]
    return [read_run(path) for path in paths if (path / METRICS).is_file()]


def front_chart(search: Search, outcome: Outcome) -> Markup | None:
    """Return all trials by return and seconds of training, and their Pareto front as a line and a table."""
    if len(outcome.front) < 2:
        return None
    dots = [
        Line("", np.array([cost.seconds]), np.array([cost.return_]), 6, faint=True) for cost in outcome.costs.values()
    ]
    ascending = outcome.front[::-1]
    x = np.array([cost.seconds for _, cost in ascending])
    line = Line("front", x, np.array([cost.return_ for _, cost in ascending]), 1)
    rows: list[list[object]] = []
    for name, cost in outcome.front:
        trial, _, steps = name.partition("@")
        texts = element("small", search.settings_text(trial))
        rows.append([join([trial, texts]), f"{int(steps):,}", format_si(cost.return_), format_duration(cost.seconds)])
    chart = line_chart([*sorted(dots, key=lambda dot: dot.x[0]), line], Frame("Return", WIDTH, HEIGHT, "seconds"))
    return join([chart, table(["Pareto front", "Steps", "Return", "Time"], rows, class_="numbers")])


def importance_bar(search: Search, shares: Mapping[str, float]) -> Markup | None:
    """Return a bar with the share of each setting; None if all trials are alike."""
    if not shares:
        return None
    named = [(search.names[key], share) for key, share in shares.items()]
    marks = [element("li", key_mark(i), f"{name} {share:.0%}") for i, (name, share) in enumerate(named)]
    return join([element("ul", *marks, class_="legend"), stacked_bar(named, WIDTH)])


def coordinates(search: Search, outcome: Outcome) -> Markup | None:
    """Return parallel coordinates: an axis for each setting and one for the score, a line for each trial."""
    scores = search.rung_scores(search.rungs[0])
    if not scores:
        return None
    low = min(scores.values())
    span = max(scores.values()) - low or 1.0
    x = np.linspace(MARGIN, WIDTH - MARGIN, len(search.dimensions) + 1)
    faint: list[Markup] = []
    bold: list[Markup] = []
    for number, score in scores.items():
        texts = search.study.trials[number]
        shares = [part.position(texts[part.key]) for part in search.dimensions]
        y = HEIGHT - TOP - np.array([*shares, (score - low) / span]) * (HEIGHT - 2 * TOP)
        path = f"M{points(x, y)}"
        color = colors(outcome).get(f"trial-{number:03}")
        look = "c6 faint" if color is None else css_color(color)
        tip = element("title", f"trial-{number:03}: {format_si(score)}; {', '.join(texts.values())}")
        (faint if color is None else bold).append(element("g", element("path", d=path, class_=f"line {look}"), tip))
    axes: list[Markup] = []
    ends = [(search.names[part.key], *axis_ends(part.spec)) for part in search.dimensions]
    ends.append(("score", format_si(low), format_si(low + span)))
    for left, (name, bottom, top) in zip(x.tolist(), ends, strict=True):
        axes.append(element("line", x1=left, x2=left, y1=TOP, y2=HEIGHT - TOP))
        for text, height in ((name, TOP - 20), (top, TOP - 6), (bottom, HEIGHT - TOP + 15)):
            axes.append(element("text", text, x=left, y=height, class_="mid"))
    grid = element("g", *axes, class_="grid")
    return drawing(WIDTH, HEIGHT, "Settings and score", grid, *faint, *bold)


def axis_ends(spec: str) -> tuple[str, str]:
    """Return the labels of the ends of the axis of a setting."""
    low, dots, high = spec.partition(":")[0].partition("..")
    return (low, high) if dots else (spec.partition(",")[0], spec.rpartition(",")[2])


def trial_table(search: Search) -> Markup:
    """Return a table of all trials: settings and the score at each rung."""
    head = ["Trial", *(setting(search.names[part.key]) for part in search.dimensions)]
    scores = {steps: search.rung_scores(steps) for steps in search.rungs}
    rows = [
        [f"{number:03}", *texts.values(), *(format_si(scores[steps].get(number)) for steps in search.rungs)]
        for number, texts in enumerate(search.study.trials)
    ]
    return table([*head, *(f"{steps:,}" for steps in search.rungs)], rows, class_="numbers")

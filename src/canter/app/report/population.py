"""The report of a population: members, curves, the lineage of weights, and the settings over the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from canter.app.report.charts import SMALL, figure
from canter.app.report.data import RETURN, read_run
from canter.app.report.drawing import (
    Frame,
    Line,
    Markup,
    css_color,
    drawing,
    element,
    format_si,
    join,
    legend,
    line_chart,
    points,
)
from canter.app.report.page import REPORT, heading, write_page
from canter.app.report.sections import section, setting, table
from canter.runs.metrics import METRICS

if TYPE_CHECKING:  # experiments write reports
    from canter.app.tuning.pbt import PbtOutcome, Population
    from canter.app.tuning.space import Dimension

WIDTH = 1040.0
LANE = 34.0
"""Height of a member in the drawing of the lineage."""
LEFT = 124.0
RIGHT = 60.0
TOP = 12.0
BAR = 9.0
"""Half the height of a member's bar."""


def write_population_report(population: Population, outcome: PbtOutcome) -> Path:
    """Write the report of a population that is done into its folder and return the file."""
    pbt = population.pbt
    best = format_si(outcome.scores[outcome.winner])
    facts = f"{outcome.winner} ends with {best}, the best of {pbt.members}"
    if outcome.fresh is not None:
        facts += f"; {format_si(outcome.fresh)} in further episodes, which were not used for the choice"
    lineage = (
        "A lane for each member: the darker, the higher its score at the end of an interval, ranked among all. A line "
        "between lanes is a copy of weights; bold: the ancestors of the best member."
    )
    body = [
        heading(f"{pbt.members} members on {population.config.env.id}", f"{facts}."),
        section("Lineage", lineage, lineage_drawing(population, outcome)),
        section("Return", "Thin: all members. Bold: the best one at the end.", member_curves(population, outcome)),
        section(
            "Settings", "Thin: all members. Bold: the ancestors of the best.", settings_charts(population, outcome)
        ),
        section("Members", "Last score, and settings at the end.", member_table(population, outcome)),
    ]
    return write_page(population.folder / REPORT, f"Population on {population.config.env.id}", body)


def winner_of(population: Population, outcome: PbtOutcome) -> int:
    """Return the number of the best member."""
    return list(outcome.scores).index(outcome.winner)


def lineage_drawing(population: Population, outcome: PbtOutcome) -> Markup:
    """Return a lane for each member with its rank in each interval, and lines for copies."""
    ends = np.array([0, *population.steps])
    x = LEFT + ends / population.total * (WIDTH - LEFT - RIGHT)
    members = range(population.pbt.members)
    line = population.lineage.ancestors(winner_of(population, outcome))
    height = 2 * TOP + LANE * len(members) + 20
    lanes = [TOP + LANE * (member + 0.5) for member in members]
    marks: list[Markup] = []
    for member in members:
        marks.append(element("text", population.member_path(member).name, x=0.0, y=lanes[member] + 4))
    for number, steps in enumerate(population.steps):
        scores = population.scores(steps)
        known = sorted(score for score in scores if score is not None)
        for member in members:
            score = scores[member]
            share = 0.0 if score is None else bisect_right(known, score) / len(known)
            texts = ", ".join(population.lineage.settings(member, number).values())
            tip = element("title", f"{steps:,} steps: {format_si(score)}; {texts}")
            left = x[number] + 1
            width = x[number + 1] - x[number] - 2
            opacity = f"{0.1 + 0.7 * share:.2f}"
            top = lanes[member] - BAR
            bar = element("rect", x=left, y=top, width=width, height=2 * BAR, class_="dot", opacity=opacity)
            marks.append(element("g", element("g", bar, class_="c0"), tip))
    for end, (_, changes) in zip(x[1:], population.lineage.rounds, strict=False):
        for change in changes:
            if change.source != change.member:
                marks.append(_path([end - 5, end + 5], [lanes[change.source], lanes[change.member]], 6))
    turns = np.stack([x[:-1] + 5, x[1:] - 5], axis=1).ravel()
    marks.append(_path([x[0], *turns[1:-1], x[-1]], np.repeat([lanes[member] for member in line], 2), 1))
    for place, text in ((x[0], "0"), (x[-1], f"{population.total:,} env steps")):
        marks.append(element("text", text, x=float(place), y=height - 8, class_="mid muted"))
    return drawing(WIDTH, height, "Lineage", *marks)


def _path(x: Iterable[float], y: Iterable[float], color: int) -> Markup:
    return element("path", d=f"M{points(x, y)}", class_=f"line {css_color(color)}")


def member_curves(population: Population, outcome: PbtOutcome) -> Markup:
    """Return the learning curves of all members, and that of the best one on top."""
    metric = "lta/mean" if population.config.by_average else RETURN
    lines: list[Line] = []
    for name in outcome.scores:
        if not (population.folder / name / METRICS).is_file():
            continue  # it failed before its first row
        points = read_run(population.folder / name).points(metric)
        lines.append(Line(name, *points, 0) if name == outcome.winner else Line("", *points, 6, faint=True))
    return join([legend(lines), line_chart(lines, Frame("Return", WIDTH, 330.0, x_label="env steps"))])


def settings_charts(population: Population, outcome: PbtOutcome) -> Markup:
    """Return a chart for each setting: its place in its range over the run, for all members."""
    line = population.lineage.ancestors(winner_of(population, outcome))
    figures: list[Markup] = []
    for part in population.dimensions:
        lines: list[Line] = []
        for member in range(population.pbt.members):
            lines.append(Line("", *setting_steps(population, part, [member] * len(line)), 6, faint=True))
        lines.append(Line("", *setting_steps(population, part, line), 1))
        scale = {"linear": "", "log": "log10", "log1m": "log10 of the distance from 1"}[part.scale]
        name = population.names[part.key]
        text = "place of the choice" if part.choices else scale
        figures.append(figure(name, text, line_chart(lines, Frame(name, *SMALL))))
    return element("div", *figures, class_="multiples")


def setting_steps(population: Population, part: Dimension, members: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a setting, on its scale, of who is at each place in the line."""
    ends = [0, *population.steps]
    x: list[float] = []
    y: list[float] = []
    for number, member in enumerate(members):
        value = part.on_axis(population.lineage.settings(member, number)[part.key])
        if value is not None:
            x += [ends[number], ends[number + 1]]
            y += [value, value]
    return np.array(x, dtype=float), np.array(y)


def member_table(population: Population, outcome: PbtOutcome) -> Markup:
    """Return a table of the members: last score and settings."""
    head = ["", "Score", *(setting(population.names[part.key]) for part in population.dimensions)]
    rows = [
        [name, format_si(score), *population.lineage.settings(member).values()]
        for member, (name, score) in enumerate(outcome.scores.items())
    ]
    return table(head, rows, class_="numbers")

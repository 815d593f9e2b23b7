"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from canter.app.report import charts, sections
from canter.app.report.data import RunData
from canter.app.report.drawing import Markup, element, human, joined
from canter.app.report.sections import section
from canter.app.report.stats import Group, default_threshold, group_runs

ABLATION = "Each row differs from the first in one setting; final scores are means over seeds, without noise."
GENERATOR = "canter report"
"""Marks the files that may be overwritten by a newer report."""
STYLE = Path(__file__).with_name("style.css")


def run_page(run: RunData, threshold: float | None) -> str:
    """The report of one run."""
    groups = group_runs([run])
    error = run.record.get("error")
    recent = run.settings.get("recent_episodes", 100)
    words = f"Bold: mean of the episodes that ended in each rollout. Thin: of the last {recent} episodes, which lags."
    facts = joined([f"{run.env_id}, seed {run.seed} ", sections.status(run)])
    body = [
        heading(run.name, facts),
        element("p", str(error), class_="failure") if error else None,
        sections.headline(run, threshold),
        sections.film_strip(run),
        section("Return", words, curves(groups, threshold)),
        *chart_sections(groups),
        section(
            "Time",
            "What the training time was spent on.",
            sections.time_split([run]),
            charts.small_charts(charts.TIME, groups),
        ),
        section(
            "Settings", f"Marked ones differ from the {sections.baseline(run.env_id)[1]}.", sections.settings_table(run)
        ),
        section("Origin", "", sections.origin(run)),
    ]
    return document(f"{run.name} - {run.env_id}", body)


def comparison_page(runs: Sequence[RunData], threshold: float | None) -> str:
    """The report of several runs: one comparison for each environment."""
    groups = group_runs(runs)
    env_ids = list(dict.fromkeys(group.env_id for group in groups))
    title = f"{len(runs)} runs on {env_ids[0]}" if len(env_ids) == 1 else f"{len(runs)} runs"
    facts = ", ".join(env_ids) if len(env_ids) > 1 else f"seeds {', '.join(dict.fromkeys(run.seed for run in runs))}"
    body: list[Markup | None] = [heading(title, facts)]
    for env_id in env_ids:
        own = [group for group in groups if group.env_id == env_id]
        name = element("h2", env_id, class_="env") if len(env_ids) > 1 else None
        body += [name, *comparison_sections(own, threshold)]
    body += [
        section("Runs", "", sections.run_list(runs)),
        section("Time", "What the training time was spent on.", sections.time_split(runs)),
        section("Machine and versions", "", sections.machines(runs)),
    ]
    return document(title, body)


def comparison_sections(groups: Sequence[Group], threshold: float | None) -> list[Markup]:
    """Curves, scores and settings of the groups of one environment."""
    goal = default_threshold(charts.runs_of(groups)) if threshold is None else threshold
    seeds = [len(group.runs) for group in groups if len(group.runs) > 1]
    lead = "Mean of recent episodes while training."
    if seeds:
        lead += " Bold: interquartile mean over seeds, with its 95 % bootstrap band. Thin: each seed."
    if seeds and min(seeds) < 5:
        lead += " With fewer than five seeds such a band is too narrow: look at the seeds too."
    by_time = "The same over the seconds of training; a run that has ended keeps its last value."
    words = "Final return: interquartile mean over seeds, with its 95 % bootstrap interval. "
    if goal is not None:
        origin = "as asked" if threshold is not None else "nine tenths of the way from the lowest start to the best end"
        words += f"The threshold {human(goal)} is {origin}; times to it are those of the median seed."
    return [
        section("Return", lead, curves(groups, goal)),
        section("Comparison", words, sections.comparison(groups, goal)),
        section("One setting at a time", ABLATION, sections.ablation(groups)),
        section("Settings that differ", "", sections.differences(groups)),
        section("Return by time", by_time, curves(groups, goal, "seconds")),
        *chart_sections(groups),
    ]


def curves(groups: Sequence[Group], threshold: float | None, x: str = "env_steps") -> Markup:
    """The learning curve, drawn for a desk and for a phone; the style sheet shows one of them."""
    wide, narrow = (
        charts.learning_curve(groups, threshold, x),
        charts.learning_curve(groups, threshold, x, charts.NARROW),
    )
    return joined([element("div", wide, class_="desk"), element("div", narrow, class_="phone")])


def chart_sections(groups: Sequence[Group]) -> list[Markup]:
    """Small charts of everything else that was logged."""
    means = "By env steps, as means over the updates of each iteration."
    return [
        section("Episodes", "By env steps.", charts.small_charts(charts.episode_charts(groups), groups)),
        section("Learning", means, charts.small_charts(charts.declared_charts(groups), groups)),
        section("Further metrics", "By env steps.", charts.small_charts(charts.other_charts(groups), groups)),
    ]


def heading(title: str, facts: object) -> Markup:
    """What the page is about."""
    return element("header", element("p", "Canter report", class_="kicker"), element("h1", title), element("p", facts))


def document(title: str, body: Sequence[Markup | None]) -> str:
    """The whole file; nothing in it refers to anything outside of it."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    written = element("footer", f"Written by canter on {datetime.now():%d %B %Y at %H:%M}")
    page = element("html", head, element("body", element("main", *body, written)), lang="en")
    return f"<!doctype html>\n{page}\n"

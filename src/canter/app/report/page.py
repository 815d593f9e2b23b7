"""A report as one HTML file without external resources."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from canter.app.report import charts, sections
from canter.app.report.data import (
    AVERAGE,
    GOALS,
    Group,
    RunData,
    default_threshold,
    findings_of,
    goal_of,
    group_runs,
    read_run,
)
from canter.app.report.differences import compare_settings
from canter.app.report.drawing import Markup, element, format_si, join
from canter.app.report.sections import section
from canter.core.registry import UserError
from canter.core.storage.files import replace_file

REPORT = "report.html"
GENERATOR = "canter report"
"""Marks files that a newer report may overwrite."""
HEAD_BYTES = 1024
"""Bytes of a report that contain its generator."""
STYLE = Path(__file__).with_name("style.css")
DIFFERENCES = (
    "Each row against the first: {measure}, mean over seeds with its 95 % interval (Student); difference of the means "
    "with its 95 % interval and p-value (Welch's t-test, p adjusted by Holm for the number of rows). The first row is "
    "the group from which most others differ in one setting. Seeds are not paired."
)


def write_report(paths: Sequence[Path], out: Path | None = None, *, threshold: float | None = None) -> Path:
    """Write the report of one run folder, or a comparison of several, and return the file.

    By default the file is `report.html` in the folder of the one run, or in the current folder for
    several. Only an older report is overwritten. `threshold` is the return whose steps and time are
    reported; by default a comparison derives it from its runs.
    """
    if not paths:
        raise UserError("a report needs at least one run")
    runs = [read_run(path) for path in dict.fromkeys(path.resolve() for path in paths)]
    if out is None:
        out = paths[0] / REPORT if len(runs) == 1 else Path(REPORT)
    title, body = run_page(runs[0], threshold) if len(runs) == 1 else comparison_page(runs, threshold)
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a folder, so {out.name} cannot be written there")
    if out.exists() and not is_report(out):
        raise UserError(f"{out} exists and is not a report of canter; choose another file with --out")
    return write_page(out, title, body)


def is_report(path: Path) -> bool:
    """Return whether `write_report` has written a file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'content="{GENERATOR}"'.encode() in file.read(HEAD_BYTES)


def run_page(run: RunData, threshold: float | None) -> tuple[str, list[Markup | None]]:
    """Return title and body of the report of one run."""
    groups = group_runs([run])
    error = run.record.get("error")
    recent = run.settings.get("recent_episodes", 100)
    lead = (
        f"Bold: mean of the episodes that ended in each rollout. Thin: mean of the last {recent} episodes, which lags."
    )
    if run.goal == AVERAGE:
        lead = "Long-run average: raw reward per unit of time in the last 20 rollouts, with its 95 % interval."
    _, source = sections.baseline(run.env_id)
    time_charts = charts.small_charts(charts.TIME, groups)
    body: list[Markup | None] = [
        heading(run.name, join([f"{run.env_id}, seed {run.seed} ", sections.status(run)])),
        element("p", str(error), class_="failure") if error else None,
        sections.headline(run, threshold),
        doctor_section(run),
        sections.film_strip(run),
        section(GOALS[run.goal], lead, curves(groups, threshold)),
        *chart_sections(groups),
        section("Time", "Training time by activity.", sections.time_split([run]), time_charts),
        section("Settings", f"Marked settings differ from the {source}.", sections.settings_table(run)),
        section("Origin", "", sections.origin(run)),
    ]
    return f"{run.name} - {run.env_id}", body


def doctor_section(run: RunData) -> Markup | None:
    """Return the findings of `canter doctor` about a run; None for a healthy one."""
    findings = findings_of(run.path)
    items = [element("p", str(finding)) for finding in findings]
    return section("Doctor", "Why it may not learn, and what to change.", join(items)) if items else None


def comparison_page(runs: Sequence[RunData], threshold: float | None) -> tuple[str, list[Markup | None]]:
    """Return title and body of the report of several runs: one comparison for each environment."""
    groups = group_runs(runs)
    env_ids = list(dict.fromkeys(group.env_id for group in groups))
    if len(env_ids) == 1:
        title = f"{len(runs)} runs on {env_ids[0]}"
        facts = f"seeds {', '.join(dict.fromkeys(run.seed for run in runs))}"
    else:
        title = f"{len(runs)} runs"
        facts = ", ".join(env_ids)
    body: list[Markup | None] = [heading(title, facts)]
    for env_id in env_ids:
        if len(env_ids) > 1:
            body.append(element("h2", env_id, class_="env"))
        body += comparison_sections([group for group in groups if group.env_id == env_id], threshold)
    body += [
        section("Runs", "", sections.run_list(runs)),
        section("Time", "Training time by activity.", sections.time_split(runs)),
        section("Machine and versions", "", sections.machines(runs)),
    ]
    return title, body


def comparison_sections(groups: Sequence[Group], threshold: float | None) -> list[Markup]:
    """Return curves, scores and settings of the groups of one environment."""
    goal = default_threshold(charts.runs_of(groups)) if threshold is None else threshold
    seeds = [len(group.runs) for group in groups if len(group.runs) > 1]
    lead = "Mean of recent episodes, or average of recent rollouts, during training."
    if seeds:
        lead += " Bold: interquartile mean over seeds, with its 95 % bootstrap band. Thin: each seed."
    if seeds and min(seeds) < 5:
        lead += " With fewer than five seeds the band is too narrow: compare the single seeds too."
    by_time = "The same over the seconds of training; a run that has ended keeps its last value."
    name = GOALS[goal_of(charts.runs_of(groups))]
    scores = "Final score: mean over seeds, in new episodes without noise, with its 95 % interval (Student). "
    scores += f"Final {name.lower()}: interquartile mean over seeds, with its 95 % bootstrap interval. "
    if goal is not None:
        source = f"90 % of the way from the lowest first {name.lower()} to the best last one"
        if threshold is not None:
            source = f"the requested {name.lower()}"
        scores += f"The threshold {format_si(goal)} is {source}; times to it are those of the median seed."
    compared = compare_settings(groups)
    differences = DIFFERENCES.format(measure=compared.measure)
    return [
        section(name, lead, curves(groups, goal)),
        section("Comparison", scores, sections.comparison(groups, goal)),
        section("Differences", differences, sections.effects(compared)),
        section("Settings that differ", "", sections.differences(groups)),
        section(f"{name} by time", by_time, curves(groups, goal, "seconds")),
        *chart_sections(groups),
    ]


def curves(groups: Sequence[Group], threshold: float | None, x: str = "env_steps") -> Markup:
    """Return the learning curve for a desktop and for a phone; the style sheet shows one."""
    wide = charts.learning_curve(groups, threshold, x)
    narrow = charts.learning_curve(groups, threshold, x, charts.NARROW)
    return join([element("div", wide, class_="desk"), element("div", narrow, class_="phone")])


def chart_sections(groups: Sequence[Group]) -> list[Markup]:
    """Return small charts of all other metrics."""
    means = "By env steps, as means over the updates of each iteration."
    return [
        section("Episodes", "By env steps.", charts.small_charts(charts.episode_charts(groups), groups)),
        section("Learning", means, charts.small_charts(charts.declared_charts(groups), groups)),
        section("Further metrics", "By env steps.", charts.small_charts(charts.other_charts(groups), groups)),
    ]


def heading(title: str, facts: object) -> Markup:
    """Return the head of the page."""
    return element("header", element("p", "Canter report", class_="kicker"), element("h1", title), element("p", facts))


def write_page(file: Path, title: str, body: Sequence[Markup | None]) -> Path:
    """Write a page as a file that refers to nothing outside of it, and return the file."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    footer = element("footer", f"Written by canter on {datetime.now():%d %B %Y at %H:%M}")
    page = element("html", head, element("body", element("main", *body, footer)), lang="en")
    replace_file(file, f"<!doctype html>\n{page}\n".encode())
    return file

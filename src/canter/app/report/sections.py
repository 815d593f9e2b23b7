"""The sections of a report: numbers, tables and text around the charts."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from canter.algorithms.base import report_spec_for
from canter.app.console.text import format_duration
from canter.app.report.charts import COUNTERS
from canter.app.report.data import (
    AVERAGE,
    GOALS,
    RETURN,
    Group,
    RunData,
    ThresholdCrossing,
    differing_settings,
    final_score,
    final_scores,
    format_value,
    goal_of,
    time_to_threshold,
)
from canter.app.report.differences import GroupScore, SettingsComparison, format_p
from canter.app.report.drawing import Markup, element, escape, format_si, join, key_mark, stacked_bar
from canter.config import TrainConfig
from canter.config.presets import preset_for
from canter.core.plain import to_plain
from canter.envs import EnvConfig
from canter.functional.statistics import mean_interval
from canter.runs.records import flatten

PARTS = {
    "env": "Stepping environments",
    "policy": "Choosing actions",
    "update": "Learning",
    "other": "Logs, console and checkpoints",
}
BAR_WIDTH = 1040.0


def section(title: str, lead: str, *content: object) -> Markup:
    """Return a section with a heading; nothing if there is no content."""
    filled = [part for part in content if part]
    if not filled:
        return Markup("")
    return element("section", element("h2", title), element("p", lead, class_="lead") if lead else None, *filled)


def table(head: Sequence[object], rows: Sequence[Sequence[object]], class_: str | None = None) -> Markup:
    """Return a table that scrolls by itself on a narrow screen."""
    header = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("div", element("table", header, body, class_=class_), class_="scroll")


def status(run: RunData) -> Markup:
    """Return the status of the run with a dot in its colour."""
    return element("span", run.status, class_=f"status {run.status}")


def headline(run: RunData, threshold: float | None) -> Markup:
    """Return the most important numbers of one run as tiles."""
    _, values = run.points(run.goal)
    recent = "recent episodes" if run.goal == RETURN else "the last 20 rollouts"
    budget = run.settings.get("total_steps")
    of_budget = f"of {format_si(budget)} " if isinstance(budget, int) else ""
    episodes = run.last("episodes")
    tiles = [
        final_tile(run),
        (GOALS[run.goal], format_si(run.last(run.goal)), f"mean of {recent}, with noise{_average_interval(run)}"),
        ("Best", format_si(float(values.max())), "highest so far") if len(values) else None,
        ("Env steps", format_si(run.last("env_steps")), f"{of_budget}over all environments"),
        ("Episodes", format_si(episodes), "ended") if episodes is not None else None,
        ("Time", format_duration(run.last("seconds")), "of training"),
        ("Speed", format_si(run.speed, 3), "env steps per second") if run.speed is not None else None,
    ]
    if threshold is not None:
        reached = time_to_threshold(run, threshold)
        when = "never" if reached is None else f"after {format_duration(reached.seconds)}"
        tiles.append((f"Steps to {format_si(threshold)}", format_si(reached.steps if reached else None), when))
    cells = [
        element("div", element("dt", tile[0]), element("dd", tile[1]), element("p", tile[2])) for tile in tiles if tile
    ]
    return element("dl", *cells, class_="tiles")


def final_tile(run: RunData) -> tuple[str, str, str] | None:
    """Return the score of the final policy in new episodes; None without one."""
    score = run.score
    if score is None:
        return None
    details = run.record["score"]
    low = _number(details.get("low"))
    high = _number(details.get("high"))
    if run.goal == AVERAGE or "mean" not in details:
        ci = format_si(_number(details.get("ci")))
        return "Long-run average", format_si(score), f"± {ci}, reward per unit of time without noise"
    interval = ""
    if low is not None and high is not None:
        interval = f", 95 % interval {format_si(low)} to {format_si(high)}"
    episodes = details.get("episodes", "?")
    return "Final score", format_si(score), f"mean of {episodes} new episodes without noise{interval}"


def _average_interval(run: RunData) -> str:
    """Return half the width of the interval of the last average; nothing for returns."""
    ci = run.last("lta/ci") if run.goal == AVERAGE else None
    return "" if ci is None else f", ± {format_si(ci)}"


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def film_strip(run: RunData) -> Markup | None:
    """Return pictures of the newest video; None without one."""
    if run.strip is None:
        return None
    source = f"data:image/png;base64,{base64.b64encode(run.strip).decode()}"
    return element("img", src=source, alt="Pictures of an episode, from its beginning to its end", class_="strip")


def time_split(runs: Sequence[RunData]) -> Markup:
    """Return a bar of the time by activity for each run that measured it."""
    bars: list[Markup] = []
    for run in runs:
        names = [name for name in dict.fromkeys([*PARTS, *run.time_split]) if name in run.time_split]
        parts = [(PARTS.get(name, name), run.time_split[name]) for name in names]
        if not parts:
            continue
        items = [
            element("li", key_mark(number), f"{name} ", element("b", format_duration(seconds)))
            for number, (name, seconds) in enumerate(parts)
        ]
        if len(runs) > 1:
            bars.append(element("h3", run.name))
        bars += [stacked_bar(parts, BAR_WIDTH), element("ul", *items, class_="legend")]
    return join(bars)


def settings_table(run: RunData) -> Markup:
    """Return all settings; those that differ from the preset or the defaults are marked."""
    if not run.settings:
        return element("p", "The settings of this run cannot be read.", class_="muted")
    base, _ = baseline(run.env_id)
    rows: list[Markup] = []
    changed_rows: list[Markup] = []
    for key, value in run.settings.items():
        changed = key != "seed" and format_value(value) != format_value(base.get(key))
        old_value = _was(base.get(key)) if changed else None
        cells = (element("td", setting(key)), element("td", format_value(value), old_value))
        row = element("tr", *cells, class_="changed" if changed else None)
        rows.append(row)
        if changed:
            changed_rows.append(row)
    folded = element("details", element("summary", f"All {len(rows)} settings"), _settings(rows))
    return join([_settings(changed_rows) if changed_rows else None, folded])


def _was(value: Any) -> Markup:
    return element("span", f"was {format_value(value)}", class_="was")


def _settings(rows: Sequence[Markup]) -> Markup:
    return element("div", element("table", element("tbody", *rows)), class_="settings")


def setting(key: str) -> Markup:
    """Return the name of a setting, which may be broken after its dots."""
    return Markup(escape(key).replace(".", ".<wbr/>"))


def baseline(env_id: str) -> tuple[dict[str, Any], str]:
    """Return the settings of an environment's preset, or the defaults, and which of both it is."""
    preset = preset_for(env_id)
    if preset is not None:
        return dict(flatten(to_plain(preset))), "preset"
    return dict(flatten(to_plain(TrainConfig(env=EnvConfig(id=env_id))))), "defaults"


def origin(run: RunData) -> Markup:
    """Return date, command, counters, machine and versions of one run."""
    facts = {name.capitalize(): _format_date(run.record.get(name)) for name in ("started", "resumed", "ended", "host")}
    command = run.record.get("command")
    if isinstance(command, list) and command:
        path = Path(str(command[0]))  # private: only the name of the program is shown
        name = path.parent.name if path.name == "__main__.py" else path.name
        facts["Command"] = shlex.join([name, *map(str, command[1:])])
    titles = {**COUNTERS, **report_spec_for(run.settings.get("algorithm.kind")).counters}
    counters = {title: f"{value:,.0f}" for name, title in titles.items() if (value := run.last(name)) is not None}
    return lists({"Run": {name: fact for name, fact in facts.items() if fact}, "Counters": counters, **machine(run)})


def _format_date(value: Any) -> str:
    """Return a UTC time stamp as date and time; anything else as it is."""
    text = "" if value is None else str(value)
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?\+00:00$", r"\1 \2 UTC", text)


def machine(run: RunData) -> dict[str, Any]:
    """Return machine and versions of a run."""
    return {"Machine": run.record.get("machine"), "Versions": run.record.get("versions")}


def machines(runs: Sequence[RunData]) -> Markup:
    """Return every machine once, with the names of its runs if there are several machines."""
    by_machine: dict[str, list[RunData]] = {}
    for run in runs:
        by_machine.setdefault(repr(machine(run)), []).append(run)
    blocks: list[Markup] = []
    for group in by_machine.values():
        if len(by_machine) > 1:
            blocks.append(element("h3", ", ".join(run.name for run in group)))
        blocks.append(lists(machine(group[0])))
    return join(blocks)


def lists(titled: dict[str, Any]) -> Markup:
    """Return lists of names and values side by side; empty ones are left out."""
    columns = [
        element("div", element("h3", title), element("dl", *map(_definition, content.items())))
        for title, content in titled.items()
        if isinstance(content, dict) and content
    ]
    return element("div", *columns, class_="columns") if columns else Markup("")


def _definition(item: tuple[Any, Any]) -> Markup:
    name, value = item
    return join([element("dt", name), element("dd", format_value(value))])


def comparison(groups: Sequence[Group], threshold: float | None) -> Markup:
    """Return a table with the final results of each group, and its time to the threshold."""
    goal = goal_of(run for group in groups for run in group.runs)
    head: list[object] = ["", "Runs", "Final score", f"Final {GOALS[goal].lower()}", "Best run"]
    if threshold is not None:
        head += [f"Steps to {format_si(threshold)}", f"Time to {format_si(threshold)}"]
    rows = [_comparison_row(number, group, goal, threshold) for number, group in enumerate(groups)]
    return table([*head, "Steps per second"], rows, class_="numbers")


def _comparison_row(number: int, group: Group, goal: str, threshold: float | None) -> list[object]:
    scores = final_scores(group, goal)
    best = [values.max() for run in group.runs if len(values := run.points(goal)[1])]
    row: list[object] = [
        join([key_mark(number), element("b", group.label)]),
        len(group.runs),
        mean_cell(_mean(scores), mean_interval(scores)),
        mean_cell(*final_score(group, goal)),
        format_si(float(max(best)) if best else None),
    ]
    if threshold is not None:
        row += _threshold_cells([time_to_threshold(run, threshold) for run in group.runs])
    return [*row, format_si(_mean(run.speed for run in group.runs), 3)]


def _threshold_cells(crossings: Sequence[ThresholdCrossing | None]) -> list[object]:
    """Return the median steps and time to the threshold; runs below it count as slowest."""
    reached = [crossing for crossing in crossings if crossing is not None]
    share = None
    if len(reached) < len(crossings):
        share = element("small", f"{len(reached)} of {len(crossings)} reached it")
    if 2 * len(reached) <= len(crossings):
        return [join(["most did not" if reached else "not reached", share]), format_si(None)]
    middle = (len(crossings) - 1) // 2
    steps = sorted(crossing.steps for crossing in reached)
    seconds = sorted(crossing.seconds for crossing in reached if crossing.seconds is not None)
    median_seconds = seconds[middle] if middle < len(seconds) else None
    return [join([format_si(steps[middle]), share]), format_duration(median_seconds)]


def mean_cell(mean: float | None, interval: tuple[float, float] | None) -> Markup:
    """Return a mean, a dash for None, with its interval below."""
    below = None if interval is None else element("small", " to ".join(map(format_si, interval)))
    return join([format_si(mean), below])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def effects(compared: SettingsComparison) -> Markup | None:
    """Return a table of the difference that settings make; None for a single group."""
    if not compared.others:
        return None
    base = compared.base
    head = ["Setting", "Value", "Runs", "Mean", "Difference", "95 % interval", "p"]
    rows: list[list[object]] = [
        ["unchanged" if len(base.group.runs) > 1 else base.group.label, "", *_mean_cells(base), "", "", ""]
    ]
    for other in compared.others:
        difference = "" if base.mean is None or other.mean is None else f"{other.mean - base.mean:+.4g}"
        interval = "one run is no sample" if min(len(base.scores), len(other.scores)) < 2 else "no spread"
        if other.test is not None:
            interval = f"{other.test.low:+.4g} to {other.test.high:+.4g}"
        cells = [*_changed_setting(other), *_mean_cells(other), difference, interval, format_p(other.adjusted_p)]
        rows.append(cells)
    return table(head, rows, class_="numbers")


def _changed_setting(score: GroupScore) -> tuple[object, object]:
    """Return the one setting in which a group differs with its values, or the name of the group."""
    if len(score.changes) != 1:
        return element("b", score.group.label), f"{len(score.changes)} settings" if score.changes else ""
    [(key, (old, new))] = score.changes.items()
    return setting(key), join([format_value(new), _was(old)])


def _mean_cells(score: GroupScore) -> tuple[object, object]:
    """Return the number of runs and their mean with its interval."""
    return len(score.scores), mean_cell(score.mean, score.interval)


def differences(groups: Sequence[Group]) -> Markup | None:
    """Return a table of the settings in which groups differ; None if there are none."""
    rows = [[setting(key), *map(format_value, values)] for key, values in differing_settings(groups).items()]
    return table(["Setting", *(group.label for group in groups)], rows, class_="plain") if rows else None


def run_list(runs: Sequence[RunData]) -> Markup:
    """Return a table of all runs."""
    rows: list[list[object]] = [
        [
            element("b", run.name),
            run.env_id,
            run.seed,
            status(run),
            format_si(run.score),
            format_si(run.last("env_steps")),
            format_si(run.last(run.goal)),
            format_duration(run.last("seconds")),
        ]
        for run in runs
    ]
    head = ["Run", "Environment", "Seed", "Status", "Final score", "Env steps", "Return or average", "Time"]
    return table(head, rows, class_="runs")

"""The parts of a report: numbers, tables and words around the charts."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.algorithms.base import declared_under
from canter.app.report.charts import COUNTERS
from canter.app.report.data import RunData, flatten
from canter.app.report.drawing import Markup, duration, element, escaped, human, joined, key_mark, stacked_bar
from canter.app.report.stats import Group, Reached, differing_settings, final_score, shown, time_to
from canter.config import TrainConfig
from canter.config.presets import preset_for
from canter.core.plain import to_plain

PARTS = {
    "env": "Stepping environments",
    "policy": "Choosing actions",
    "update": "Learning",
    "other": "Logs, console and checkpoints",
}


def section(title: str, lead: str, *content: object) -> Markup:
    """A headed part of the page; nothing where there is no content."""
    filled = [part for part in content if part]
    if not filled:
        return Markup("")
    return element("section", element("h2", title), element("p", lead, class_="lead") if lead else None, *filled)


def table(head: Sequence[object], rows: Sequence[Sequence[object]], class_: str | None = None) -> Markup:
    """A table; on a narrow screen it scrolls by itself."""
    top = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("div", element("table", top, body, class_=class_), class_="scroll")


def status(run: RunData) -> Markup:
    """How the run ended, with a dot in the colour of it."""
    return element("span", run.status, class_=f"status {run.status}")


def headline(run: RunData, threshold: float | None) -> Markup:
    """The numbers of one run that matter most."""
    _, returns = run.points("return")
    budget, episodes = run.settings.get("total_steps"), run.last("episodes")
    of = f"of {human(budget)} " if isinstance(budget, int) else ""
    tiles = [
        final_tile(run),
        ("Return", human(run.last("return")), "mean of recent episodes, with noise"),
        ("Best", human(float(returns.max())), "highest so far") if len(returns) else None,
        ("Env steps", human(run.last("env_steps")), f"{of}over all environments"),
        ("Episodes", human(episodes), "that have ended") if episodes is not None else None,
        ("Time", duration(run.last("seconds")), "of training"),
        ("Speed", human(run.speed, 3), "env steps per second") if run.speed is not None else None,
    ]
    if threshold is not None:
        reached = time_to(run, threshold)
        when = "never" if reached is None else f"after {duration(reached.seconds)}"
        tiles.append((f"Steps to {human(threshold)}", human(reached.steps if reached else None), when))
    cells = [
        element("div", element("dt", tile[0]), element("dd", tile[1]), element("p", tile[2])) for tile in tiles if tile
    ]
    return element("dl", *cells, class_="tiles")


def film_strip(run: RunData) -> Markup | None:
    """Pictures of the newest video; None without one."""
    if run.strip is None:
        return None
    source = f"data:image/png;base64,{base64.b64encode(run.strip).decode()}"
    return element("img", src=source, alt="Pictures of an episode, from its beginning to its end", class_="strip")


def final_tile(run: RunData) -> tuple[str, str, str] | None:
    """The score of the final policy in new episodes; None where there is none."""
    score = run.score
    if score is None:
        return None
    about = run.record["score"]
    low, high, ci = (about[key] if isinstance(about.get(key), int | float) else None for key in ("low", "high", "ci"))
    if "mean" not in about:
        return "Long-run average", human(score), f"± {human(ci)}, reward per unit of time without noise"
    between = f", 95 % interval {human(low)} to {human(high)}" if low is not None and high is not None else ""
    return "Final score", human(score), f"mean of {about.get('episodes', '?')} new episodes without noise{between}"


def time_split(runs: Sequence[RunData]) -> Markup:
    """Where the time went: one bar for each run that measured it."""
    bars: list[Markup | None] = []
    for run in runs:
        names = [name for name in dict.fromkeys([*PARTS, *run.time_split]) if name in run.time_split]
        parts = [(PARTS.get(name, name), run.time_split[name]) for name in names]
        if parts:
            items = [
                element("li", key_mark(number), f"{name} ", element("b", duration(value)))
                for number, (name, value) in enumerate(parts)
            ]
            name = element("h3", run.name) if len(runs) > 1 else None
            bars += [name, stacked_bar(parts, 1040), element("ul", *items, class_="legend")]
    return joined(bars)


def settings_table(run: RunData) -> Markup:
    """All settings, those that differ from the preset or the defaults marked."""
    if not run.settings:
        return element("p", "The settings of this run cannot be read.", class_="muted")
    base, _ = baseline(run.env_id)
    rows: list[Markup] = []
    marked: list[Markup] = []
    for key, value in run.settings.items():
        changed = key != "seed" and shown(value) != shown(base.get(key))
        cells = element("td", setting(key)), element("td", shown(value), _was(base.get(key)) if changed else None)
        rows.append(element("tr", *cells, class_="changed" if changed else None))
        if changed:
            marked.append(rows[-1])
    folded = element("details", element("summary", f"All {len(rows)} settings"), _settings(rows))
    return joined([_settings(marked) if marked else None, folded])


def _was(value: Any) -> Markup:
    return element("span", f"was {shown(value)}", class_="was")


def _settings(rows: Sequence[Markup]) -> Markup:
    return element("div", element("table", element("tbody", *rows)), class_="settings")


def setting(key: str) -> Markup:
    """The name of a setting, which may be broken after its dots."""
    return Markup(escaped(key).replace(".", ".<wbr/>"))


def baseline(env_id: str) -> tuple[dict[str, Any], str]:
    """The settings that an environment would have by itself, and what they are called."""
    preset, defaults = preset_for(env_id), TrainConfig()
    config = preset or replace(defaults, env=replace(defaults.env, id=env_id))
    return dict(flatten(to_plain(config))), "preset" if preset else "defaults"


def origin(run: RunData) -> Markup:
    """When and on what one run ran, and what it counted."""
    command = run.record.get("command")
    facts = {name.capitalize(): _moment(run.record.get(name)) for name in ("started", "resumed", "ended", "host")}
    if isinstance(command, list) and command:
        path = Path(str(command[0]))  # which is private
        name = path.parent.name if path.name == "__main__.py" else path.name
        facts["Command"] = shlex.join([name, *map(str, command[1:])])
    counted = {**COUNTERS, **declared_under(run.settings.get("algorithm.kind")).counters}
    counters = {text: f"{value:,.0f}" for name, text in counted.items() if (value := run.last(name)) is not None}
    return lists({"Run": {name: fact for name, fact in facts.items() if fact}, "Counters": counters, **machine(run)})


def _moment(value: Any) -> str:
    """A time stamp as people write it; anything else as it is."""
    text = "" if value is None else str(value)
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?\+00:00$", r"\1 \2 UTC", text)


def machine(run: RunData) -> dict[str, Any]:
    """What a run ran on and with."""
    return {"Machine": run.record.get("machine"), "Versions": run.record.get("versions")}


def machines(runs: Sequence[RunData]) -> Markup:
    """Every machine once, with the names of its runs where there are several."""
    apart: dict[str, list[RunData]] = {}
    for run in runs:
        apart.setdefault(repr(machine(run)), []).append(run)
    blocks: list[Markup | None] = []
    for own in apart.values():
        names = element("h3", ", ".join(run.name for run in own)) if len(apart) > 1 else None
        blocks += [names, lists(machine(own[0]))]
    return joined(blocks)


def lists(titled: dict[str, Any]) -> Markup:
    """Lists of names and values side by side, as far as there are any."""
    columns = [
        element("div", element("h3", title), element("dl", *map(_pair, content.items())))
        for title, content in titled.items()
        if isinstance(content, dict) and content
    ]
    return element("div", *columns, class_="columns") if columns else Markup("")


def _pair(item: tuple[Any, Any]) -> Markup:
    return joined([element("dt", item[0]), element("dd", shown(item[1]))])


def comparison(groups: Sequence[Group], threshold: float | None) -> Markup:
    """One row for each group: where it ended, and when it reached the threshold."""
    head: list[object] = ["", "Runs", "Final score", "Final return", "Best run"]
    if threshold is not None:
        head += [f"Steps to {human(threshold)}", f"Time to {human(threshold)}"]
    rows = [_comparison_row(number, group, threshold) for number, group in enumerate(groups)]
    return table([*head, "Steps per second"], rows, class_="numbers")


def _comparison_row(number: int, group: Group, threshold: float | None) -> list[object]:
    score = final_score(group)
    best = [values.max() for run in group.runs if len(values := run.points("return")[1])]
    interval = element("small", f"{human(score[1])} to {human(score[2])}") if score and score[1] is not None else None
    row: list[object] = [
        joined([key_mark(number), element("b", group.label)]),
        len(group.runs),
        human(mean_score(group)),
        joined([human(score[0] if score else None), interval]),
        human(float(max(best)) if best else None),
    ]
    if threshold is not None:
        row += _reached_cells([time_to(run, threshold) for run in group.runs])
    return [*row, human(_mean(run.speed for run in group.runs), 3)]


def _reached_cells(reached: Sequence[Reached | None]) -> list[object]:
    """Steps and time that half of the runs needed at most; runs that never got there count as slower than any."""
    there = [item for item in reached if item is not None]
    share = element("small", f"{len(there)} of {len(reached)} reached it") if len(there) < len(reached) else None
    if 2 * len(there) <= len(reached):
        return [joined(["not reached" if not there else "most did not", share]), human(None)]
    middle = (len(reached) - 1) // 2
    steps = sorted(item.steps for item in there)
    seconds = sorted(item.seconds for item in there if item.seconds is not None)
    return [joined([human(steps[middle]), share]), duration(seconds[middle] if middle < len(seconds) else None)]


def mean_score(group: Group) -> float | None:
    """Mean of the final scores of a group's runs; None where none has one."""
    return _mean(run.score for run in group.runs)


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def ablation(groups: Sequence[Group]) -> Markup | None:
    """What changing one setting does: the group that most others differ from in a single setting, and those others."""
    found = [_one_apart(group, groups) for group in groups]
    base = max(range(len(groups)), key=lambda i: len(found[i]))
    if not found[base]:
        return None
    before = mean_score(groups[base])
    rows: list[list[object]] = [["as it is", "", human(before), ""]]
    for key, value, group in found[base]:
        after = mean_score(group)
        change = "" if before is None or after is None else f"{after - before:+.4g}"
        values = joined([shown(value), _was(groups[base].settings.get(key))])
        rows.append([setting(key), values, human(after), change])
    return table(["Setting", "Value", "Final score", "Difference"], rows, class_="numbers")


def _one_apart(group: Group, groups: Sequence[Group]) -> list[tuple[str, Any, Group]]:
    """Groups that differ from this one in one setting, with it and its value there."""
    apart = [(other, differing_settings([group, other])) for other in groups if other is not group]
    return [(key, values[1], other) for other, found in apart if len(found) == 1 for key, values in found.items()]


def differences(groups: Sequence[Group]) -> Markup | None:
    """The settings in which groups differ; None if in none."""
    rows = [[setting(key), *map(shown, values)] for key, values in differing_settings(groups).items()]
    return table(["Setting", *(group.label for group in groups)], rows, class_="plain") if rows else None


def run_list(runs: Sequence[RunData]) -> Markup:
    """Every run by itself."""
    rows: list[list[object]] = []
    for run in runs:
        numbers = human(run.last("env_steps")), human(run.last("return")), duration(run.last("seconds"))
        rows.append([element("b", run.name), run.env_id, run.seed, status(run), human(run.score), *numbers])
    head = ["Run", "Environment", "Seed", "Status", "Final score", "Env steps", "Return", "Time"]
    return table(head, rows, class_="runs")

"""The live table of a run: progress, remaining time, learning curve, metrics and time split.

`ProgressTracker` computes the numbers, `Dashboard` draws them, `LiveConsole` keeps the table at the
lower end of the terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from canter.algorithms.base import Headline, report_spec_for
from canter.app.console.text import (
    PrintableStream,
    format_clock,
    format_number,
    format_percent,
    printable,
    terminal_stream,
)
from canter.core.storage.validity import flatten
from canter.runs.records import by_average
from canter.runs.writers import LogRow
from canter.training.progress import PARTS

TRACKED_ROWS = 50
"""Rows that speeds and time shares are averaged over."""
UNDECLARED = 4
"""Metrics to show of an algorithm that declares none."""
MAX_WIDTH = 120
CELL_WIDTH = 22
"""Columns of a label and its value."""
GAP = 3
"""Columns between two cells."""
TOPIC_LINES = 4
LABEL_WIDTH = 12
MARGIN = 10
"""Columns for the labels on the left of a chart."""
BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_POINTS = 480
CHART_HEIGHT = 3
COUNTERS = ("rollouts", "resets", "updates", "minibatch_updates", "train_steps")
COLOURS = {"env": "cyan", "policy": "magenta", "update": "yellow", "other": "bright_black"}
STRONG = "bold"
DIM = "dim"
RULE = "bright_black"

Line = list[tuple[str, str]]
"""Pieces of text with their styles."""
Topic = dict[str, str]
"""Labels and values that belong together."""


class ProgressTracker:
    """Progress and speed of a run over its last rows, and the settings that its display needs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.total_steps: int | None = settings.get("total_steps")
        until = settings.get("until", {})
        steps = [limit for limit in (self.total_steps, until.get("steps")) if limit is not None]
        limits = {
            "env_steps": min(steps, default=None),
            "iteration": until.get("iterations"),
            "seconds": until.get("seconds"),
        }
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        """Limits of the run, by the column of a row that counts towards them."""
        self.rows: deque[dict[str, Any]] = deque(maxlen=TRACKED_ROWS)
        self.by_average = by_average(flatten(settings))
        """The run is scored by reward per unit of time."""
        success = settings.get("success") or {}
        self.success = "success" if any(value is not None for value in success.values()) else "terminated"
        """Rate of episodes to show: successes, or terminated ones if success is not defined."""
        self.recent: int = settings.get("recent_episodes", 100)
        """Number of episodes that means are over."""
        self.algorithm: dict[str, Any] = settings.get("algorithm") or {}
        """Settings of the algorithm."""
        self.report_spec = report_spec_for(self.algorithm.get("kind"))

    def headlines(self, row: dict[str, Any]) -> tuple[Headline, ...]:
        """Return the metrics to show: those the algorithm declares, or else its first few."""
        if self.report_spec.headlines:
            return self.report_spec.headlines
        names = [name for name in row if "/" in name and not name.startswith(("time/", "lta/", "self_play/"))]
        return tuple(
            Headline(metric=name, label=name, topic="metrics", line=name, block=name) for name in names[:UNDECLARED]
        )

    def rate(self, row: dict[str, Any]) -> float | None:
        """Return the rate of episodes to show; None if none has ended."""
        return row.get(f"{self.success}_rate")

    def progress(self, row: dict[str, Any]) -> float:
        """Return the completed fraction of the run, 0..1; 0 for a run without a limit."""
        return min(max((row[name] / limit for name, limit in self.limits.items()), default=0.0), 1.0)

    @property
    def steps_per_second(self) -> float:
        """Transitions per second."""
        steps = sum(row["rollout_steps"] for row in list(self.rows))  # a copy: another thread appends to it
        return steps / max(sum(self._seconds().values()), 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the first limit at the current speed; None without a limit."""
        row = self.rows[-1]
        steps = self.steps_per_second
        iterations = steps * row["iteration"] / max(row["env_steps"], 1)
        speeds = {"env_steps": steps, "iteration": iterations, "seconds": 1.0}
        left = [max(limit - row[name], 0) / max(speeds[name], 1e-9) for name, limit in self.limits.items()]
        return min(left, default=None)

    @property
    def time_shares(self) -> dict[str, float]:
        """Fraction of the time by part."""
        seconds = self._seconds()
        total = max(sum(seconds.values()), 1e-9)
        return {part: spent / total for part, spent in seconds.items()}

    def _seconds(self) -> dict[str, float]:
        rows = list(self.rows)
        return {part: sum(row[f"time/{part}"] for row in rows) for part in PARTS}


def format_env_metrics(row: dict[str, Any]) -> dict[str, str]:
    """Return the metrics that the environment reports, by name."""
    return {name.removeprefix("env/"): format_number(value) for name, value in row.items() if name.startswith("env/")}


def format_custom_metrics(row: dict[str, Any]) -> dict[str, str]:
    """Return the metrics that callbacks added, by name."""
    return {name: format_number(row[name]) for name in row.custom} if isinstance(row, LogRow) else {}


def format_long_run_average(row: dict[str, Any]) -> str:
    """Return the reward per unit of time with its interval, `-` before there is one."""
    if "lta/mean" not in row:
        return "-"
    return f"{format_number(row['lta/mean'])} ± {format_number(row['lta/ci'])}"


def find_metric(headline: Headline, row: dict[str, Any]) -> str | None:
    """Return the name of a metric in a row, or the first name below it; None if there is none."""
    return next((name for name in row if f"{name}/".startswith(f"{headline.metric}/")), None)


def format_metric(headline: Headline, row: dict[str, Any]) -> str:
    """Return the value of a metric; a hyphen if the row has none."""
    value = row.get(find_metric(headline, row) or "")
    return format_percent(value) if headline.percent else format_number(value)


class Dashboard:
    """Draws the latest row of a run at any width."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.title = f"Canter · {settings.get('env', {}).get('id', 'training')} · seed {settings.get('seed', '-')}"
        self.tracker = ProgressTracker(settings)
        self.curve: dict[int, float] = {}
        self.updated_at = time.perf_counter()
        self.running = True

    def add(self, row: dict[str, Any]) -> None:
        """Add the row of another iteration."""
        self.updated_at = time.perf_counter()
        value = row.get("lta/mean") if self.tracker.by_average else row["return"]
        if value is not None:
            self.curve[int(self.tracker.progress(row) * (CHART_POINTS - 1))] = value
        self.tracker.rows.append(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield segments; rich's own panels and tables take several times as long to draw."""
        width = min(options.max_width, MAX_WIDTH)
        for line in self.lines(width):
            pieces = [Segment(printable(text), console.get_style(style)) for text, style in line]
            yield from Segment.adjust_line_length(pieces, width)
            yield Segment.line()

    def lines(self, width: int) -> Iterator[Line]:
        """Yield the whole table, line by line."""
        hint = " Ctrl-C stops after this iteration " if self.running and width >= 50 else ""
        content = self.content(max(width - 4, CELL_WIDTH)) if self.tracker.rows else [[("the first rollout ...", DIM)]]
        yield [("── ", RULE), (self.title, STRONG), (" " + "─" * width, RULE)]
        yield []
        yield from ([("  ", ""), *line] for line in content)
        yield []
        yield [("─" * (width - len(hint) - 2), RULE), (hint, DIM), ("──", RULE)]

    def content(self, width: int) -> Iterator[Line]:
        """Yield the lines between the rules."""
        row = self.tracker.rows[-1]
        progress = self.tracker.progress(row)
        bar_width = width - 6
        done = int(progress * bar_width)
        yield [("━" * done, "green"), ("━" * (bar_width - done), RULE), (f"{progress:6.0%}", STRONG)]
        yield from self.clock(row, width)
        yield []
        curve = dict(self.curve)  # a copy: another thread adds to it
        yield from chart("reward/t" if self.tracker.by_average else "return", curve, progress, width)
        yield []
        if self.tracker.by_average:
            label = "reward per unit of time "
            average = format_long_run_average(row)
            note = ", the last 20 rollouts"
            if len(label + average + note) > width:
                note = ""
            yield [(label, DIM), (average, STRONG), (note, DIM)]
            yield []
        yield from grid(topics(row, self.tracker), width)
        yield []
        yield from time_bar(self.tracker.time_shares, width)

    def clock(self, row: dict[str, Any], width: int) -> Iterator[Line]:
        """Yield steps and speed on the left, time on the right; on two lines if it is narrow."""
        since = time.perf_counter() - self.updated_at if self.running else 0.0
        left = self.tracker.seconds_left
        if left is not None:
            left = max(left - since, 0)
        total = self.tracker.total_steps
        of_total = "" if total is None else f" of {total:,}"
        steps = f"{row['env_steps']:,}{of_total} steps · {self.tracker.steps_per_second:,.0f} steps/s"
        times = f"{format_clock(row['seconds'] + since)} elapsed · {format_clock(left)} left"
        if len(steps) + len(times) < width:
            yield [(steps + times.rjust(width - len(steps)), "")]
        else:
            yield [(steps, "")]
            yield [(times, "")]


def topics(row: dict[str, Any], tracker: ProgressTracker) -> dict[str, Topic]:
    """Return the numbers to show: episodes, algorithm, environment and counters."""
    from_algorithm: dict[str, Topic] = {}
    declared = [headline for headline in tracker.headlines(row) if headline.topic]
    # Before the first update a row has none of them; after it those that are missing stay so.
    for headline in [headline for headline in declared if find_metric(headline, row)] or declared:
        from_algorithm.setdefault(headline.topic, {})[headline.label] = format_metric(headline, row)
    counters = {name.replace("_", " "): f"{row[name]:,}" for name in COUNTERS}
    minibatches = tracker.algorithm.get("num_minibatches")
    if minibatches:
        counters["epochs"] = f"{row['minibatch_updates'] / minibatches:,.6g}"
    return {
        f"episodes (last {tracker.recent})": {
            "return": format_number(row["return"]),
            "length": format_number(row["length"]),
            "success rate" if tracker.success == "success" else tracker.success: format_percent(tracker.rate(row)),
            "total": f"{row['episodes']:,}",
        },
        **from_algorithm,
        **fixed_topic("callbacks", format_custom_metrics(row)),
        **fixed_topic("environment", format_env_metrics(row)),
        "so far": counters,
    }


def fixed_topic(title: str, metrics: dict[str, str]) -> dict[str, Topic]:
    """Return a topic with the first metrics, always of the same height; nothing without metrics."""
    # The end of a long name says more than its beginning.
    entries = {name[-LABEL_WIDTH:]: text for name, text in list(metrics.items())[:TOPIC_LINES]}
    blanks = {" " * i: "" for i in range(TOPIC_LINES - len(entries))}
    return {title: entries | blanks} if entries else {}


def chart(label: str, curve: dict[int, float], progress: float, width: int) -> Iterator[Line]:
    """Yield a chart of a value over the run, from its lowest to its highest."""
    inner = width - MARGIN
    low = min(curve.values(), default=0.0)
    high = max(curve.values(), default=0.0)
    columns = {point * inner // CHART_POINTS: value for point, value in sorted(curve.items())}
    levels: list[int] = []
    level = 0
    for column in range(min(int(progress * inner) + 1, inner)):
        if column in columns:
            level = 1 + round((columns[column] - low) / max(high - low, 1e-9) * (CHART_HEIGHT * 8 - 1))
        levels.append(level)
    labels = [""] * CHART_HEIGHT
    if curve:
        labels[0] = format_number(high)
        labels[-1] = format_number(low)
    labels[CHART_HEIGHT // 2] = label
    for i, text in enumerate(labels):
        floor = 8 * (CHART_HEIGHT - 1 - i)
        blocks = "".join(BLOCKS[min(max(level - floor, 0), 8)] for level in levels)
        yield [(f"{text:<{MARGIN}}", DIM), (blocks, "green")]


def grid(topics: dict[str, Topic], width: int) -> Iterator[Line]:
    """Yield the topics in columns, as many as fit; the last only if it fits next to the others."""
    columns = max(1, min(len(topics), (width + GAP) // (CELL_WIDTH + GAP)))
    widths = [end - start for start, end in pairwise(i * (width + GAP) // columns for i in range(columns + 1))]
    visible = list(topics.items())[: max(columns, 3)]
    for first in range(0, len(visible), columns):
        row = list(zip(visible[first : first + columns], widths, strict=False))
        if first:
            yield []
        yield [(f"{title:<{cell_width}}", "bold cyan") for (title, _), cell_width in row]
        for cells in zip_longest(*(topic.items() for (_, topic), _ in row), fillvalue=("", "")):
            line: Line = []
            for (label, value), (_, cell_width) in zip(cells, row, strict=True):
                value_width = max(cell_width - GAP - len(label), 0)
                line += [(label, DIM), (f"{value:>{value_width}}", STRONG), (" " * GAP, "")]
            yield line


def time_bar(fractions: dict[str, float], width: int) -> Iterator[Line]:
    """Yield the time split as a bar and in words."""
    ends = [round(end * (width - MARGIN)) for end in accumulate(fractions.values())]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    bar = [("━" * length, COLOURS[part]) for part, length in zip(fractions, lengths, strict=True)]
    yield [(f"{'time':<{MARGIN}}", DIM), *bar]
    line: Line = []
    for part, fraction in fractions.items():
        percentage = f"{fraction:.0%}"
        if percentage == "0%":
            continue
        words = f"{part} {percentage}"
        if line and MARGIN + sum(len(piece) for piece, _ in line) + len(words) + 2 > width:
            yield [(" " * MARGIN, ""), *line]
            line = []
        line += [("━ ", COLOURS[part]), (f"{words}   ", DIM)]
    yield [(" " * MARGIN, ""), *line]


class LiveConsole:
    """One table that is redrawn in place; printed and logged text appears above it."""

    def __init__(self, terminal: Console | None = None, refresh_per_second: float = 4) -> None:
        self.terminal = terminal or Console(file=terminal_stream())
        self.refresh_per_second = refresh_per_second
        self.dashboard = Dashboard({})
        self.live: Live | None = None
        self.redirected: dict[logging.StreamHandler[Any], Any] = {}

    def start(self, settings: dict[str, Any]) -> None:
        """Draw the table at the lower end of the terminal."""
        self.dashboard = Dashboard(settings)
        stdout = sys.stdout
        stderr = sys.stderr
        self.live = Live(
            self.dashboard,
            console=self.terminal,
            refresh_per_second=self.refresh_per_second,
            redirect_stderr=stderr.isatty(),  # errors redirected to a file must still go there
            vertical_overflow="crop",
        )
        self.live.start(refresh=True)
        # rich has replaced the streams, until the table is closed.
        if sys.stdout is not stdout:
            sys.stdout = PrintableStream(sys.stdout)
        if sys.stderr is not stderr:
            sys.stderr = PrintableStream(sys.stderr)
        # Log handlers hold the original streams, and would write into the table.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (stdout, stderr):
                self.redirected[handler] = handler.stream
                handler.setStream(sys.stderr if handler.stream is stderr else sys.stdout)

    def write(self, row: dict[str, Any]) -> None:
        """Show these numbers from the next redraw on."""
        self.dashboard.add(row)

    def close(self) -> None:
        """Draw a last time and release the terminal; a table with content stays on the screen."""
        for handler, stream in self.redirected.items():
            handler.setStream(stream)
        if self.live is not None:
            self.dashboard.running = False
            self.live.transient = not self.dashboard.tracker.rows
            self.live.stop()

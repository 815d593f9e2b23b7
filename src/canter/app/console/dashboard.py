"""The picture of a running training: how far, how well, how fast.

A live table on the terminal.
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
from rich.console import Console as Terminal
from rich.live import Live
from rich.segment import Segment

from canter.algorithms.base import Headline, declared_under
from canter.app.console.text import PrintableStream, duration, number, percent, printable, terminal_stream
from canter.training.progress import PARTS

PACE_ITERATIONS = 50
UNDECLARED = 4
"""Metrics to show of an algorithm that does not say which."""


class Pace:
    """How far a run is, how fast it goes, what takes the time (means over the last rows), and what counts in it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.total_steps: int | None = settings.get("total_steps")
        until = settings.get("until", {})
        budgets = {"env_steps": self.total_steps, "iteration": until.get("iterations"), "seconds": until.get("seconds")}
        self.budgets = {name: budget for name, budget in budgets.items() if budget is not None}
        """What ends the run at the latest, by the column of a row that counts it."""
        self.rows: deque[dict[str, Any]] = deque(maxlen=PACE_ITERATIONS)
        self.by_average = settings.get("checkpoints", {}).get("best_by") == "lta"
        """Whether the best policy of the run is the one with the best long-run average."""
        success = settings.get("success") or {}
        self.success = "success" if any(value is not None for value in success.values()) else "terminated"
        """What the rate of successes is called: by what it is where nobody has said what a success is."""
        self.recent: int = settings.get("recent_episodes", 100)
        """Episodes that means are over."""
        self.learning: dict[str, Any] = settings.get("algorithm") or {}
        """The settings of the algorithm."""
        self.declared = declared_under(self.learning.get("kind"))

    def headlines(self, row: dict[str, Any]) -> tuple[Headline, ...]:
        """The metrics to show of a row: those that the algorithm declares, or else the first few that it reports."""
        if self.declared.headlines:
            return self.declared.headlines
        own = [name for name in row if "/" in name and not name.startswith(("time/", "lta/", "self_play/"))]
        names = own[:UNDECLARED]
        return tuple(Headline(metric=name, label=name, topic="metrics", line=name, block=name) for name in names)

    def progress(self, row: dict[str, Any]) -> float:
        """Fraction of the run that is done, at most 1; 0 where it is not known how long it will be."""
        return min(max((row[name] / budget for name, budget in self.budgets.items()), default=0.0), 1.0)

    @property
    def steps_per_second(self) -> float:
        """Transitions per second."""
        rows = list(self.rows)
        return sum(row["rollout_steps"] for row in rows) / max(sum(_seconds(rows).values()), 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Until a budget is used up, at this speed; None where there is none."""
        row, steps = self.rows[-1], self.steps_per_second
        iterations = steps * row["iteration"] / max(row["env_steps"], 1)
        speeds = {"env_steps": steps, "iteration": iterations, "seconds": 1.0}
        left = [max(budget - row[name], 0) / max(speeds[name], 1e-9) for name, budget in self.budgets.items()]
        return min(left, default=None)

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the time by part."""
        seconds = _seconds(list(self.rows))
        total = max(sum(seconds.values()), 1e-9)
        return {part: spent / total for part, spent in seconds.items()}


def _seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {part: sum(row[f"time/{part}"] for row in rows) for part in PARTS}


def reported(row: dict[str, Any]) -> dict[str, str]:
    """What the environment itself reported, by name."""
    return {name.removeprefix("env/"): number(value) for name, value in row.items() if name.startswith("env/")}


def long_run(row: dict[str, Any]) -> str:
    """The reward per unit of time in words, `-` before there is one."""
    return "-" if "lta/mean" not in row else f"{number(row['lta/mean'])} ± {number(row['lta/ci'])}"


def name_of(headline: Headline, row: dict[str, Any]) -> str | None:
    """The name of a metric in a row, or of the first that begins with it; None where it has none."""
    return next((name for name in row if f"{name}/".startswith(f"{headline.metric}/")), None)


def shown(headline: Headline, row: dict[str, Any]) -> str:
    """The value of a metric, or of the first whose name begins with it; a hyphen for none."""
    value = row.get(name_of(headline, row) or "")
    return percent(value) if headline.percent else number(value)


MAX_WIDTH = 120
CELL_WIDTH, GAP = 22, 3
"""Columns that a label and its value need, and between two of them."""
TOPIC_LINES, LABEL_WIDTH = 4, 12
MARGIN = 10
"""Columns for the labels on the left of a chart."""
BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_POINTS, CHART_HEIGHT = 480, 3
COUNTERS = ("rollouts", "resets", "updates", "minibatch_updates", "train_steps")
COLOURS = {"env": "cyan", "policy": "magenta", "update": "yellow", "other": "bright_black"}
STRONG, DIM, RULE = "bold", "dim", "bright_black"

Line = list[tuple[str, str]]
"""Pieces of text with their styles."""
Topic = dict[str, str]
"""Labels and values that belong together."""


class Dashboard:
    """Draws the latest row of a run, for any width."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.title = f"Canter · {settings.get('env', {}).get('id', 'training')} · seed {settings.get('seed', '-')}"
        self.pace = Pace(settings)
        self.curve: dict[int, float] = {}
        self.seen = time.perf_counter()
        self.running = True

    def add(self, row: dict[str, Any]) -> None:
        """Take the row of another iteration."""
        self.seen = time.perf_counter()
        height = row.get("lta/mean") if self.pace.by_average else row["return"]
        if height is not None:
            self.curve[int(self.pace.progress(row) * (CHART_POINTS - 1))] = height
        self.pace.rows.append(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Segments rather than rich's own panels and tables, which take several times as long to draw."""
        width = min(options.max_width, MAX_WIDTH)
        for line in self.lines(width):
            pieces = [Segment(printable(text), console.get_style(style)) for text, style in line]
            yield from Segment.adjust_line_length(pieces, width)
            yield Segment.line()

    def lines(self, width: int) -> Iterator[Line]:
        """All of it, line by line."""
        hint = " Ctrl-C stops after this iteration " if self.running and width >= 50 else ""
        content = self.content(max(width - 4, CELL_WIDTH)) if self.pace.rows else [[("the first rollout ...", DIM)]]
        yield [("── ", RULE), (self.title, STRONG), (" " + "─" * width, RULE)]
        yield []
        yield from ([("  ", ""), *line] for line in content)
        yield []
        yield [("─" * (width - len(hint) - 2), RULE), (hint, DIM), ("──", RULE)]

    def content(self, width: int) -> Iterator[Line]:
        """What is between the rules."""
        row = self.pace.rows[-1]
        progress, inner = self.pace.progress(row), width - 6
        done = int(progress * inner)
        yield [("━" * done, "green"), ("━" * (inner - done), RULE), (f"{progress:6.0%}", STRONG)]
        yield from self.clock(row, width)
        yield []
        curve = dict(self.curve)  # a copy: another thread adds to it
        yield from chart("reward/t" if self.pace.by_average else "return", curve, progress, width)
        yield []
        if self.pace.by_average:
            words, average, tail = "reward per unit of time ", long_run(row), ", the last 20 rollouts"
            fits = len(words + average + tail) <= width
            yield [(words, DIM), (average, STRONG), (tail if fits else "", DIM)]
            yield []
        yield from grid(topics(row, self.pace), width)
        yield []
        yield from shares(self.pace.shares, width)

    def clock(self, row: dict[str, Any], width: int) -> Iterator[Line]:
        """Steps and speed on the left, time on the right; one above the other where it is narrow."""
        since = time.perf_counter() - self.seen if self.running else 0.0
        left, total = self.pace.seconds_left, self.pace.total_steps
        left = None if left is None else max(left - since, 0)
        of = "" if total is None else f" of {total:,}"
        steps = f"{row['env_steps']:,}{of} steps · {self.pace.steps_per_second:,.0f} steps/s"
        times = f"{duration(row['seconds'] + since)} gone · {duration(left)} left"
        if len(steps) + len(times) < width:
            yield [(steps + times.rjust(width - len(steps)), "")]
        else:
            yield from ([(steps, "")], [(times, "")])


def topics(row: dict[str, Any], pace: Pace) -> dict[str, Topic]:
    """The numbers to show: of episodes, of the algorithm, and counters."""
    about_algorithm: dict[str, Topic] = {}
    declared = [line for line in pace.headlines(row) if line.topic]
    # Before the first update there is none of them; after it those that are missing will stay so.
    for headline in [line for line in declared if name_of(line, row)] or declared:
        about_algorithm.setdefault(headline.topic, {})[headline.label] = shown(headline, row)
    minibatches = pace.learning.get("num_minibatches")  # where the algorithm has them, epochs are known
    return {
        f"episodes (last {pace.recent})": {
            "return": number(row["return"]),
            "length": number(row["length"]),
            "success rate" if pace.success == "success" else pace.success: percent(row["success_rate"]),
            "in all": f"{row['episodes']:,}",
        },
        **about_algorithm,
        **environment(row),
        "so far": {
            **{name.replace("_", " "): f"{row[name]:,}" for name in COUNTERS},
            **({"epochs": f"{row['minibatch_updates'] / minibatches:,.6g}"} if minibatches else {}),
        },
    }


def environment(row: dict[str, Any]) -> dict[str, Topic]:
    """The first numbers that the environment reports, as many as the other topics have; nothing where it has none."""
    # The end of a long name tells more than its beginning.
    found = {name[-LABEL_WIDTH:]: text for name, text in list(reported(row).items())[:TOPIC_LINES]}
    blanks = {" " * i: "" for i in range(TOPIC_LINES - len(found))}
    return {"environment": found | blanks} if found else {}


def chart(label: str, curve: dict[int, float], progress: float, width: int) -> Iterator[Line]:
    """A value over the course of the run, from its lowest to its highest."""
    inner = width - MARGIN
    low, high = min(curve.values(), default=0.0), max(curve.values(), default=0.0)
    columns = {point * inner // CHART_POINTS: value for point, value in sorted(curve.items())}
    levels, level = [], 0
    for column in range(min(int(progress * inner) + 1, inner)):
        if column in columns:
            level = 1 + round((columns[column] - low) / max(high - low, 1e-9) * (CHART_HEIGHT * 8 - 1))
        levels.append(level)
    labels = [number(high), *[""] * (CHART_HEIGHT - 2), number(low)] if curve else [""] * CHART_HEIGHT
    labels[CHART_HEIGHT // 2] = label
    for i, text in enumerate(labels):
        floor = 8 * (CHART_HEIGHT - 1 - i)
        blocks = "".join(BLOCKS[min(max(level - floor, 0), 8)] for level in levels)
        yield [(f"{text:<{MARGIN}}", DIM), (blocks, "green")]


def grid(topics: dict[str, Topic], width: int) -> Iterator[Line]:
    """As many topics side by side as fit; the last one only where there is room beside the others."""
    columns = max(1, min(len(topics), (width + GAP) // (CELL_WIDTH + GAP)))
    widths = [end - start for start, end in pairwise(i * (width + GAP) // columns for i in range(columns + 1))]
    shown = list(topics.items())[: max(columns, 3)]
    for first in range(0, len(shown), columns):
        together = list(zip(shown[first : first + columns], widths, strict=False))
        if first:
            yield []
        yield [(f"{title:<{room}}", "bold cyan") for (title, _), room in together]
        for cells in zip_longest(*(topic.items() for (_, topic), _ in together), fillvalue=("", "")):
            line: Line = []
            for (label, value), (_, room) in zip(cells, together, strict=True):
                line += [(label, DIM), (f"{value:>{max(room - GAP - len(label), 0)}}", STRONG), (" " * GAP, "")]
            yield line


def shares(fractions: dict[str, float], width: int) -> Iterator[Line]:
    """Where the time goes, as a bar and in words."""
    ends = [round(reached * (width - MARGIN)) for reached in accumulate(fractions.values())]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    bar = [("━" * length, COLOURS[part]) for part, length in zip(fractions, lengths, strict=True)]
    yield [(f"{'time':<{MARGIN}}", DIM), *bar]
    shown = {part: text for part, fraction in fractions.items() if (text := f"{fraction:.0%}") != "0%"}
    line: Line = []
    for part, text in shown.items():
        words = f"{part} {text}"
        if line and MARGIN + sum(len(piece) for piece, _ in line) + len(words) + 2 > width:
            yield [(" " * MARGIN, ""), *line]
            line = []
        line += [("━ ", COLOURS[part]), (f"{words}   ", DIM)]
    yield [(" " * MARGIN, ""), *line]


class LiveConsole:
    """One table that is drawn anew in place; whatever is printed or logged meanwhile appears above it."""

    def __init__(self, terminal: Terminal | None = None, refresh_per_second: float = 4) -> None:
        self.terminal = terminal or Terminal(file=terminal_stream())
        self.refresh_per_second = refresh_per_second
        self.dashboard, self.live = Dashboard({}), None
        self.redirected: dict[logging.StreamHandler[Any], Any] = {}

    def start(self, settings: dict[str, Any]) -> None:
        """Take over the lower end of the terminal."""
        self.dashboard = Dashboard(settings)
        streams = (sys.stdout, sys.stderr)
        self.live = Live(
            self.dashboard,
            console=self.terminal,
            refresh_per_second=self.refresh_per_second,
            redirect_stderr=sys.stderr.isatty(),  # errors that go to a file still should
            vertical_overflow="crop",
        )
        self.live.start(refresh=True)
        if sys.stdout is not streams[0]:
            sys.stdout = PrintableStream(sys.stdout)  # until the table gives the terminal back
        if sys.stderr is not streams[1]:
            sys.stderr = PrintableStream(sys.stderr)
        # These hold the stream from before it was redirected, and would write into the table.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                self.redirected[handler] = handler.stream
                handler.setStream(sys.stderr if handler.stream is streams[1] else sys.stdout)

    def write(self, row: dict[str, Any]) -> None:
        """Show these numbers from the next drawing on."""
        self.dashboard.add(row)

    def close(self) -> None:
        """Draw a last time and give the terminal back; a table with something in it stays to be read."""
        for handler, stream in self.redirected.items():
            handler.setStream(stream)
        if self.live is not None:
            self.dashboard.running = False
            self.live.transient = not self.dashboard.pace.rows
            self.live.stop()

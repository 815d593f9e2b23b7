"""The picture of a running training: how far, how well, how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from canter.console.figures import Pace, duration, long_run, name_of, number, percent, reported, shown
from canter.console.printable import printable

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

"""Consoles of a run: a live table on a terminal, single lines elsewhere, or whole blocks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from canter.app.console.dashboard import (
    LiveConsole,
    ProgressTracker,
    format_custom_metrics,
    format_env_metrics,
    format_long_run_average,
    format_metric,
)
from canter.app.console.text import format_clock, format_number, format_percent
from canter.runs.writers import MetricWriter
from canter.training.progress import PARTS

ConsoleKind = Literal["auto", "live", "lines", "verbose", "quiet"]

LINE_SECONDS = 5.0
"""Seconds between two lines of `LineConsole`."""
MAX_CUSTOM = 4
"""Metrics of callbacks on a line."""


def make_console(kind: ConsoleKind = "auto") -> MetricWriter:
    """Return a console of that kind; `auto` is a live table on a terminal and lines elsewhere."""
    if kind == "auto":
        kind = "live" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "lines"
    return CONSOLES[kind]()


class QuietConsole:
    """Prints nothing; the base of the other consoles."""

    def __init__(self) -> None:
        self.tracker = ProgressTracker({})

    def start(self, settings: dict[str, Any]) -> None:
        """Read the length of the run and the metrics to show from its settings."""
        self.tracker = ProgressTracker(settings)

    def write(self, row: dict[str, Any]) -> None:
        """Print nothing."""

    def close(self) -> None:
        """Print nothing."""


class LineConsole(QuietConsole):
    """Prints a line every few seconds, and always for the first and the last iteration.

    For log files and batch systems.
    """

    def __init__(self, every: float = LINE_SECONDS) -> None:
        super().__init__()
        self.every = every
        self.printed_at = float("-inf")
        self.pending = False

    def write(self, row: dict[str, Any]) -> None:
        """Print a line if the last one is old enough."""
        self.tracker.rows.append(row)
        self.pending = True
        if time.perf_counter() - self.printed_at >= self.every:
            self._print()

    def close(self) -> None:
        """Print the last iteration if that has not happened."""
        if self.pending:
            self._print()

    def _print(self) -> None:
        row = self.tracker.rows[-1]
        metrics = [f"{line.line} {format_metric(line, row)}" for line in self.tracker.headlines(row) if line.line]
        metrics += [f"{name} {text}" for name, text in list(format_custom_metrics(row).items())[:MAX_CUSTOM]]
        steps = f"{row['env_steps']:>11,} steps"
        speed = f"{self.tracker.steps_per_second:,.0f} steps/s"
        remaining = f"{format_clock(self.tracker.seconds_left)} left"
        print("  ".join([steps, self._episodes(row), *metrics, speed, remaining]), flush=True)
        self.printed_at = time.perf_counter()
        self.pending = False

    def _episodes(self, row: dict[str, Any]) -> str:
        if self.tracker.by_average:
            text = f"reward per time {format_long_run_average(row)}"
        elif row["return"] is None:
            text = "no episode has ended yet"
        else:
            success = f"{self.tracker.success} {format_percent(self.tracker.rate(row))}"
            text = f"return {format_number(row['return'])}  length {format_number(row['length'])}  {success}"
        if row.get("eval/return") is not None:
            text += f"  evaluation {format_number(row['eval/return'])}"
        return text


class VerboseConsole(QuietConsole):
    """Prints a block of three parts for every row, and more for metrics of the environment and of callbacks."""

    def write(self, row: dict[str, Any]) -> None:
        """Print a block."""
        lines = [f"------ rollout {row['rollouts']:,} ".ljust(44, "-")]
        for title, entries in self.block(row).items():
            lines.append(title)
            lines += [f"  {name:<20}{text:>22}" for name, text in entries.items()]
        print("\n".join(lines), flush=True)

    def block(self, row: dict[str, Any]) -> dict[str, dict[str, str]]:
        """Return the parts of a block: title -> name -> value."""
        parts = {
            "rollout statistics": self._rollout(row),
            f"recent {min(row['episodes'], self.tracker.recent)} episodes": {
                "mean_ep_len": format_number(row["length"]),
                "mean_ep_return": format_number(row["return"]),
                f"{self.tracker.success}_rate": format_percent(self.tracker.rate(row)),
            },
            "trainer statistics": self._trainer(row),
        }
        more = {"environment": format_env_metrics(row), "callbacks": format_custom_metrics(row)}
        return parts | {title: entries for title, entries in more.items() if entries}

    def _rollout(self, row: dict[str, Any]) -> dict[str, str]:
        entries = {
            "mean_ep_len": format_number(row["rollout_length"]),
            "mean_ep_return": format_number(row["rollout_return"]),
            "mean_reward": format_number(row["rollout_reward"]),
        }
        if self.tracker.by_average:
            entries["long_run_average"] = format_long_run_average(row)
        for headline in self.tracker.headlines(row):
            if headline.block:
                entries[headline.block] = format_number(row.get(headline.metric))
        entries["rollout_len"] = f"{row['rollout_steps']:,}"
        entries["time_elapsed"] = f"{sum(row[f'time/{part}'] for part in PARTS):,.2f}s"
        return entries

    def _trainer(self, row: dict[str, Any]) -> dict[str, str]:
        total_steps = self.tracker.total_steps
        entries = {
            "episodes_count": f"{row['episodes']:,}",
            "timesteps_count": f"{row['env_steps']:,}",
            "rollouts_count": f"{row['rollouts']:,}",
            "total_timesteps": "-" if total_steps is None else f"{total_steps:,}",
        }
        for name, key in self.tracker.report_spec.settings.items():
            entries[name] = format_number(self.tracker.algorithm.get(key))
        return entries


CONSOLES: dict[str, Callable[[], MetricWriter]] = {
    "live": LiveConsole,
    "lines": LineConsole,
    "verbose": VerboseConsole,
    "quiet": QuietConsole,
}
"""Kinds of consoles by name, except `auto`."""

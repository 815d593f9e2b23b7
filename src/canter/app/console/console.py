"""How a run reports while it trains: a live table on a terminal, lines elsewhere, or whole blocks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from canter.app.console.dashboard import LiveConsole, Pace, long_run, reported, shown
from canter.app.console.text import duration, number, percent
from canter.runs.metrics import MetricWriter
from canter.training.progress import PARTS

ConsoleKind = Literal["auto", "live", "lines", "verbose", "quiet"]

LINE_SECONDS = 5.0


def make_console(kind: ConsoleKind = "auto") -> MetricWriter:
    """The console of that kind; `auto` is a live table on a terminal and lines elsewhere."""
    if kind == "auto":
        kind = "live" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "lines"
    return CONSOLES[kind]()


class QuietConsole:
    """Says nothing; other consoles say more."""

    def __init__(self) -> None:
        self.pace = Pace({})

    def start(self, settings: dict[str, Any]) -> None:
        """Learn how long the run is to be, and what counts in it."""
        self.pace = Pace(settings)

    def write(self, row: dict[str, Any]) -> None:
        """Nothing to say."""

    def close(self) -> None:
        """Nothing is held back."""


class LineConsole(QuietConsole):
    """One line every few seconds, the first and the last iteration always; for log files and batch systems."""

    def __init__(self, every: float = LINE_SECONDS) -> None:
        super().__init__()
        self.every, self.printed, self.waiting = every, float("-inf"), False

    def write(self, row: dict[str, Any]) -> None:
        """Print a line if it is time for one."""
        self.pace.rows.append(row)
        self.waiting = True
        if time.perf_counter() - self.printed >= self.every:
            self._print()

    def close(self) -> None:
        """Print the last iteration, if it was not."""
        if self.waiting:
            self._print()

    def _print(self) -> None:
        row = self.pace.rows[-1]
        episodes = "no episode has ended yet"
        if self.pace.by_average:
            episodes = f"reward per time {long_run(row)}"
        elif row["return"] is not None:
            episodes = f"return {number(row['return'])}  length {number(row['length'])}"
            episodes += f"  {self.pace.success} {percent(row['success_rate'])}"
        if row.get("eval/return") is not None:
            episodes += f"  evaluation {number(row['eval/return'])}"
        metrics = [f"{line.line} {shown(line, row)}" for line in self.pace.headlines(row) if line.line]
        speed = f"{self.pace.steps_per_second:,.0f} steps/s  {duration(self.pace.seconds_left)} left"
        print("  ".join([f"{row['env_steps']:>11,} steps", episodes, *metrics, speed]), flush=True)
        self.printed, self.waiting = time.perf_counter(), False


class VerboseConsole(QuietConsole):
    """A whole block for every row, in three parts, and a fourth for what the environment reports."""

    def write(self, row: dict[str, Any]) -> None:
        """Print a block."""
        lines = [f"------ rollout {row['rollouts']:,} ".ljust(44, "-")]
        for title, entries in self.block(row).items():
            lines += [title, *(f"  {name:<20}{text:>22}" for name, text in entries.items())]
        print("\n".join(lines), flush=True)

    def block(self, row: dict[str, Any]) -> dict[str, dict[str, str]]:
        """The parts: title -> name -> value."""
        total_steps, chosen = self.pace.total_steps, self.pace.declared.settings
        which = "" if self.pace.success == "success" else " (success: terminated)"
        return {
            "rollout statistics": {
                "mean_ep_len": number(row["rollout_length"]),
                "mean_ep_return": number(row["rollout_return"]),
                "mean_reward": number(row["rollout_reward"]),
                **({"long_run_average": long_run(row)} if self.pace.by_average else {}),
                **{line.block: number(row.get(line.metric)) for line in self.pace.headlines(row) if line.block},
                "rollout_len": f"{row['rollout_steps']:,}",
                "time_elapsed": f"{sum(row[f'time/{part}'] for part in PARTS):,.2f}s",
            },
            f"recent {min(row['episodes'], self.pace.recent)} episodes{which}": {
                "mean_ep_len": number(row["length"]),
                "mean_ep_return": number(row["return"]),
                "success_rate": percent(row["success_rate"]),
            },
            "trainer statistics": {
                "episodes_count": f"{row['episodes']:,}",
                "timesteps_count": f"{row['env_steps']:,}",
                "rollouts_count": f"{row['rollouts']:,}",
                "total_timesteps": "-" if total_steps is None else f"{total_steps:,}",
                **{name: number(self.pace.learning.get(key)) for name, key in chosen.items()},
            },
            **({"environment": entries} if (entries := reported(row)) else {}),
        }


CONSOLES: dict[str, Callable[[], MetricWriter]] = {
    "live": LiveConsole,
    "lines": LineConsole,
    "verbose": VerboseConsole,
    "quiet": QuietConsole,
}
"""Kinds of consoles by name, besides `auto`."""

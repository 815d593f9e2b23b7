"""`canter tune`: a search of settings, or a population with `--pbt`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from canter.app.cli.commands import COMMANDS
from canter.app.cli.parser import SPACE, UsageError, flag_of
from canter.app.cli.process import exit_on_sigterm
from canter.app.cli.settings import import_settings, is_foreign_file, merged_config
from canter.app.console.text import printable, terminal_stream, two_columns
from canter.app.experiments.session import program
from canter.app.tuning.exploit import PbtConfig, imported_pbt
from canter.app.tuning.outcome import outcome_lines, progress_of
from canter.app.tuning.pbt import PLAN as POPULATION_PLAN
from canter.app.tuning.pbt import Population, open_population, population_lines, population_progress
from canter.app.tuning.runner import OnChange, Plan, run_plan
from canter.app.tuning.search import PLAN, Search, TuneConfig
from canter.app.tuning.space import Dimension, read_space
from canter.app.tuning.study import load_optuna
from canter.app.tuning.tune import (
    default_jobs,
    finish,
    finish_population,
    new_population,
    new_search,
    open_search,
)
from canter.core.distributed import cores

SHOWN_LINES = 8
"""Runs that ended last, in the live display of a search."""
PBT = "pbt."
"""Beginning of the flags of a population."""
SEARCH_FLAGS = ("trials", "budget", "objective", "seeds", "finalists", "final_seeds", "population")
Progress = Callable[[Any], dict[str, str]]


def tune_command(arguments: argparse.Namespace) -> None:
    """Search the settings of a task, or train a population."""
    places = [Path(arguments.env), arguments.run_dir / arguments.env]
    folder = next((path for path in places if (path / PLAN).is_file() or (path / POPULATION_PLAN).is_file()), None)
    if arguments.pbt or pbt_flags(arguments) or (folder is not None and (folder / POPULATION_PLAN).is_file()):
        pbt_command(arguments, folder)
        return
    load_optuna()
    search = new_search_of(arguments) if folder is None else continued(folder, arguments)
    arguments.jobs = arguments.jobs or default_jobs(search)
    together = f", {search.tune.population} trials side by side in a run" if search.tune.population else ""
    announce(f"Searching {search.config.env.id}{together}", search.folder, search.dimensions, search.names, arguments)
    run_or_stop(search, arguments, progress_of)
    result = finish(search)
    print("\n".join(outcome_lines(search, result.outcome)))
    env = shlex.quote(search.config.env.id)
    print(f"The report is in {result.report}")
    print(f"To train with the best settings: {program()} train {env} --config {shlex.quote(str(result.best))}")


def announce(
    what: str, folder: Path, dimensions: list[Dimension], names: dict[str, str], arguments: argparse.Namespace
) -> None:
    """Print the first lines of a search or a population."""
    ranges = {names[part.key]: part.spec for part in dimensions}
    print(f"{what}, {arguments.jobs} runs at a time, in {folder}\n{two_columns(ranges)}", flush=True)


def run_or_stop(plan: Plan, arguments: argparse.Namespace, progress: Progress) -> None:
    """Carry out a plan; at Ctrl-C say how it continues."""
    try:
        with exit_on_sigterm(), plan_display(progress) as on_change:
            run_plan(plan, arguments.jobs, on_change)
    except KeyboardInterrupt:
        print(f"canter: stopped; go on with: {program()} tune {shlex.quote(str(plan.folder))}", file=sys.stderr)
        sys.exit(130)


def pbt_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the flags `--pbt.NAME` that are given, by name."""
    given = {name.removeprefix(PBT): value for name, value in vars(arguments).items() if name.startswith(PBT)}
    return {name: value for name, value in given.items() if value is not None}


def pbt_command(arguments: argparse.Namespace, folder: Path | None) -> None:
    """Train a population, or continue one."""
    if folder is None:
        population = new_population_of(arguments)
    else:
        refuse_changes(arguments, folder, {"--jobs", "--run-dir", "--pbt"})
        population = open_population(folder)
    arguments.jobs = arguments.jobs or cores()
    what = f"Training {population.pbt.members} members on {population.config.env.id}"
    announce(what, population.folder, population.dimensions, population.names, arguments)
    run_or_stop(population, arguments, population_progress)
    result = finish_population(population)
    print("\n".join(population_lines(result.outcome, population.names)))
    print(f"The report is in {result.report}, the last settings of the best member in {result.best}")
    print(f"Its policy: {program()} play {shlex.quote(str(population.folder / result.outcome.winner))} --policy final")


def new_population_of(arguments: argparse.Namespace) -> Population:
    """Return a new population; settings of an imported file come before those of flags."""
    if foreign := next((name for name in SEARCH_FLAGS if getattr(arguments, name) is not None), None):
        raise UsageError(f"{flag_of(foreign)} is of a search, and --pbt trains one population")
    specs = take_space(arguments)
    config, _ = merged_config(arguments)
    given: dict[str, Any] = {}
    if arguments.config is not None and is_foreign_file(arguments.config):
        imported = import_settings(arguments, arguments.config, config.env.id, config.env.num_envs)
        if imported.population is not None:
            given = imported_pbt(imported.population, config)
    given["space"] = given.get("space", {}) | specs if given else specs
    return new_population(PbtConfig(**{**given, **pbt_flags(arguments)}), config, arguments.run_dir, arguments.name)


def take_space(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the ranges of the file and of the flags, which win; remove them from the settings."""
    texts = arguments.settings
    specs = {} if arguments.space is None else read_space(arguments.space)
    specs |= {key.removeprefix(SPACE): given[-1] for key, given in texts.items() if key.startswith(SPACE)}
    arguments.settings = {key: given for key, given in texts.items() if not key.startswith(SPACE)}
    return specs


def new_search_of(arguments: argparse.Namespace) -> Search:
    """Return a new search."""
    specs = take_space(arguments)
    given = {name: value for name in SEARCH_FLAGS if (value := getattr(arguments, name)) is not None}
    config, _ = merged_config(arguments)
    return new_search(TuneConfig(**given, space=specs), config, arguments.run_dir, arguments.name)


def continued(folder: Path, arguments: argparse.Namespace) -> Search:
    """Return the search of a folder; refuse flags that would change its trials."""
    refuse_changes(arguments, folder, {"--trials", "--budget", "--jobs", "--run-dir"})
    return open_search(folder, trials=arguments.trials, budget=arguments.budget)


def refuse_changes(arguments: argparse.Namespace, folder: Path, allowed: set[str]) -> None:
    """Raise UsageError for a flag that would change what continues in a folder."""
    flags = [argument for argument in COMMANDS["tune"].arguments if argument.is_flag and argument.name not in allowed]
    given = [flag.name for flag in flags if vars(arguments)[flag.attribute] not in (None, False)]
    given += [flag_of(key) for key in arguments.settings]
    if given:
        names = ", ".join(sorted(allowed - {"--run-dir", "--pbt"}))
        raise UsageError(f"{given[0]} cannot change when {folder} continues; only {names} can")


@contextmanager
def plan_display(progress: Progress) -> Iterator[OnChange]:
    """Return a function that shows progress: a live table, or a line for each run that ends."""
    console = Console(file=terminal_stream())
    lines: deque[str] = deque(maxlen=SHOWN_LINES)

    def print_line(plan: Any, line: str | None) -> None:
        if line is not None:
            print(f"{line}; {'; '.join(progress(plan).values())}", flush=True)

    if not console.is_terminal:
        yield print_line
        return
    with Live(console=console, refresh_per_second=2) as live:

        def update(plan: Any, line: str | None) -> None:
            lines.extend([] if line is None else [line])
            table = Table.grid(padding=(0, 2))
            for name, text in progress(plan).items():
                table.add_row(name, printable(text))
            for text in lines:
                table.add_row("", printable(text), style="dim")
            live.update(table)

        yield update

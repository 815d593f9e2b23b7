"""`canter sweep` and `canter tune`: plans of many runs."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_origin

from rich.console import Console
from rich.live import Live
from rich.table import Table

from canter.app.check.before_run import check_machine
from canter.app.cli.commands import COMMANDS, parse_arguments
from canter.app.cli.parser import SPACE, UsageError, flag_of, hyphenated
from canter.app.cli.process import exit_on_sigterm
from canter.app.cli.settings import import_settings, is_foreign_file, merged_config, setting_hints
from canter.app.console.text import printable, terminal_stream, two_columns
from canter.app.experiments.folders import check_task, new_plan_folder
from canter.app.experiments.plans import Commands, OnChange, Plan, Sweep, combinations, run_plan
from canter.app.experiments.session import program
from canter.app.report import write_report
from canter.app.report.differences import comparison_lines
from canter.app.tuning.exploit import PbtConfig, imported_pbt
from canter.app.tuning.plan import TunePlan
from canter.app.tuning.search import TuneConfig
from canter.app.tuning.space import read_space
from canter.app.tuning.tune import CHANGEABLE, PlanConfig, default_jobs, find_plan, finish, new_plan, open_plan
from canter.core.distributed import cores
from canter.core.hints import is_free, without_none
from canter.core.storage.lock import folder_mutex
from canter.envs.imports import allowed_imports
from canter.runs.metrics import METRICS
from canter.runs.records import SWEEP

MAX_RANGE = 100_000
"""Values of a range such as 0..4 at most."""
PBT = "pbt."
"""Beginning of the flags of a population."""
SEARCH_FLAGS = ("trials", "budget", "objective", "seeds", "finalists", "final_seeds", "population")
SHOWN_LINES = 8
"""Runs that ended last, in the live display of a plan."""


def sweep_command(arguments: argparse.Namespace) -> None:
    """Train many runs: seeds, and settings with several values."""
    places = [] if arguments.env is None else [Path(arguments.env), arguments.run_dir / arguments.env]
    existing = next((path for path in places if (path / SWEEP).is_file()), None)
    if existing is None:
        commands = new_sweep(arguments)
    else:
        refuse_changes("sweep", arguments, existing, {"--jobs", "--print-commands"})
        commands = Commands.read(existing)
    if arguments.print_commands:
        for name in commands.runs:
            print(shlex.join([*shlex.split(program()), *commands.arguments(name)]))
        return
    sweep = Sweep(commands)
    jobs = arguments.jobs or cores()
    print(f"{len(commands.runs)} runs, {jobs} at a time, in {sweep.folder}", flush=True)
    run_or_stop(sweep, jobs, "sweep")
    folders = [sweep.folder / name for name in commands.runs]
    with_metrics = [folder for folder in folders if (folder / METRICS).is_file()]
    if with_metrics:
        print("\n".join(comparison_lines(with_metrics)))
        with folder_mutex(sweep.folder):  # other processes may end at the same moment
            report = write_report(with_metrics, sweep.folder / "report.html")
        print(f"The report is in {report}")
    if sweep.failed:
        logs = ", ".join(str(sweep.folder / f"{name}.log") for name in sweep.failed)
        print(f"canter: {len(sweep.failed)} of {len(commands.runs)} runs failed; see {logs}", file=sys.stderr)
        sys.exit(1)


def new_sweep(arguments: argparse.Namespace) -> Commands:
    """Return the requested runs; check every combination of settings before any run starts."""
    varied = {
        hyphenated(key): [value for text in texts for value in values_of(text, key)]
        for key, texts in arguments.settings.items()
    }
    runs = combinations(varied)
    common = [] if arguments.env is None else [arguments.env]
    for flag in ("preset", "config"):
        if getattr(arguments, flag) is not None:
            common.append(f"--{flag}={getattr(arguments, flag)}")
    for flags in runs.values():
        config, _ = merged_config(parse_arguments("train", [*common, *flags]))
        check_task(config.env.id, "sweep")
        check_machine(config)
    permissions = [f"--allow-import={module}" for module in allowed_imports()]
    base = [*permissions, "train", *common]
    if arguments.print_commands:
        return Commands(arguments.run_dir / (arguments.name or "sweep"), base, runs)
    commands = Commands(new_plan_folder(arguments.run_dir, arguments.env or "runs", arguments.name), base, runs)
    commands.write()
    return commands


def values_of(text: str, key: str) -> list[str]:
    """Return `0..4` as five values and `a,b` as two; the text of a list setting is one value."""
    hint = without_none(setting_hints().get(key, str))
    if get_origin(hint) is tuple or is_free(hint):
        return [text]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if bounds is None:
        return [value.strip() for value in text.split(",")]
    first = int(bounds[1])
    last = int(bounds[2])
    if last < first or last - first > MAX_RANGE:
        raise UsageError(f"--{key} {text}: expected a range such as 0..4")
    return [str(value) for value in range(first, last + 1)]


def tune_command(arguments: argparse.Namespace) -> None:
    """Search the settings of a task, or train a population."""
    folder = find_plan(arguments.env, arguments.run_dir)
    plan = new_plan_of(arguments) if folder is None else continued(folder, arguments)
    arguments.jobs = arguments.jobs or default_jobs(plan)
    ranges = {plan.names[part.key]: part.spec for part in plan.dimensions}
    at_a_time = f"{arguments.jobs} runs at a time, in {plan.folder}"
    print(f"{plan.title}, {at_a_time}\n{two_columns(ranges)}", flush=True)
    run_or_stop(plan, arguments.jobs, "tune")
    result = finish(plan)
    print("\n".join(plan.lines(result.outcome)))
    print(f"The report is in {result.report}")
    if result.run is not None:
        print(f"The last settings of the best member are in {result.best}")
        print(f"Its policy: {program()} play {shlex.quote(str(result.run))} --policy final")
        return
    env = shlex.quote(plan.config.env.id)
    print(f"To train with the best settings: {program()} train {env} --config {shlex.quote(str(result.best))}")


def new_plan_of(arguments: argparse.Namespace) -> TunePlan:
    """Return a new plan; settings of an imported file come before those of flags."""
    specs = take_space(arguments)
    config, _ = merged_config(arguments)
    check_task(config.env.id, "search")
    given = {name: value for name in SEARCH_FLAGS if (value := getattr(arguments, name)) is not None}
    own = {name: value for name, value in vars(arguments).items() if name.startswith(PBT) and value is not None}
    flags = {name.removeprefix(PBT): value for name, value in own.items()}
    if not (arguments.pbt or flags):
        settings: PlanConfig = TuneConfig(**given, space=specs)
        return new_plan(settings, config, arguments.run_dir, arguments.name)
    if given:
        raise UsageError(f"{flag_of(next(iter(given)))} is of a search, and --pbt trains one population")
    imported: dict[str, Any] = {}
    if arguments.config is not None and is_foreign_file(arguments.config):
        population = import_settings(arguments, arguments.config, config.env.id, config.env.num_envs).population
        imported = {} if population is None else imported_pbt(population, config)
    settings = PbtConfig(**{**imported, "space": imported.get("space", {}) | specs, **flags})
    return new_plan(settings, config, arguments.run_dir, arguments.name)


def take_space(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the ranges of the file and of the flags, which win; remove them from the settings."""
    texts = arguments.settings
    specs = {} if arguments.space is None else read_space(arguments.space)
    specs |= {key.removeprefix(SPACE): given[-1] for key, given in texts.items() if key.startswith(SPACE)}
    arguments.settings = {key: given for key, given in texts.items() if not key.startswith(SPACE)}
    return specs


def continued(folder: Path, arguments: argparse.Namespace) -> TunePlan:
    """Return the plan of a folder; refuse flags that would change what it has decided."""
    changes = {name: vars(arguments)[name] for name in CHANGEABLE if vars(arguments)[name] is not None}
    is_population = (folder / "pbt.json").is_file()
    allowed = {"--jobs"} | ({"--pbt"} if is_population else {flag_of(name) for name in CHANGEABLE})
    refuse_changes("tune", arguments, folder, allowed)
    return open_plan(folder, **changes)


def refuse_changes(command: str, arguments: argparse.Namespace, folder: Path, allowed: set[str]) -> None:
    """Raise UsageError for a flag that would change what continues in a folder."""
    flags = [flag for flag in COMMANDS[command].arguments if flag.is_flag and flag.name not in {*allowed, "--run-dir"}]
    given = [flag.name for flag in flags if flag.is_given(arguments)]
    given += [flag_of(key) for key in arguments.settings]
    if given:
        names = ", ".join(sorted(allowed - {"--pbt", "--print-commands"}))
        raise UsageError(f"{given[0]} cannot change when {folder} continues; only {names} can")


def run_or_stop(plan: Plan, jobs: int, command: str) -> None:
    """Carry out a plan and show how far it is; at Ctrl-C say how it continues."""
    try:
        with exit_on_sigterm(), plan_display() as on_change:
            run_plan(plan, jobs, on_change)
    except KeyboardInterrupt:
        print(f"canter: stopped; go on with: {program()} {command} {shlex.quote(str(plan.folder))}", file=sys.stderr)
        sys.exit(130)


@contextmanager
def plan_display() -> Iterator[OnChange]:
    """Return a function that shows progress: a live table, or a line for each run that ends."""
    console = Console(file=terminal_stream())
    lines: deque[str] = deque(maxlen=SHOWN_LINES)

    def print_line(plan: Plan, line: str | None) -> None:
        if line is not None:
            print(f"{line}; {'; '.join(plan.progress().values())}", flush=True)

    if not console.is_terminal:
        yield print_line
        return
    with Live(console=console, refresh_per_second=2) as live:

        def update(plan: Plan, line: str | None) -> None:
            lines.extend([] if line is None else [line])
            rows = Table.grid(padding=(0, 2))
            for name, text in plan.table().items():
                rows.add_row(name, printable(text))
            for text in lines:
                rows.add_row("", printable(text), style="dim")
            live.update(rows)

        yield update

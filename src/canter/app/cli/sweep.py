"""`canter sweep`: many runs that differ in seeds and settings."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_origin

from rich.console import Console
from rich.live import Live
from rich.table import Table

from canter.app.check.before_run import check_machine
from canter.app.cli.parser import Parser, UsageError, all_keys, given_settings
from canter.app.cli.train import add_settings_flags, merged_config, with_flags
from canter.app.cli.trained import count
from canter.app.cli.training import sigterm_unwinds
from canter.app.console.text import number, printable, terminal_stream
from canter.app.experiments.session import program
from canter.app.experiments.sweep import Progress, Sweep, carry_out_sweep, combinations, sweep_folder
from canter.app.report import write_report
from canter.core.distributed import cores
from canter.core.plain import is_free, without_none
from canter.envs.imports import allowed_imports
from canter.runs.records import METRICS, SWEEP

DESCRIPTION = """\
Train many runs on this machine, each in a process and a folder of its own, several at a time. Every setting may have
several values: `--seed 0..4` is a range, `--algorithm.gamma 0.98,0.99` a list, and a flag that is given twice has both
values, as a setting that is a list itself needs. All combinations are run.

`canter sweep FOLDER` goes on with a sweep: what is finished stays, what was interrupted goes on where it was."""


def sweep_command(argv: list[str]) -> None:
    """Train many runs: seeds, and settings with several values."""
    arguments = sweep_parser(argv).parse(argv)
    named = [] if arguments.env is None else [Path(arguments.env), arguments.run_dir / arguments.env]
    existing = next((path for path in named if (path / SWEEP).is_file()), None)
    sweep = new_sweep(arguments) if existing is None else Sweep.read(existing)
    if arguments.print_commands:
        for name in sweep.runs:
            print(shlex.join([*shlex.split(program()), *sweep.arguments(name)]))
        return
    sweep.folder.mkdir(parents=True, exist_ok=True)
    sweep.write()
    jobs = arguments.jobs or cores()
    print(f"{len(sweep.runs)} runs, {jobs} at a time, in {sweep.folder}", flush=True)
    try:
        with sigterm_unwinds(), shown(sweep) as on_change:
            progress = carry_out_sweep(sweep, jobs, on_change)
    except KeyboardInterrupt:
        print(f"canter: stopped; go on with: {program()} sweep {shlex.quote(str(sweep.folder))}", file=sys.stderr)
        sys.exit(130)
    with_metrics = [path for name in sweep.runs if (path := sweep.folder / name) and (path / METRICS).is_file()]
    if with_metrics:
        print(f"The report is in {write_report(with_metrics, sweep.folder / 'report.html')}")
    if progress.failed:
        logs = ", ".join(str(sweep.folder / f"{name}.log") for name in progress.failed)
        print(f"canter: {len(progress.failed)} of {len(sweep.runs)} runs failed; see {logs}", file=sys.stderr)
        sys.exit(1)


def sweep_parser(argv: list[str]) -> Parser:
    """The flags of `canter sweep`: those of `canter train`, with several values."""
    parser = Parser(
        "sweep",
        "ENV|FOLDER --KEY VALUES... [--jobs N] [--preset NAME] [--config FILE] [--name NAME] [--print-commands]",
        DESCRIPTION,
    )
    parser.add_argument("env", metavar="ENV", nargs="?", help="environment id, or the folder of a sweep to go on with")
    parser.flag("--jobs", "N", "runs at a time; by default one for each core", type=count)
    add_settings_flags(parser, argv, action="append")
    parser.run_dir("the sweep's folder goes")
    parser.flag("--name", "NAME", "name of that folder; by default environment and time")
    parser.switch("--print-commands", "print the command of each run, run nothing")
    return parser


def new_sweep(arguments: Any) -> Sweep:
    """The runs that the flags mean; every combination of settings is tried for sense before any of them begins."""
    varied = {
        key.replace("_", "-"): [value for text in texts for value in values_of(text, key)]
        for key, texts in given_settings(arguments).items()
    }
    runs = combinations(varied)
    base = [*(f"--allow-import={module}" for module in allowed_imports()), "train"]
    base += [] if arguments.env is None else [arguments.env]
    base += [f"--{key}={value}" for key in ("preset", "config") if (value := getattr(arguments, key)) is not None]
    for own in runs.values():
        config, _ = merged_config(with_flags(arguments, own))
        check_machine(config)
    parent, env_id = arguments.run_dir, arguments.env or "runs"
    if arguments.print_commands:
        return Sweep(parent / (arguments.name or "sweep"), base, runs)
    return Sweep(sweep_folder(parent, env_id, arguments.name), base, runs)


def values_of(text: str, key: str) -> list[str]:
    """`0..4` as five values and `a,b` as two; a setting that is a list takes its whole text as one."""
    hint = without_none(all_keys().get(key, str))
    if get_origin(hint) is tuple or is_free(hint):
        return [text]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if bounds is None:
        return [value.strip() for value in text.split(",")]
    first, last = int(bounds[1]), int(bounds[2])
    if last < first or last - first > 100_000:
        raise UsageError(f"--{key} {text}: expected a range such as 0..4")
    return [str(value) for value in range(first, last + 1)]


@contextmanager
def shown(sweep: Sweep) -> Iterator[Any]:
    """What tells how the sweep goes: a live table on a terminal, else a line for each run that ends."""
    console = Console(file=terminal_stream())
    if not console.is_terminal:
        yield lambda progress, ended: None if ended is None else print(line(progress, ended), flush=True)
        return
    with Live(console=console, refresh_per_second=2) as live:
        yield lambda progress, ended: live.update(table(progress))


def line(progress: Progress, name: str) -> str:
    """How a run has ended."""
    state, left = progress.state(name), sum(s["status"] != "finished" for s in progress.states())
    steps = "no" if state["steps"] is None else f"{state['steps']:,.0f}"
    numbers = f"{steps} steps, return {number(state['return'])}, score {number(state['score'])}"
    return f"{name}: {state['status']}, {numbers}; {left} of {len(progress.sweep.runs)} to go"


def table(progress: Progress) -> Table:
    """All runs."""
    drawn = Table("run", "status", box=None, pad_edge=False)
    for column in ("steps", "return", "score"):
        drawn.add_column(column, justify="right")
    for state in progress.states():
        steps = "-" if state["steps"] is None else f"{state['steps']:,.0f}"
        cells = (printable(state["name"]), state["status"], steps, number(state["return"]), number(state["score"]))
        drawn.add_row(*cells)
    return drawn

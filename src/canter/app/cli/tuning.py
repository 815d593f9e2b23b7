"""`canter tune`: a search of settings, or a population with `--pbt`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from canter.app.cli.commands import COMMANDS
from canter.app.cli.parser import SPACE, UsageError, flag_of
from canter.app.cli.process import run_or_stop
from canter.app.cli.settings import import_settings, is_foreign_file, merged_config
from canter.app.console.text import two_columns
from canter.app.experiments.session import program
from canter.app.tuning.exploit import PbtConfig, imported_pbt
from canter.app.tuning.plan import TunePlan
from canter.app.tuning.search import TuneConfig
from canter.app.tuning.space import read_space
from canter.app.tuning.tune import PlanConfig, default_jobs, new_plan, open_plan, plan_file

PBT = "pbt."
"""Beginning of the flags of a population."""
SEARCH_FLAGS = ("trials", "budget", "objective", "seeds", "finalists", "final_seeds", "population")
CHANGEABLE = ("trials", "budget")
"""Settings that may change when a search continues."""


def tune_command(arguments: argparse.Namespace) -> None:
    """Search the settings of a task, or train a population."""
    places = [Path(arguments.env), arguments.run_dir / arguments.env]
    folder = next((path for path in places if plan_file(path) is not None), None)
    plan = new_plan_of(arguments) if folder is None else continued(folder, arguments)
    arguments.jobs = arguments.jobs or default_jobs(plan)
    ranges = {plan.names[part.key]: part.spec for part in plan.dimensions}
    at_a_time = f"{arguments.jobs} runs at a time, in {plan.folder}"
    print(f"{plan.title}, {at_a_time}\n{two_columns(ranges)}", flush=True)
    run_or_stop(plan, arguments.jobs, "tune")
    result = plan.finish()
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
    given = {name: value for name in SEARCH_FLAGS if (value := getattr(arguments, name)) is not None}
    own = {name: value for name, value in vars(arguments).items() if name.startswith(PBT) and value is not None}
    flags = {name.removeprefix(PBT): value for name, value in own.items()}
    if not (arguments.pbt or flags):
        settings: PlanConfig = TuneConfig(**given, space=specs)
        config, _ = merged_config(arguments)
        return new_plan(settings, config, arguments.run_dir, arguments.name)
    if given:
        raise UsageError(f"{flag_of(next(iter(given)))} is of a search, and --pbt trains one population")
    config, _ = merged_config(arguments)
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
    allowed = {"--jobs", "--run-dir"} | ({"--pbt"} if is_population else {flag_of(name) for name in CHANGEABLE})
    refuse_changes(arguments, folder, allowed)
    return open_plan(folder, **changes)


def refuse_changes(arguments: argparse.Namespace, folder: Path, allowed: set[str]) -> None:
    """Raise UsageError for a flag that would change what continues in a folder."""
    flags = [argument for argument in COMMANDS["tune"].arguments if argument.is_flag and argument.name not in allowed]
    given = [flag.name for flag in flags if vars(arguments)[flag.attribute] not in (None, False)]
    given += [flag_of(key) for key in arguments.settings]
    if given:
        names = ", ".join(sorted(allowed - {"--run-dir", "--pbt"}))
        raise UsageError(f"{given[0]} cannot change when {folder} continues; only {names} can")

"""`canter.tune`: search the settings of a task, by many runs in separate processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canter.app.check.before_run import check_machine
from canter.app.experiments.folders import check_task, new_plan_folder
from canter.app.experiments.plans import OnChange, run_plan
from canter.app.experiments.task import plan_run
from canter.app.tuning.exploit import PbtConfig
from canter.app.tuning.pbt import Population
from canter.app.tuning.plan import BASE, TunePlan, TuneResult
from canter.app.tuning.population import PopulationSearch
from canter.app.tuning.search import Search, TuneConfig
from canter.app.tuning.space import spec_of
from canter.config import TrainConfig
from canter.config.files import dump_config, read_config
from canter.core.distributed import cores
from canter.core.plain import ConfigError, from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import Malformed, read_json, replace_file, write_json
from canter.core.storage.lock import folder_mutex
from canter.envs.imports import refuse_while_importing
from canter.runs.records import RUNS

PlanConfig = TuneConfig | PbtConfig
CHANGEABLE = ("trials", "budget")
"""Settings of a search that may change when it continues."""
FILES: dict[str, type[PlanConfig]] = {"tune.json": TuneConfig, "pbt.json": PbtConfig}
"""Files of plans in their folders, and the settings that they hold."""


def print_line(plan: TunePlan, line: str | None) -> None:
    """Print the line of a run that has ended."""
    if line is not None:
        print(line, flush=True)


def tune(
    task: str | Path,
    *,
    trials: int | None = None,
    budget: float | None = None,
    jobs: int | None = None,
    space: Mapping[str, Any] | None = None,
    objective: str | None = None,
    seeds: int | None = None,
    finalists: int | None = None,
    final_seeds: int | None = None,
    population: int | None = None,
    pbt: Mapping[str, Any] | bool = False,
    config: TrainConfig | None = None,
    preset: str | None = None,
    run_dir: str | Path = RUNS,
    name: str | None = None,
    on_change: OnChange = print_line,
    **settings: Any,
) -> TuneResult:
    """Search settings of a task as `canter tune` does, and return the winner.

        canter.tune("CartPole-v1", trials=40, space={"algorithm.gamma": "0.9..0.999:log1m"})
        canter.tune("tensor:quadrotor", pbt={"members": 8, "rule": "threshold"})

    `task` is the id of an environment. Or it is the folder of a search or population, or its name in
    `run_dir`, to continue with the same decisions; then only a search takes new `trials` or a new
    `budget` in seconds. `space` has ranges by setting, `(A, B, C)` or text as in the module
    `canter.app.tuning.space`; by default those of the algorithm. `config`, `preset` and further
    settings are the base, as for `canter.train`. `population` trials at a time train side by side in
    one program, on tensor environments. `pbt` trains a population instead of a search, with these
    settings of `canter.app.tuning.exploit.PbtConfig`. The other arguments are those of `TuneConfig`.
    """
    refuse_while_importing("canter.tune")
    named = {"objective": objective, "seeds": seeds, "finalists": finalists, "final_seeds": final_seeds}
    named |= {"population": population, "trials": trials, "budget": budget}
    given = {name: value for name, value in named.items() if value is not None}
    folder = find_plan(task, Path(run_dir))
    if folder is not None:
        fixed = {"space": space, "pbt": pbt or None, "config": config, "preset": preset, "name": name, **settings}
        _refuse_changes(folder, given | {key: value for key, value in fixed.items() if value is not None})
        plan = open_plan(folder, **given)
    else:
        if given and pbt:
            raise UserError(f"{', '.join(given)}: of a search; pbt trains one population")
        specs = {key: spec_of(key, value) for key, value in (space or {}).items()}
        base = plan_run(str(task), None, config, preset, settings).config
        check_task(base.env.id, "search")
        if pbt:
            own = dict(pbt) if isinstance(pbt, Mapping) else {}
            wanted: PlanConfig = from_plain(own | {"space": specs or own.get("space", {})}, PbtConfig())
        else:
            wanted = TuneConfig(**given, space=specs)
        plan = new_plan(wanted, base, Path(run_dir), name)
    run_plan(plan, jobs or default_jobs(plan), on_change)
    return finish(plan)


def finish(plan: TunePlan) -> TuneResult:
    """Write the best settings and the report of a plan that is done, one process after the other."""
    with folder_mutex(plan.folder):
        return plan.finish()


def _refuse_changes(folder: Path, given: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that would change what continues in a folder."""
    allowed = CHANGEABLE
    if (folder / "pbt.json").is_file():
        allowed = ("pbt",) if given.get("pbt") is True else ()
    if changed := [name for name in given if name not in allowed]:
        names = ", ".join([*CHANGEABLE, "jobs"] if allowed is CHANGEABLE else ["jobs"])
        raise UserError(f"{', '.join(changed)} cannot change when {folder} continues; only {names} can")


def default_jobs(plan: TunePlan) -> int:
    """Return the number of processes at a time: one for each core, or one if trials train side by side."""
    return 1 if isinstance(plan, PopulationSearch) else cores()


def plan_class(settings: PlanConfig) -> Any:
    """Return the kind of plan that the settings describe."""
    if isinstance(settings, PbtConfig):
        return Population
    return PopulationSearch if settings.population else Search


def plan_file(folder: Path) -> Path | None:
    """Return the file of the plan in a folder; None without one."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def find_plan(task: str | Path, run_dir: Path) -> Path | None:
    """Return the folder of a plan that a task names, here or in `run_dir`; None if it names none."""
    return next((path for path in (Path(task), run_dir / task) if plan_file(path) is not None), None)


def new_plan(settings: PlanConfig, base: TrainConfig, run_dir: Path, name: str | None) -> Any:
    """Check a plan, make its folder and return it."""
    settings = plan_class(settings).check(settings, base)
    check_machine(base)
    return create_plan(new_plan_folder(run_dir, base.env.id, name, "tune"), settings, base)


def create_plan(folder: Path, settings: PlanConfig, base: TrainConfig) -> Any:
    """Write a plan and the base settings to its folder, which is there already, and return it."""
    file = next(folder / name for name, kind in FILES.items() if isinstance(settings, kind))
    replace_file(folder / BASE, dump_config(base).encode())
    write_json(file, to_plain(settings))  # last: it makes the folder one that continues
    return plan_class(settings)(folder, settings, base)


def open_plan(folder: Path, **changes: Any) -> Any:
    """Return the plan of a folder, with changed settings; raise UserError if it cannot be read."""
    file = plan_file(folder)
    if file is None:
        raise UserError(f"{folder} has no plan: none of {', '.join(FILES)}")
    try:
        stored: Any = from_plain(read_json(file), FILES[file.name])
    except (OSError, Malformed, ConfigError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    settings = replace(stored, **changes)
    base = read_config(folder / BASE, within=folder).over(TrainConfig())
    if settings != stored:
        return create_plan(folder, settings, base)
    return plan_class(settings)(folder, settings, base)

"""`canter.tune`: search the settings of a task, by many runs in separate processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canter.app.check.before_run import check_machine
from canter.app.experiments.sweep import new_sweep_folder
from canter.app.experiments.train import plan_run
from canter.app.tuning.exploit import PbtConfig
from canter.app.tuning.outcome import Outcome, outcome_of, write_winner
from canter.app.tuning.pbt import PLAN as POPULATION_PLAN
from canter.app.tuning.pbt import (
    PbtOutcome,
    Population,
    check_population,
    create_population,
    open_population,
    population_outcome,
    write_best_settings,
)
from canter.app.tuning.population import PopulationSearch, check_members, member_space
from canter.app.tuning.runner import OnChange, read_plan, run_plan, write_plan
from canter.app.tuning.search import PLAN, Search, TuneConfig
from canter.app.tuning.space import build_space, default_space, spec_of
from canter.app.tuning.study import load_optuna
from canter.config import TrainConfig
from canter.core.distributed import cores
from canter.core.plain import from_plain
from canter.core.registry import UserError
from canter.envs.imports import PYTHON, refuse_while_importing
from canter.runs.records import RUNS


def print_line(plan: Any, line: str | None) -> None:
    """Print the line of a run that has ended."""
    if line is not None:
        print(line, flush=True)


@dataclass(frozen=True)
class TuneResult:
    """The result of a search."""

    path: Path
    """Folder of the search."""
    best: Path
    """File with the winner's settings, for `canter train ENV --config`."""
    report: Path
    """Report as one HTML file."""
    outcome: Outcome
    """The winner, and its scores."""


@dataclass(frozen=True)
class PbtResult:
    """The result of a population."""

    path: Path
    """Folder of the population."""
    run: Path
    """Run of the best member, for `canter.load`."""
    best: Path
    """File with its last settings, for `canter train ENV --config`."""
    report: Path
    """Report as one HTML file."""
    outcome: PbtOutcome
    """The best member, and the scores of all."""


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
) -> TuneResult | PbtResult:
    """Search settings of a task as `canter tune` does, and return the winner.

        canter.tune("CartPole-v1", trials=40, space={"algorithm.gamma": "0.9..0.999:log1m"})
        canter.tune("tensor:quadrotor", pbt={"members": 8, "rule": "threshold"})

    `task` is the id of an environment, or the folder of a search or population to continue with the
    same decisions; a search goes on up to new `trials` or a new `budget` in seconds. `space` has
    ranges by setting, `(A, B, C)` or text as in the module `canter.app.tuning.space`; by default
    those of the algorithm. `config`, `preset` and further settings are the base, as for
    `canter.train`. `population` trials at a time train side by side in one program, on tensor
    environments. `pbt` trains a population instead of a search, with these settings of
    `canter.app.tuning.exploit.PbtConfig`. The other arguments are those of `TuneConfig`.
    """
    refuse_while_importing("canter.tune")
    numbers = {"seeds": seeds, "finalists": finalists, "final_seeds": final_seeds, "population": population}
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    given |= {} if objective is None else {"objective": objective}
    specs = {key: spec_of(key, value) for key, value in (space or {}).items()}
    is_population = (Path(task) / POPULATION_PLAN).is_file()
    if pbt or is_population:
        if given or trials or budget:
            names = "trials, budget, objective, seeds, finalists and population"
            raise UserError(f"{names} are of a search; pbt trains one population")
        if is_population:
            members = open_population(Path(task))
        else:
            plan = population_config(dict(pbt) if isinstance(pbt, Mapping) else {}, specs)
            base = plan_run(str(task), None, config, preset, settings).config
            members = new_population(plan, base, Path(run_dir), name)
        run_plan(members, jobs or cores(), on_change)
        return finish_population(members)
    load_optuna()
    if (Path(task) / PLAN).is_file():
        search = open_search(Path(task), trials=trials, budget=budget)
    else:
        base = plan_run(str(task), None, config, preset, settings).config
        search = new_search(TuneConfig(trials=trials, budget=budget, **given, space=specs), base, Path(run_dir), name)
    run_plan(search, jobs or default_jobs(search), on_change)
    return finish(search)


def default_jobs(search: Search) -> int:
    """Return the number of processes at a time: one for each core, or a single one for members of a population."""
    return 1 if search.tune.population else cores()


def population_config(given: dict[str, Any], space: dict[str, str]) -> PbtConfig:
    """Return the settings of a population from Python."""
    return from_plain(given | {"space": space or given.get("space", {})}, PbtConfig())


def new_search(plan: TuneConfig, base: TrainConfig, run_dir: Path, name: str | None) -> Search:
    """Check a search, make its folder and return it."""
    plan = check_search(plan, base)
    check_machine(base)
    return create_search(new_sweep_folder(run_dir, base.env.id, name, "tune"), plan, base)


def create_search(folder: Path, tune: TuneConfig, config: TrainConfig) -> Search:
    """Write the plan of a new search to its folder, which is there already, and return the search."""
    write_plan(folder / PLAN, tune, config)
    return search_class(tune)(folder, tune, config)


def search_class(tune: TuneConfig) -> type[Search]:
    """Return the kind of a search."""
    return PopulationSearch if tune.population else Search


def check_search(tune: TuneConfig, config: TrainConfig) -> TuneConfig:
    """Return the plan with its ranges as numbers; raise UserError if the search cannot work."""
    if config.env.id.startswith(f"{PYTHON}:"):
        raise UserError("a search trains in separate processes: pass the id of an environment, or MODULE:NAME")
    if config.total_steps is None:
        raise UserError("total_steps=null: a search compares runs after equal steps; set total_steps")
    specs = tune.space
    if tune.population and not specs:
        specs = member_space(default_space(config))
    dimensions = build_space(specs, config)
    if tune.population:
        check_members(tune, config, dimensions)
    return replace(tune, space={dimension.key: dimension.spec for dimension in dimensions})


def open_search(folder: Path, **changes: Any) -> Search:
    """Return the search of a folder, with changed `trials` or `budget`."""
    plan, config = read_plan(folder / PLAN, TuneConfig)
    tune = replace(plan, **{name: value for name, value in changes.items() if value is not None})
    if tune != plan:
        write_plan(folder / PLAN, tune, config)
    return search_class(tune)(folder, tune, config)


def finish(search: Search) -> TuneResult:
    """Write the winner's settings and the report of a search that is done."""
    from canter.app.report.tuning import write_search_report

    outcome = outcome_of(search)
    return TuneResult(search.folder, write_winner(search, outcome), write_search_report(search, outcome), outcome)


def new_population(pbt: PbtConfig, base: TrainConfig, run_dir: Path, name: str | None) -> Population:
    """Check a population, make its folder and return it."""
    pbt = check_population(pbt, base)
    check_machine(base)
    return create_population(new_sweep_folder(run_dir, base.env.id, name, "tune"), pbt, base)


def finish_population(population: Population) -> PbtResult:
    """Write the winner's last settings and the report of a population that is done."""
    from canter.app.report.population import write_population_report

    outcome = population_outcome(population)
    best = write_best_settings(population, outcome)
    report = write_population_report(population, outcome)
    return PbtResult(population.folder, population.folder / outcome.winner, best, report, outcome)

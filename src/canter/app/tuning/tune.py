"""`canter.tune`: search the settings of a task, by many runs in separate processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.app.check.before_run import check_machine
from canter.app.experiments.sweep import new_sweep_folder
from canter.app.experiments.train import plan_run
from canter.app.tuning.outcome import Outcome, outcome_of, write_best
from canter.app.tuning.runner import OnChange, run_plan
from canter.app.tuning.search import PLAN, Search, TuneConfig, check_search, create_search, open_search
from canter.app.tuning.space import spec_of
from canter.app.tuning.study import load_optuna
from canter.config import TrainConfig
from canter.core.distributed import cores
from canter.envs.imports import refuse_while_importing
from canter.runs.records import RUNS


def print_line(search: Search, line: str | None) -> None:
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


def tune(
    task: str | Path,
    *,
    trials: int | None = None,
    budget: float | None = None,
    jobs: int | None = None,
    space: Mapping[str, Any] | None = None,
    objective: str = "return",
    seeds: int = 3,
    finalists: int = 3,
    final_seeds: int = 5,
    config: TrainConfig | None = None,
    preset: str | None = None,
    run_dir: str | Path = RUNS,
    name: str | None = None,
    on_change: OnChange = print_line,
    **settings: Any,
) -> TuneResult:
    """Search settings of a task as `canter tune` does, and return the winner.

        canter.tune("CartPole-v1", trials=40, space={"algorithm.gamma": "0.9..0.999:log1m"})

    `task` is the id of an environment, or the folder of a search to continue with the same trials,
    up to new `trials` or a new `budget` in seconds. `space` has ranges by setting, `(A, B, C)` or
    text as in the module `canter.app.tuning.space`; by default those of the algorithm.
    `config`, `preset` and further settings are the base, as for `canter.train`. The other arguments
    are those of `TuneConfig`.
    """
    refuse_while_importing("canter.tune")
    load_optuna()
    if (Path(task) / PLAN).is_file():
        search = open_search(Path(task), trials=trials, budget=budget)
    else:
        base = plan_run(str(task), None, config, preset, settings).config
        specs = {key: spec_of(key, value) for key, value in (space or {}).items()}
        plan = TuneConfig(
            trials=trials,
            budget=budget,
            objective=objective,
            seeds=seeds,
            finalists=finalists,
            final_seeds=final_seeds,
            space=specs,
        )
        search = new_search(plan, base, Path(run_dir), name)
    run_plan(search, jobs or cores(), on_change)
    return finish(search)


def new_search(plan: TuneConfig, base: TrainConfig, run_dir: Path, name: str | None) -> Search:
    """Check a search, make its folder and return it."""
    plan = check_search(plan, base)
    check_machine(base)
    return create_search(new_sweep_folder(run_dir, base.env.id, name, "tune"), plan, base)


def finish(search: Search) -> TuneResult:
    """Write the winner's settings and the report of a search that is done."""
    from canter.app.report.tuning import write_search_report

    outcome = outcome_of(search)
    return TuneResult(search.folder, write_best(search, outcome), write_search_report(search, outcome), outcome)

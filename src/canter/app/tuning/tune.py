"""`canter.tune`: search the settings of a task, by many runs in separate processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from canter.app.check.before_run import check_machine
from canter.app.experiments.launcher import LaunchedRun, Launcher
from canter.app.experiments.sweep import POLL_SECONDS, new_sweep_folder
from canter.app.experiments.train import plan_run
from canter.app.tuning.outcome import Outcome, outcome_of, write_best
from canter.app.tuning.search import PLAN, Job, Search, TuneConfig, check_search, create_search, open_search
from canter.app.tuning.space import spec_of
from canter.app.tuning.study import load_optuna
from canter.config import TrainConfig
from canter.core.distributed import cores
from canter.core.storage.lock import RunLock, is_locked
from canter.envs.imports import refuse_while_importing
from canter.runs.records import RUNS

ATTEMPTS = 3
"""Times that a run is started whose process is killed."""

OnChange = Callable[[Search, str | None], Any]
"""Called now and then with the search and a line about the run that has just ended, or None."""


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
    objective: Literal["return", "auc"] = "return",
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
    run_search(search, jobs or cores(), on_change)
    return finish(search)


def new_search(plan: TuneConfig, base: TrainConfig, run_dir: Path, name: str | None) -> Search:
    """Check a search, make its folder and return it."""
    plan = check_search(plan, base)
    check_machine(base)
    return create_search(new_sweep_folder(run_dir, base.env.id, name, "tune"), plan, base)


@dataclass(frozen=True)
class _Started:
    """A run in a process."""

    job: Job
    run: LaunchedRun
    since: float


def run_search(search: Search, jobs: int, on_change: OnChange) -> None:
    """Run everything that is missing, `jobs` runs at a time.

    A run whose process was killed is resumed. Runs of an earlier session that was killed may still
    be alive; they end by themselves and count. When the search is interrupted, all runs stop and
    save before the error is raised.
    """
    running: dict[str, _Started] = {}
    attempts: dict[str, int] = {}
    before = search.spent
    start = time.monotonic()
    with RunLock(search.folder), Launcher() as launcher:
        todo = search.next_jobs()
        while todo or running:
            lines = [_record(search, job, 0.0) for job in todo if job.name not in running and search.is_scored(job)]
            for job in todo if not lines else []:
                if len(running) < jobs and job.name not in running and not is_locked(search.folder / job.name):
                    search.sweep.runs[job.name] = search.arguments(job)
                    search.sweep.write()
                    argv = search.sweep.arguments(job.name, search.pause(job))
                    run = launcher.start(argv, search.sweep.log(job.name))
                    running[job.name] = _Started(job, run, time.monotonic())
                    attempts[job.key] = attempts.get(job.key, 0) + 1
            launcher.update()
            for name, started in list(running.items()):
                code = started.run.returncode
                if code is None:
                    continue
                del running[name]
                if code >= 0 or attempts[started.job.key] >= ATTEMPTS:
                    seconds = time.monotonic() - started.since
                    lines.append(_record(search, started.job, seconds, failed=code != 0))
            search.spent = before + time.monotonic() - start
            if lines:
                search.study.note("spent", search.spent)
                todo = search.next_jobs()
            for line in lines or [None]:
                on_change(search, line)
            if not lines:
                time.sleep(POLL_SECONDS)


def _record(search: Search, job: Job, seconds: float, *, failed: bool = False) -> str:
    """Record a run that has ended and return a line about it."""
    score = None if failed else search.read_score(job)
    search.record(job, score, seconds)
    shown = f"failed, see {search.folder / job.name}.log" if score is None else f"{score:.5g}"
    return f"{job.name}, {job.steps:,} steps: {shown}"


def finish(search: Search) -> TuneResult:
    """Write the winner's settings and the report of a search that is done."""
    from canter.app.report.tuning import write_search_report

    outcome = outcome_of(search)
    return TuneResult(search.folder, write_best(search, outcome), write_search_report(search, outcome), outcome)

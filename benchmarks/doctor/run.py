"""Planted faults and healthy runs: what `canter doctor` finds, when, whether its change repairs, and false alarms.

    python benchmarks/doctor/run.py train fit report presets restore --jobs 14   train what is missing in --out
    python benchmarks/doctor/run.py judge fit        diagnose the runs that thresholds are fitted on
    python benchmarks/doctor/run.py judge report     diagnose the others; write results.json and print a table
    python benchmarks/doctor/run.py train whole      train presets to the end, with other seeds
    python benchmarks/doctor/run.py judge whole      add their false alarms to results.json
    python benchmarks/doctor/run.py store            write the logs that the tests read

`fit` are faults and healthy runs of the tasks and seeds for thresholds, `report` those of the tasks and seeds that
are reported, `presets` healthy runs of presets, `single` one run for each rule that those do not reach, `restore`
faulty runs of the report once more with the first change that was suggested, `whole` healthy runs of presets with
their whole budgets. Each run is kept in a file at once, so
that `train` continues where it was stopped.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NoReturn

from jobs import Job, read_outcome, write_outcome
from judge import judge_fit, judge_report, judge_whole, repair_of
from single import SEED, SINGLE
from store import store
from tasks import (
    FIT_PRESETS,
    FIT_SEEDS,
    FIT_TASKS,
    MORE_HEALTHY,
    REPORT_PRESETS,
    REPORT_SEEDS,
    REPORT_TASKS,
    WHOLE_PRESETS,
    WHOLE_SEEDS,
    seconds_of,
)

from faults import CONTINUOUS, DISCRETE, FAULTS, HEALTHY

STAGES = ("fit", "report", "presets", "single", "restore", "whole")
OVERHEAD = 5.0
"""Seconds of a run besides those of its task."""


def faulty(tasks: list[str], seeds: tuple[int, ...]) -> list[Job]:
    """Return the runs of all faults, and the healthy ones."""
    return [
        Job(task, fault, seed)
        for seed in seeds
        for task in tasks
        for fault in FAULTS
        if not (fault in CONTINUOUS and task in DISCRETE)
    ]


def jobs_of(stage: str, folders: list[Path]) -> Iterator[Job]:
    """Yield the runs of a stage; those of `restore` once their faulty runs are there."""
    if stage == "fit":
        yield from faulty(list(FIT_TASKS), FIT_SEEDS)
    elif stage == "report":
        yield from faulty(list(REPORT_TASKS), REPORT_SEEDS)
        yield from (Job(task, HEALTHY, seed) for seed in MORE_HEALTHY for task in REPORT_TASKS)
    elif stage == "presets":
        for seed in range(3):
            yield from (Job(preset, "preset", REPORT_SEEDS[seed]) for preset in REPORT_PRESETS)
            if seed < len(FIT_SEEDS):
                yield from (Job(preset, "preset", FIT_SEEDS[seed]) for preset in FIT_PRESETS)
    elif stage == "whole":
        yield from (Job(preset, "whole preset", seed) for seed in WHOLE_SEEDS for preset in WHOLE_PRESETS)
    elif stage == "single":
        yield from (Job(task, fault, SEED) for fault, (task, _, _) in SINGLE.items())
    else:
        yield from filter(None, (restored(job, folders) for job in faulty(list(REPORT_TASKS), REPORT_SEEDS)))


def restored(job: Job, folders: list[Path]) -> Job | None:
    """Return a faulty run with the first change that was suggested; None if there is none."""
    change = repair_of(job, folders)
    return Job(job.task, job.fault, job.seed, change) if change else None


def quiet() -> None:
    """Log nothing in a worker."""
    logging.disable(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = "1"


def train_all(arguments: argparse.Namespace) -> None:
    """Train what is missing, in parallel, until the limit: the stages in their order, long runs of each first."""
    end = time.monotonic() + 60.0 * arguments.limit_minutes
    folders = [arguments.out, *arguments.known]
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, stop)
    waiting = {stage: missing(stage, folders, arguments) for stage in arguments.what}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, initializer=quiet) as pool:
        running: dict[Future[float], tuple[str, Job]] = {}
        while True:
            while len(running) < arguments.jobs and (chosen := choose(waiting, end - time.monotonic())):
                running[pool.submit(write_outcome, arguments.out, chosen[1])] = chosen
            if not running:
                return
            done, _ = wait(running, timeout=max(end - time.monotonic(), 0.1), return_when=FIRST_COMPLETED)
            if not done:
                print("the time is up", flush=True)
                stop()
            for future in done:
                stage, job = running.pop(future)
                error = future.exception()
                print(f"{job.name}: {error!r}" if error else f"{job.name}: {future.result():.0f} s", flush=True)
                if stage == "report" and "restore" in waiting:
                    waiting["restore"] += filter(None, [restored(job, folders)])


def missing(stage: str, folders: list[Path], arguments: argparse.Namespace) -> list[Job]:
    """Return the runs of a stage that were asked for and are not there."""
    return [
        job
        for job in jobs_of(stage, folders)
        if job.task in (arguments.tasks or [job.task]) and job.fault in (arguments.only or [job.fault])
        if read_outcome(folders, job) is None
    ]


def choose(waiting: dict[str, list[Job]], seconds: float) -> tuple[str, Job] | None:
    """Take the longest run that fits the seconds left, of the first stage that has one; None if none has."""
    for stage, jobs in waiting.items():
        fitting = [job for job in jobs if seconds_of(job.task, job.fault) + OVERHEAD < seconds]
        if fitting:
            job = max(fitting, key=lambda job: seconds_of(job.task, job.fault))
            jobs.remove(job)
            return stage, job
    return None


def stop(*_: object) -> NoReturn:
    """End all runs at once; those that are complete are kept."""
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)


def main() -> None:
    """Train, judge or store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "judge", "store"))
    parser.add_argument("what", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all if none is given")
    parser.add_argument("--out", type=Path, default=Path("doctor-runs"), help="folder of the runs")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="further folders of runs, only read")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-minutes", type=float, default=600.0)
    parser.add_argument("--tasks", nargs="+", help="train only these tasks or presets")
    parser.add_argument("--only", nargs="+", help="train only these faults, or judge them apart from the others")
    arguments = parser.parse_args()
    arguments.what = arguments.what or list(STAGES)
    if unknown := set(arguments.what) - set(STAGES):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(STAGES)}")
    folders = [arguments.out, *arguments.known]
    if arguments.command == "train":
        train_all(arguments)
    elif arguments.command == "store":
        store(folders, partial(jobs_of, folders=folders))
    else:
        for stage in arguments.what:
            jobs = [*jobs_of(stage, folders), *jobs_of("presets", folders)]
            if stage == "fit":
                judge_fit(jobs, folders)
            elif stage == "report" and arguments.only:
                judge_report([job for job in jobs if job.fault in arguments.only], folders, some=True)
            elif stage == "report":
                judge_report(jobs, folders)
            elif stage == "whole":
                judge_whole(list(jobs_of("whole", folders)), folders)


if __name__ == "__main__":
    main()

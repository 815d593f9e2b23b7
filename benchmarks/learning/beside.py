"""Train Canter's presets beside other libraries with their own code and settings, and compare the returns.

    python benchmarks/learning/beside.py run                          everything, five seeds: days on one core
    python benchmarks/learning/beside.py run sb3-ppo/Hopper-v5/0-4    one library on one task
    python benchmarks/learning/beside.py run --jobs 8 --limit-minutes 60 canter/Ant-v5/0-9 sb3-trpo/Ant-v5/0-4
    python benchmarks/learning/beside.py table                        what was measured, as Markdown

A job is `LIBRARY/TASK/SEEDS`, with `@MINUTES` behind it if its time is known. Libraries: canter, canter:VARIANT
(`variants.yaml`), and those of `peers.yaml`. Each run has one core, and adds one line to `results/beside.jsonl` when
it ends; runs that are in it are not repeated. A run that would not end within `--limit-minutes` is not started.
Needs `pip install stable-baselines3 sb3-contrib tianshou`, each only for its own jobs, and for CleanRL the path of
its script: `--cleanrl ppo_continuous_action.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import yaml
from peers import SETTINGS, evaluate, train

import canter
from canter.core.plain import from_plain
from canter.core.seeding import derive_seed
from canter.functional.statistics import bootstrap_interval, interquartile_mean
from canter.training.trainer import train as train_canter

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "beside.jsonl"
STEPS = 1_000_000
CURVE_POINTS = 40
TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
UNKNOWN_MINUTES = 10.0


@dataclass(frozen=True)
class Job:
    """One seed of one library on one task."""

    library: str
    task: str
    seed: int
    minutes: float | None = None
    """Expected duration; None takes that of earlier runs."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes a run a repetition of another."""
        return self.library, self.task, self.seed


def parse(text: str) -> list[Job]:
    """Return the jobs of `LIBRARY/TASK/SEEDS[@MINUTES]`; SEEDS is 3 or 0-4."""
    name, _, minutes = text.partition("@")
    parts = name.split("/")
    if len(parts) != 3:
        raise SystemExit(f"{text}: expected LIBRARY/TASK/SEEDS, such as canter/Hopper-v5/0-4")
    library, task, seeds = parts
    if library.partition(":")[0] != "canter" and library not in SETTINGS:
        raise SystemExit(f"{text}: {library} is none of canter, {', '.join(SETTINGS)}")
    first, _, last = seeds.partition("-")
    return [
        Job(library, task, seed, float(minutes) if minutes else None)
        for seed in range(int(first), int(last or first) + 1)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the finished runs of a file; a line that was cut off is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


# One run


def variant(library: str, task: str) -> canter.TrainConfig:
    """Return the preset of a task, with the settings of `canter:VARIANT` over it."""
    preset = canter.preset_for(task)
    assert preset is not None
    name = library.partition(":")[2]
    if not name:
        return preset
    variants = yaml.safe_load((HERE / "variants.yaml").read_text())
    return from_plain(variants[task][name], preset)


def run_canter(library: str, task: str, seed: int, steps: int | None) -> dict[str, Any]:
    config = replace(variant(library, task), seed=seed)
    total = steps or config.total_steps or STEPS
    config = replace(config, total_steps=total)
    curve: list[list[float | None]] = []
    last: list[canter.Report] = []

    def follow(report: canter.Report) -> None:
        if report.env_steps >= (len(curve) + 1) * total / CURVE_POINTS:
            curve.append([report.env_steps, report.return_, round(time.perf_counter() - start, 1)])
        last[:] = [report]

    start = time.perf_counter()
    algorithm = train_canter(config, follow)
    seconds = time.perf_counter() - start
    env = config.env.build(config.device)
    evaluation = canter.evaluate(algorithm.policy, env, 50, derive_seed(seed, "eval"))
    env.close()
    return {
        "steps": last[0].env_steps,
        "training_return": last[0].return_,
        "evaluation_return": evaluation.mean,
        "seconds": round(seconds, 1),
        "curve": curve,
        "version": canter.__version__,
    }


def run_peer(library: str, task: str, seed: int, steps: int | None, cleanrl: Path | None) -> dict[str, Any]:
    start = time.perf_counter()
    act, episodes, version = train(library, task, seed, steps or STEPS, cleanrl)
    seconds = time.perf_counter() - start
    returns = [return_ for _, return_ in episodes.finished[-100:]]
    trained = episodes.steps
    return {
        "steps": trained,
        "training_return": float(np.mean(returns)) if returns else None,
        "evaluation_return": float(np.mean(evaluate(act, task, derive_seed(seed, "eval") % 2**32))),
        "seconds": round(seconds, 1),
        "curve": episodes.curve(CURVE_POINTS, trained),
        "version": version,
    }


def one(arguments: argparse.Namespace) -> None:
    """Run one job in this process and append its line."""
    (job,) = parse(arguments.job)
    steps = arguments.steps
    if job.library.partition(":")[0] == "canter":
        result = run_canter(*job.key, steps)
    else:
        result = run_peer(*job.key, steps, arguments.cleanrl)
    document = {
        "library": job.library,
        "task": job.task,
        "seed": job.seed,
        **result,
        "gymnasium": gymnasium.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, one core",
        "date": date.today().isoformat(),
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    # One write of a short line: several processes append to the same file.
    with arguments.results.open("a") as file:
        file.write(json.dumps(document) + "\n")


# Many runs, one core each


def run_all(arguments: argparse.Namespace) -> None:
    """Start jobs in their order on free cores, those that end within the limit, until none is left."""
    start = time.monotonic()
    finished = read(arguments.results)
    known = {(run["library"], run["task"], run["seed"]) for run in finished}
    texts = arguments.names or [f"{library}/{task}/0-4" for task in TASKS for library in ("canter", *SETTINGS)]
    pending = [job for text in texts for job in parse(text) if job.key not in known]
    seconds = {(run["library"], run["task"]): run["seconds"] for run in finished}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else list(range(arguments.jobs))
    free = cores[-arguments.jobs :]
    running: dict[subprocess.Popen[bytes], tuple[Job, int, float]] = {}

    def minutes(job: Job) -> float:
        seen = seconds.get((job.library, job.task))
        return 1.15 * seen / 60 if seen else job.minutes or UNKNOWN_MINUTES

    while pending or running:
        left = arguments.limit_minutes - (time.monotonic() - start) / 60
        for process, (job, core, began) in list(running.items()):
            if process.poll() is None and left > 0:
                continue
            process.kill()
            process.wait()
            del running[process]
            free.append(core)
            took = time.monotonic() - began
            if process.returncode == 0:
                seconds[job.library, job.task] = took
            print(f"{'/'.join(map(str, job.key))}: exit {process.returncode} after {took:.0f} s", flush=True)
        pending = [job for job in pending if minutes(job) < left]
        while free and pending:
            job, core = pending.pop(0), free.pop()
            running[_start(job, core, arguments)] = (job, core, time.monotonic())
        time.sleep(0.2)


def _start(job: Job, core: int, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "one", "/".join(map(str, job.key)), "--results", str(arguments.results)]
    command += ["--steps", str(arguments.steps)] if arguments.steps else []
    command += ["--cleanrl", str(arguments.cleanrl)] if arguments.cleanrl else []
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env={**os.environ, **threads})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {core})
    return process


# What was measured


def probability_of_improvement(
    x: np.ndarray, y: np.ndarray, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the probability that a run of x `[n]` beats one of y `[m]`, and its 95 % bootstrap interval.

    Ties count half (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice").
    """
    wins = np.heaviside(np.subtract.outer(np.asarray(x), np.asarray(y)), 0.5)
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(x), size=(draws, len(x)))
    columns = rng.integers(len(y), size=(draws, len(y)))
    estimates = wins[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    low, high = np.quantile(estimates, [0.025, 0.975])
    return float(wins.mean()), float(low), float(high)


def runs_of_preset(task: str) -> list[dict[str, Any]]:
    """Return the runs of the preset that `run.py` recorded."""
    path = HERE / "results" / f"{task}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


HEAD = (
    "| task | library | seeds | steps | training, 95 % | evaluation, 95 % "
    "| Canter's preset is better: training, evaluation |"
)


def rows(path: Path) -> list[str]:
    """Return the lines of the table: each library beside Canter's preset, task by task."""
    finished = read(path)
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for task in sorted({run["task"] for run in finished}):
        groups: dict[str, list[dict[str, Any]]] = {"canter": []}
        for run in finished:
            if run["task"] == task:
                groups.setdefault(run["library"], []).append(run)
        groups["canter"] = groups["canter"] or runs_of_preset(task)
        for library, runs in groups.items():
            if runs:
                lines.append(_row(task, library, runs, groups["canter"]))
    return lines


def _row(task: str, library: str, runs: list[dict[str, Any]], preset: list[dict[str, Any]]) -> str:
    scores = {kind: np.array([run[f"{kind}_return"] for run in runs]) for kind in ("training", "evaluation")}
    cells = [task, library, str(len(runs)), f"{runs[0].get('steps') or runs[0]['env_steps']:,}"]
    for values in scores.values():
        low, high = bootstrap_interval(values)
        cells.append(f"{interquartile_mean(values):,.0f} ({low:,.0f} to {high:,.0f})")
    better = []
    for kind, values in scores.items():
        if library != "canter" and preset:
            ours = np.array([run[f"{kind}_return"] for run in preset])
            center, low, high = probability_of_improvement(ours, values)
            better.append(f"{center:.2f} ({low:.2f} to {high:.2f})")
    return f"| {' | '.join([*cells, ', '.join(better)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run, single, table = (commands.add_parser(name) for name in ("run", "one", "table"))
    run.add_argument("names", nargs="*", metavar="JOB", help="LIBRARY/TASK/SEEDS[@MINUTES], in the order of worth")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    run.add_argument("--limit-minutes", type=float, default=float("inf"), help="stop after this time")
    single.add_argument("job", help="LIBRARY/TASK/SEED")
    for command in (run, single, table):
        command.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    for command in (run, single):
        command.add_argument("--steps", type=int, help="environment steps, instead of the preset's or 1 M")
        command.add_argument("--cleanrl", type=Path, help="path of ppo_continuous_action.py")
    arguments = parser.parse_args()
    if arguments.command == "table":
        print("\n".join(rows(arguments.results)))
    elif arguments.command == "one":
        one(arguments)
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()

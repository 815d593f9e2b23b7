"""Runs the commands of a comparison one by one, each in a process of its own, and keeps what they print."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "triton", "numpy", "gymnasium", "mujoco", "rsl-rl-lib", "tensordict", "rl-games", "skrl")
PACKAGES += ("stable-baselines3", "jax", "jaxlib")


@dataclass(frozen=True)
class Job:
    """A command whose last line of output is JSON."""

    name: str
    arguments: Sequence[Any]
    """Script, relative to this folder, and what it is given."""
    threads: int | None = None
    limit: float = 300.0
    """Seconds after which it is stopped."""


@dataclass
class Harness:
    """Runs jobs until its time is up; a job that fails leaves its error as its result, and the others go on."""

    budget: float = float("inf")
    """Seconds for all jobs together."""
    start: float = field(default_factory=time.monotonic)
    before: dict[str, Any] = field(default_factory=dict)
    """Results of an earlier time, by part."""
    only: Sequence[str] = ()
    """Names of jobs to run, if not all of them."""

    def run(self, job: Job) -> dict[str, Any]:
        """What the job printed, with its command and the seconds from start to exit; or an `error`."""
        threads = () if job.threads is None else ("--threads", job.threads)
        script, *rest = map(str, (*job.arguments, *threads))
        about: dict[str, Any] = {"command": f"python benchmarks/speed/{script} {' '.join(rest)}"}
        if job.threads is not None:
            about["threads"] = job.threads
        left = self.budget - (time.monotonic() - self.start)
        if left < 5:
            return about | {"error": "no time was left"}
        print(f"{job.name:24} {about['command']}", file=sys.stderr, flush=True)
        environment = os.environ | ({} if job.threads is None else {"OMP_NUM_THREADS": str(job.threads)})
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / script), *rest],
                capture_output=True,
                text=True,
                timeout=min(job.limit, left),
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            lines = [line for line in output.splitlines() if line.startswith("{")]
            note = f"stopped after {late.timeout:.0f} s"
            return (json.loads(lines[-1]) | {"note": note} if lines else {"error": note}) | about
        return read(done) | {"wall_s": round(time.perf_counter() - begin, 2)} | about

    def alternate(self, jobs: Sequence[Job], rounds: int, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Every job once a round, so that a slow minute of the machine hits all of them; the median of each.

        A job that is not to be run keeps the result that it had `before`.
        """
        jobs = [job for job in jobs if not self.only or job.name in self.only]
        runs: dict[str, list[dict[str, Any]]] = {job.name: [] for job in jobs}
        for _ in range(rounds):
            for job in jobs:
                # What failed once would only fail again.
                if not any("error" in run for run in runs[job.name]):
                    runs[job.name].append(self.run(job))
        return (before or {}) | {name: median(results) for name, results in runs.items()}


def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    complaint = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
    return {"error": complaint[-1][:300], "log": complaint[-15:]}


def median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first run with its numbers replaced by medians over all runs that worked."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return dict(runs[0])
    result = dict(good[0])
    for key, value in result.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "threads":
            result[key] = statistics.median(run[key] for run in good)
    rates = [run["steps_per_second"] for run in good if "steps_per_second" in run]
    return result | ({"all_steps_per_second": rates} if len(rates) > 1 else {})


def machine() -> dict[str, Any]:
    """Where this runs, and with which releases."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "gpu": gpu, "cuda": torch.version.cuda},
        "versions": {"python": platform.python_version(), **versions},
    }


def processor() -> str:
    """The processor's name as Linux tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


Part = Callable[[Harness, argparse.Namespace], dict[str, Any]]


def main(name: str, parts: dict[str, Part], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Run the parts that were asked for, write `results/NAME.json` after each, and give its content."""
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for everything together")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    parser.set_defaults(jobs=())
    options = parser.parse_args()
    output: Path = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    # What is not run again keeps the results that it has, and the versions that it was measured with.
    keeps = (options.only or options.jobs) and output.exists()
    old = json.loads(output.read_text()) if keeps else {"versions": {}, "parts": {}}
    harness = Harness(options.budget, before=old["parts"], only=options.jobs)
    document: dict[str, Any] = {**machine(), "parts": dict(old["parts"])}
    document["versions"] = old["versions"] | document["versions"]
    for part in options.only or parts:
        begin = time.monotonic()
        try:
            document["parts"][part] = parts[part](harness, options)
        except Exception as error:  # one part that breaks must not cost the others
            document["parts"][part] = {"error": repr(error)}
        print(f"-- {part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        output.write_text(json.dumps(document, indent=1) + "\n")
    return document

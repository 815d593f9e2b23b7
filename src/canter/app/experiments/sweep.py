"""Sweeps: many runs on one machine, each in its own process and folder."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canter.app.experiments.folders import claim_folder, numbered_names
from canter.app.experiments.launcher import LaunchedRun, Launcher
from canter.core.registry import UserError
from canter.core.storage.files import Malformed, parse_json, read_untrusted, replace_file
from canter.runs.metrics import METRICS, read_last_row
from canter.runs.records import CONFIG, SWEEP, by_average, read_record, read_settings, run_status, score_value

MAX_BYTES = 16 << 20
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, as stored in its folder."""

    folder: Path
    base: list[str]
    """Arguments of `canter` shared by all runs."""
    runs: dict[str, list[str]]
    """Arguments of each run, in addition to the shared ones, by its name."""

    @staticmethod
    def read(folder: Path) -> Sweep:
        """Read the sweep of a folder."""
        try:
            content = parse_json(read_untrusted(folder / SWEEP, MAX_BYTES, within=folder))
        except (OSError, Malformed) as error:
            raise UserError(f"{folder / SWEEP} cannot be read: {error}") from error
        match content:
            case {"base": list(base), "runs": dict(runs)}:
                arguments = {str(name): [*map(str, own)] for name, own in runs.items()}
                return Sweep(folder, [*map(str, base)], arguments)
        raise UserError(f"{folder / SWEEP} is not the file of a sweep")

    def write(self) -> None:
        """Store the sweep in its folder."""
        content = {"base": self.base, "runs": self.runs}
        replace_file(self.folder / SWEEP, (json.dumps(content, indent=1) + "\n").encode())

    def add(self, name: str, arguments: list[str]) -> None:
        """Add a run to the stored sweep, to which other processes may add theirs."""
        if (self.folder / SWEEP).is_file():
            self.runs.update(Sweep.read(self.folder).runs)
        self.runs[name] = arguments
        self.write()

    def log(self, name: str) -> Path:
        """Return the file with the output of a run."""
        return self.folder / f"{name}.log"

    def arguments(self, name: str, *more: str) -> list[str]:
        """Return the arguments of `canter` that start a run, or resume it, with further settings."""
        path = self.folder / name
        if not (path / CONFIG).is_file():
            place = ["--run-dir", str(self.folder), "--name", name]
            return [*self.base, *self.runs[name], *more, *place, "--console", "lines"]
        has_checkpoint = any((path / "checkpoints").glob("step-*"))
        scratch = [] if has_checkpoint or not (path / METRICS).is_file() else ["--from-scratch"]
        return ["resume", str(path), *more, *scratch, "--console", "lines"]


def combinations(varied: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the flags of every combination of values, by a name made of the settings that vary."""
    varying = [key for key, values in varied.items() if len(values) > 1]
    found: dict[str, list[str]] = {}
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        parts = [f"{key.rpartition('.')[2].replace('-', '_')}{chosen[key]}" for key in varying] or ["run"]
        stem = re.sub(r"[^\w.=-]+", "_", "-".join(parts))[:150]
        name = next(name for name in numbered_names(stem) if name not in found)
        found[name] = [f"--{key}={value}" for key, value in chosen.items()]
    return found


def new_sweep_folder(root: Path, env_id: str, name: str | None, command: str = "sweep") -> Path:
    """Make a new folder for a sweep, or a search."""
    if not name:
        return claim_folder(root, f"{command}-{env_id}")
    path = root / name
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(
            f"{path} already exists; choose another --name, or continue: canter {command} {path}"
        ) from error
    return path


@dataclass
class SweepProgress:
    """State of the runs of a sweep."""

    sweep: Sweep
    running: dict[str, LaunchedRun] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def status(self, name: str) -> str:
        """Return `failed`, `running`, `waiting`, or the status in the run's record."""
        if name in self.failed:
            return "failed"
        if name in self.running:
            return "running"
        status = run_status(self.sweep.folder / name)
        return "waiting" if status == "unknown" else status

    def state(self, name: str) -> dict[str, Any]:
        """Return name, status, steps, return and score of one run."""
        path = self.sweep.folder / name
        row = read_last_row(path / METRICS)
        settings = read_settings(path / CONFIG)
        average = by_average(settings)
        return {
            "name": name,
            "status": self.status(name),
            "steps": row.get("env_steps"),
            "return": row.get("lta/mean" if average else "return"),
            "score": score_value(read_record(path).get("score"), average=average),
        }

    def states(self) -> list[dict[str, Any]]:
        """Return the states of all runs."""
        return [self.state(name) for name in self.sweep.runs]


def run_sweep(sweep: Sweep, jobs: int, on_change: Callable[[SweepProgress, str | None], Any]) -> SweepProgress:
    """Run everything that is not finished, `jobs` runs at a time.

    `on_change` is called now and then with the progress and the run that has just ended, or None. A
    run that fails is noted and the others continue. When the sweep is interrupted, all runs stop
    and save before the error is raised.
    """
    progress = SweepProgress(sweep)
    waiting = [name for name in sweep.runs if run_status(sweep.folder / name) != "finished"]
    with Launcher() as launcher:
        while waiting or progress.running:
            while waiting and len(progress.running) < jobs:
                name = waiting.pop(0)
                progress.running[name] = launcher.start(sweep.arguments(name), sweep.log(name))
            time.sleep(POLL_SECONDS)
            launcher.update()
            ended = next((name for name, run in progress.running.items() if run.returncode is not None), None)
            if ended is not None and progress.running.pop(ended).returncode != 0:
                progress.failed.append(ended)
            on_change(progress, ended)
    return progress

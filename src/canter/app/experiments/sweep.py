"""Run folders: making a new one, and the settings of an old one.

Many runs on one machine, each in a process and a folder of its own.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from canter.config import TrainConfig
from canter.config.files import dump_config, read_config
from canter.core.registry import UserError
from canter.core.storage.files import read_untrusted, replace_file
from canter.core.storage.strict import Malformed, parse_json
from canter.runs.permissions import import_trusted_modules
from canter.runs.records import CONFIG, LATEST, METRICS, SWEEP, find_run, read_last_row, read_record, run_status
from canter.runs.run_folder import RunFolder, is_unstarted


def check_name(parent: Path, name: str | None) -> None:
    """Refuse a name that is no name, or that a run has already."""
    if name is None:
        return
    if Path(name).name != name or name == LATEST or not name.isprintable():
        raise UserError(f"--name {name!r} must be a plain folder name that can be printed, and not {LATEST!r}")
    path = parent / name
    if path.exists() and not is_unstarted(path):
        raise UserError(f"{path} exists already; give another --name, or go on with it: canter resume {path}")


def new_run(parent: Path, name: str | None, config: TrainConfig) -> RunFolder:
    """A folder for a new run, which nobody else has; to be called when environment and settings are known to work."""
    check_name(parent, name)
    path = claim(parent, f"{config.env.id}-seed{config.seed}") if name is None else parent / name
    return RunFolder(path, config.checkpoints, settings=dump_config(config))


def claim(parent: Path, title: str) -> Path:
    """A new folder, named after its title and the time. Making it decides: many runs may begin in one second."""
    parent.mkdir(parents=True, exist_ok=True)
    readable = re.sub(r"\W+", "-", title)
    for name in numbered(f"{readable}-{datetime.now():%Y%m%d-%H%M%S}"):
        with suppress(FileExistsError):
            (parent / name).mkdir()
            return parent / name
    raise AssertionError("there is always a next number")


def numbered(stem: str) -> Iterator[str]:
    """Names to try: the stem, then with -2, -3 and so on behind it."""
    return itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))


def located(given: str | Path, run_dir: Path) -> Path:
    """The policy file that is meant, or else the run folder."""
    return Path(given) if Path(given).is_file() else find_run(str(given), run_dir)


def stored_config(path: Path) -> TrainConfig:
    """The settings of a run; what its user trusted when it was made is trusted again."""
    import_trusted_modules(path)
    return read_config(path / CONFIG, within=path).over(TrainConfig())


MAX_BYTES = 16 << 20
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Sweep:
    """What is to be run, as it is kept in the sweep's folder."""

    folder: Path
    base: list[str]
    """Arguments of `canter` that all runs share."""
    runs: dict[str, list[str]]
    """Names of runs, and the arguments that only they have."""

    @staticmethod
    def read(folder: Path) -> Sweep:
        """The sweep of a folder."""
        try:
            found = parse_json(read_untrusted(folder / SWEEP, MAX_BYTES, within=folder))
        except (OSError, Malformed) as error:
            raise UserError(f"{folder / SWEEP} cannot be read: {error}") from error
        match found:
            case {"base": list(base), "runs": dict(runs)}:
                return Sweep(folder, [*map(str, base)], {str(name): [*map(str, own)] for name, own in runs.items()})
        raise UserError(f"{folder / SWEEP} is no sweep")

    def write(self) -> None:
        """Keep it in its folder."""
        content = {"base": self.base, "runs": self.runs}
        replace_file(self.folder / SWEEP, (json.dumps(content, indent=1) + "\n").encode())

    def arguments(self, name: str) -> list[str]:
        """What `canter` is called with for a run, from its beginning or from where it stopped."""
        path = self.folder / name
        if not (path / CONFIG).is_file():
            return [*self.base, *self.runs[name], "--run-dir", str(self.folder), "--name", name, "--console", "lines"]
        began = any((path / "checkpoints").glob("step-*"))
        scratch = ["--from-scratch"] if not began and (path / METRICS).is_file() else []
        return ["resume", str(path), *scratch, "--console", "lines"]


def combinations(varied: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Every combination of values: a name for each, of the settings that vary, and its flags."""
    keys = [key for key, values in varied.items() if len(values) > 1]
    found: dict[str, list[str]] = {}
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        parts = [f"{key.rpartition('.')[2].replace('-', '_')}{chosen[key]}" for key in keys] or ["run"]
        stem = re.sub(r"[^\w.=-]+", "_", "-".join(parts))[:150]
        name = next(name for name in numbered(stem) if name not in found)
        found[name] = [f"--{key}={value}" for key, value in chosen.items()]
    return found


def sweep_folder(parent: Path, env_id: str, name: str | None) -> Path:
    """A new folder for a sweep."""
    if not name:
        return claim(parent, f"sweep-{env_id}")
    path = parent / name
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        text = f"{path} exists already; give another --name, or go on: canter sweep {path}"
        raise UserError(text) from error
    return path


@dataclass
class Progress:
    """Where the runs of a sweep stand."""

    sweep: Sweep
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def state(self, name: str) -> dict[str, Any]:
        """Status, steps, return and score of one run."""
        path = self.sweep.folder / name
        status = "failed" if name in self.failed else "running" if name in self.running else run_status(path)
        row, score = read_last_row(path / METRICS), read_record(path).get("score")
        return {
            "name": name,
            "status": "waiting" if status == "unknown" else status,
            "steps": row.get("env_steps"),
            "return": row.get("return"),
            "score": score.get("mean") if isinstance(score, dict) else None,
        }

    def states(self) -> list[dict[str, Any]]:
        """Those of all runs."""
        return [self.state(name) for name in self.sweep.runs]


def carry_out_sweep(sweep: Sweep, jobs: int, on_change: Callable[[Progress, str | None], Any]) -> Progress:
    """Run what is not finished, so many at a time; `on_change` is told now and then, and which run has just ended.

    A run that fails is noted and the others go on. Interrupted, all running ones stop and save before it is raised.
    """
    progress = Progress(sweep)
    waiting = [name for name in sweep.runs if run_status(sweep.folder / name) != "finished"]
    try:
        while waiting or progress.running:
            while waiting and len(progress.running) < jobs:
                name = waiting.pop(0)
                progress.running[name] = start(sweep, name)
            time.sleep(POLL_SECONDS)
            ended = next((name for name, process in progress.running.items() if process.poll() is not None), None)
            if ended is not None and progress.running.pop(ended).returncode != 0:
                progress.failed.append(ended)
            on_change(progress, ended)
    finally:  # whatever ends the sweep lets its runs save and end as well
        for process in progress.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in progress.running.values():
            process.wait()
    return progress


def start(sweep: Sweep, name: str) -> subprocess.Popen[bytes]:
    """Begin one run, or go on with it, in a process of its own; what it says goes to a file."""
    command = [sys.executable, "-m", "canter", *sweep.arguments(name)]
    with (sweep.folder / f"{name}.log").open("ab") as log:
        # In a group of its own: an interrupt is handed on once, by us.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

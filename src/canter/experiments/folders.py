"""Run folders: making a new one, and finding old ones."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from canter.config import TrainConfig
from canter.config_file import dump_config, read_config
from canter.registry import nearest
from canter.runs.permissions import recall
from canter.runs.run_folder import CONFIG, LATEST, RunFolder, never_began

RUNS = Path("runs")


def check_name(parent: Path, name: str | None) -> None:
    """Refuse a name that is no name, or that a run has already."""
    if name is None:
        return
    if Path(name).name != name or name == LATEST or not name.isprintable():
        raise ValueError(f"--name {name!r} must be a plain folder name that can be printed, and not {LATEST!r}")
    path = parent / name
    if path.exists() and not never_began(path):
        raise ValueError(f"{path} exists already; give another --name, or go on with it: canter resume {path}")


def new_run(parent: Path, name: str | None, config: TrainConfig) -> RunFolder:
    """A folder for a new run, which nobody else has; to be called when environment and settings are known to work."""
    check_name(parent, name)
    path = _claim(parent, config) if name is None else parent / name
    return RunFolder(path, config.checkpoints, settings=dump_config(config))


def _claim(parent: Path, config: TrainConfig) -> Path:
    """A new folder, named after environment, seed and time. Making it decides: many runs may begin in one second."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "-", config.env.id)
    stem = f"{stem}-seed{config.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    for name in itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2))):
        if not os.path.lexists(parent / name):
            try:
                (parent / name).mkdir()
            except FileExistsError:
                continue
            return parent / name
    raise AssertionError("there is always a next number")


def find_run(text: str, parent: Path = RUNS) -> Path:
    """The run folder that `text` means: a path, `latest`, or the beginning of exactly one name under `parent`."""
    if (exact := _exactly(text, parent)) is not None:
        return exact
    matching = list(_matching(text, parent))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{text!r} could be any of {', '.join(sorted(path.name for path in matching))}")
    raise ValueError(
        f"no run {text!r} here or under {parent}: {nearest(text, [path.name for path in run_folders(parent)])}"
    )


def find_all(text: str, parent: Path = RUNS) -> list[Path]:
    """All runs that `text` means: one, those of a folder such as a sweep's, or all whose names begin with it."""
    if (exact := _exactly(text, parent)) is not None:
        return [exact]
    for folder in (Path(text), parent / text):
        if folder.is_dir() and (inside := list(run_folders(folder))):
            return inside
    return list(_matching(text, parent)) or [find_run(text, parent)]


def run_folders(parent: Path) -> Iterator[Path]:
    """The runs in a folder, and in the folders of sweeps within it, by name."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            continue
        if (path / CONFIG).is_file():
            yield path
        elif (path / SWEEP).is_file():
            yield from run_folders(path)


SWEEP = "sweep.json"
"""In the folder of a sweep: what is to be run."""


def _exactly(text: str, parent: Path) -> Path | None:
    for candidate in (Path(text), parent / text):
        if (candidate / CONFIG).is_file():
            return candidate.resolve() if candidate.is_symlink() else candidate
    return None


def _matching(text: str, parent: Path) -> Iterator[Path]:
    """Runs whose name, or name in their sweep, begins so."""
    for path in run_folders(parent):
        if path.name.startswith(text) or str(path.relative_to(parent)).startswith(text):
            yield path


def stored_config(path: Path) -> TrainConfig:
    """The settings of a run; what its user trusted when it was made is trusted again."""
    recall(path)
    return read_config(path / CONFIG, within=path).over(TrainConfig())

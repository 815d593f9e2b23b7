"""Run folders: making a new one, and the settings of an old one."""

from __future__ import annotations

import itertools
import os
import re
from datetime import datetime
from pathlib import Path

from canter.config import TrainConfig
from canter.config_file import dump_config, read_config
from canter.runs.finding import LATEST
from canter.runs.permissions import recall
from canter.runs.run_folder import CONFIG, RunFolder, never_began


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


def stored_config(path: Path) -> TrainConfig:
    """The settings of a run; what its user trusted when it was made is trusted again."""
    recall(path)
    return read_config(path / CONFIG, within=path).over(TrainConfig())

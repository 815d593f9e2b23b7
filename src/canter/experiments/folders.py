"""Run folders: making a new one, and the settings of an old one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from canter.config import TrainConfig
from canter.config_file import dump_config, read_config
from canter.runs.finding import LATEST, find_run
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
    recall(path)
    return read_config(path / CONFIG, within=path).over(TrainConfig())

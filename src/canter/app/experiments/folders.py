"""Run folders: making a new one, finding an old one, and its settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from canter.config import TrainConfig
from canter.config.files import dump_config, read_config
from canter.core.registry import UserError
from canter.envs import check_known
from canter.runs.changes import ChangeCheck
from canter.runs.permissions import import_trusted_modules
from canter.runs.records import CONFIG, LATEST, find_run, is_unstarted
from canter.runs.run_folder import RunFolder


def check_name(root: Path, name: str | None) -> None:
    """Raise UserError if a run cannot be called `name`, or a run has that name already."""
    if name is None:
        return
    if Path(name).name != name or name == LATEST or not name.isprintable():
        raise UserError(f"--name {name!r} must be a plain folder name that can be printed, and not {LATEST!r}")
    path = root / name
    if path.exists() and not is_unstarted(path):
        raise UserError(f"{path} already exists; choose another --name, or continue the run: canter resume {path}")


def new_run(root: Path, name: str | None, config: TrainConfig) -> RunFolder:
    """Make the folder of a new run; call it once environment and settings are known to work."""
    check_name(root, name)
    path = claim_folder(root, f"{config.env.id}-seed{config.seed}") if name is None else root / name
    return RunFolder(path, config.checkpoint_schedule, settings=dump_config(config))


def open_run(
    path: Path,
    stored: TrainConfig,
    config: TrainConfig,
    *,
    accept_edits: bool = False,
    from_scratch: bool = False,
    notify: Callable[[str], Any] = print,
) -> RunFolder:
    """Return the folder of a run that is resumed with `config`, and whose file has the settings `stored`."""
    check = ChangeCheck(path, config, stored, accept_edits, notify)
    settings = dump_config(config)
    return RunFolder(path, config.checkpoint_schedule, settings=settings, examine=check, from_scratch=from_scratch)


def claim_folder(root: Path, title: str) -> Path:
    """Make a new folder named after a title and the time; safe for runs that start together."""
    root.mkdir(parents=True, exist_ok=True)
    readable_title = re.sub(r"\W+", "-", title)
    for name in numbered_names(f"{readable_title}-{datetime.now():%Y%m%d-%H%M%S}"):
        with suppress(FileExistsError):
            (root / name).mkdir()
            return root / name
    raise AssertionError("there is always a next number")


def check_task(env_id: str, kind: str) -> None:
    """Raise UserError for a name that is neither an environment nor, since it comes to this, a folder of that kind."""
    try:
        check_known(env_id)
    except UserError as error:
        raise UserError(f"{env_id!r} is neither the folder of a {kind} nor an environment: {error}") from error


def new_plan_folder(root: Path, env_id: str, name: str | None, command: str = "sweep") -> Path:
    """Make a new folder for a sweep, a search or a population."""
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


def numbered_names(stem: str) -> Iterator[str]:
    """Yield the stem, then the stem with -2, -3 and so on."""
    return itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))


def find_run_or_policy(text: str | Path, run_dir: Path) -> Path:
    """Return the policy file, or else the run folder, that a text means."""
    return Path(text) if Path(text).is_file() else find_run(str(text), run_dir)


def stored_config(path: Path) -> TrainConfig:
    """Return the settings of a run; import the modules again that its user trusted."""
    import_trusted_modules(path)
    return read_config(path / CONFIG, within=path).over(TrainConfig())

"""Run folders: making a new one, finding an old one, going on with it."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from canter.cli.config_file import dump_config, read_config
from canter.cli.parser import Parser, UsageError
from canter.config import TrainConfig
from canter.registry import nearest
from canter.runs.run_folder import CONFIG, LATEST, RunFolder, never_began

RUNS = Path("runs")


def new_run(parent: Path, name: str | None, config: TrainConfig) -> RunFolder:
    """A folder for a new run; nothing is made before environment and algorithm are known to work."""
    if name is None:
        stem = re.sub(r"\W+", "-", config.env.id)
        name = f"{stem}-seed{config.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    if Path(name).name != name or name == LATEST:
        raise UsageError(f"--name {name!r} must be a plain folder name, and not {LATEST!r}")
    path = parent / name
    if path.exists() and not never_began(path):
        raise UsageError(f"{path} exists already; give another --name, or go on with it: canter resume {path}")
    return RunFolder(path, config.checkpoints, settings=dump_config(config))


def find_run(text: str, parent: Path) -> Path:
    """The run folder that `text` means: a path, `latest`, or the beginning of exactly one name under `parent`."""
    for candidate in (Path(text), parent / text):
        if (candidate / CONFIG).is_file():
            return candidate.resolve() if candidate.is_symlink() else candidate
    names = [path.name for path in parent.iterdir() if (path / CONFIG).is_file()] if parent.is_dir() else []
    names = [name for name in names if name != LATEST]
    matching = [name for name in names if name.startswith(text)]
    if len(matching) == 1:
        return parent / matching[0]
    if matching:
        raise UsageError(f"{text!r} could be any of {', '.join(sorted(matching))}")
    raise UsageError(f"no run {text!r} here or under {parent}: {nearest(text, names)}")


def resume_parser() -> Parser:
    """The arguments of `canter resume`."""
    parser = Parser(
        "resume",
        usage="RUN [--total-steps N] [--run-dir DIR] [--console KIND] [--log NAMES]",
        description="Go on with a run from its newest checkpoint, exactly as if it had never stopped.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, `latest`, or the beginning of its name")
    parser.flag(
        "--total-steps", metavar="N", type=int, help="train up to so many transitions in all; may extend the run"
    )
    parser.flag("--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are looked for (default {RUNS})")
    return parser


def stored_config(path: Path, total_steps: int | None) -> TrainConfig:
    """The settings of a run, with a new budget if one is given."""
    config = read_config(str(path / CONFIG)).over(TrainConfig())
    return config if total_steps is None else replace(config, total_steps=total_steps)

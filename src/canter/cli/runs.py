"""Run folders: making a new one, finding an old one, going on with it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from canter.cli.parser import Parser, UsageError
from canter.config import TrainConfig
from canter.config_file import dump_config, read_config
from canter.plain import from_plain, to_plain
from canter.registry import nearest
from canter.runs.policies import Progress
from canter.runs.run_folder import CONFIG, EDITS, LATEST, RunFolder, never_began
from canter.storage.durable import append
from canter.storage.strict_yaml import parse
from canter.storage.tree import Malformed, parse_json
from canter.storage.untrusted import read_untrusted
from canter.storage.validity import flatten

RUNS = Path("runs")
ABSENT = "(absent)"
MAX_EDITS = 1 << 20


def new_run(parent: Path, name: str | None, config: TrainConfig) -> RunFolder:
    """A folder for a new run; nothing is made before environment and algorithm are known to work."""
    if name is None:
        stem = re.sub(r"\W+", "-", config.env.id)
        stem = f"{stem}-seed{config.seed}-{datetime.now():%Y%m%d-%H%M%S}"
        # Two may begin in one second, and a clock may be put back.
        names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
        name = next(name for name in names if not os.path.lexists(parent / name))
    if Path(name).name != name or name == LATEST or not name.isprintable():
        raise UsageError(f"--name {name!r} must be a plain folder name that can be printed, and not {LATEST!r}")
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
        usage="RUN [--total-steps N] [--accept-edits | --from-scratch] [--run-dir DIR] [--console KIND] [--log NAMES]",
        description="Go on with a run from its newest checkpoint, exactly as if it had never stopped.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, `latest`, or the beginning of its name")
    parser.flag(
        "--total-steps", metavar="N", type=int, help="train up to so many transitions in all; may extend the run"
    )
    parser.flag("--accept-edits", action="store_true", help=f"go on with what was changed in the run's {CONFIG}")
    parser.flag(
        "--from-scratch", action="store_true", help="begin again at the beginning; what there is now is set aside"
    )
    parser.flag("--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are looked for (default {RUNS})")
    return parser


def stored_config(path: Path) -> TrainConfig:
    """The settings of a run."""
    return read_config(path / CONFIG, within=path).over(TrainConfig())


def old_run(path: Path, stored: TrainConfig, config: TrainConfig, arguments: argparse.Namespace) -> RunFolder:
    """The folder of a run that goes on with `config`, where its file says `stored`.

    Settings that were edited since the checkpoint are refused unless accepted, as is a budget that is used up already.
    What changes is written down with the iteration from which it holds.
    """

    def examine(settings: str | None, progress: Progress) -> None:
        trained = stored if settings is None else from_plain(parse(settings, f"checkpoint of {path}")[0], TrainConfig())
        before, wanted = spelled(trained), spelled(config)
        # A kill before the next checkpoint leaves changes that are known, but in no checkpoint.
        noted = before | _noted_edits(path, progress.iteration)
        edits = {} if spelled(stored) == before else _changes(noted, spelled(stored))
        if edits and not arguments.accept_edits:
            raise UsageError(
                f"{path / CONFIG} was edited since iteration {progress.iteration}: {_in_words(edits)}; to go on with "
                f"that: canter resume {path} --accept-edits"
            )
        changes = _changes(noted, wanted)
        if "total_steps" in changes and (config.total_steps or progress.env_steps) < progress.env_steps:
            raise UsageError(
                f"total_steps={config.total_steps} is below the {progress.env_steps:,} steps that are done"
            )
        if changes:
            print(f"From iteration {progress.iteration} on: {_in_words(changes)}")
            note = {"iteration": progress.iteration, "date": f"{datetime.now(UTC):%FT%TZ}", "changes": changes}
            append(path / EDITS, json.dumps(note).encode() + b"\n")

    scratch = arguments.from_scratch
    return RunFolder(path, config.checkpoints, settings=dump_config(config), examine=examine, from_scratch=scratch)


def spelled(config: TrainConfig) -> dict[str, str]:
    """Every setting by its key, spelled out."""
    return {key: repr(value) for key, value in flatten(to_plain(config)).items()}


def _changes(old: dict[str, str], new: dict[str, str]) -> dict[str, list[str]]:
    """Keys whose value differs, with both values."""
    keys = {**old, **new}
    pairs = {key: [old.get(key, ABSENT), new.get(key, ABSENT)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _in_words(changes: dict[str, list[str]]) -> str:
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())


def _noted_edits(path: Path, iteration: int) -> dict[str, str]:
    """Changes that were written down at this iteration or later: key to value, the last one of each."""
    edits: dict[str, str] = {}
    try:
        lines = read_untrusted(path / EDITS, MAX_EDITS, within=path).splitlines()
    except OSError:
        return edits
    for line in lines:
        with contextlib.suppress(Malformed, TypeError, ValueError, LookupError):
            note = parse_json(line)
            if note["iteration"] >= iteration:
                edits |= {str(key): str(new) for key, (_, new) in dict(note["changes"]).items()}
    return edits

"""Going on with a run: what may change meanwhile, and is written down."""

from __future__ import annotations

import argparse
import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canter.cli.parser import Parser, UsageError, add_config_flags
from canter.config import TrainConfig
from canter.config_file import dump_config
from canter.experiments.settings import free_settings
from canter.plain import from_plain, nest, to_plain
from canter.runs.finding import RUNS
from canter.runs.policies import Progress
from canter.runs.run_folder import CONFIG, EDITS, RunFolder
from canter.storage.durable import append
from canter.storage.strict_yaml import parse
from canter.storage.tree import Malformed, parse_json
from canter.storage.untrusted import read_untrusted
from canter.storage.validity import flatten

ABSENT = "(absent)"
MAX_EDITS = 1 << 20


def resume_parser(argv: list[str]) -> Parser:
    """The arguments of `canter resume`."""
    parser = Parser(
        "resume",
        usage="RUN [--total-steps N] [--KEY VALUE ...] [--accept-edits | --from-scratch] [--console KIND]",
        description=(
            "Go on with a run from its newest checkpoint, exactly as if it had never stopped, or with settings that\n"
            "are changed from there on by their flags; what changes is written down with the iteration."
        ),
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, `latest`, or the beginning of its name")
    short = {"--total-steps": ("total_steps", "train up to so many transitions in all; may extend the run")}
    add_config_flags(parser, argv, short)
    parser.flag("--accept-edits", action="store_true", help=f"go on with what was changed in the run's {CONFIG}")
    parser.flag(
        "--from-scratch", action="store_true", help="begin again at the beginning; what there is now is set aside"
    )
    parser.flag("--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are looked for (default {RUNS})")
    return parser


FIXED = {
    "seed": "the random streams of the run go on from where they are",
    "env.id": "another task is another run: canter train ENV --init-from RUN begins one with these weights",
    "env.num_envs": "the checkpoint holds what each of them was doing",
    "algorithm.kind": "the checkpoint is of this algorithm",
    "algorithm.model": "the weights of the checkpoint are of these networks",
    "algorithm.policy": "the weights of the checkpoint are of these networks",
    "algorithm.critic": "the weights of the checkpoint are of these networks",
    "self_play": "the opponents are part of the run",
}
"""Settings that cannot change when a run goes on, and why."""


def resumed_config(stored: TrainConfig, overrides: dict[str, Any]) -> TrainConfig:
    """The settings of a run, changed as flags say where that can be."""
    config = from_plain(nest(overrides, free_settings(stored)), stored)
    for key in differences(spelled(stored), spelled(config)):
        reason = next((why for fixed, why in FIXED.items() if f"{key}.".startswith(f"{fixed}.")), None)
        if reason is not None:
            raise UsageError(f"--{key.replace('_', '-')} cannot change when a run goes on: {reason}")
    return config


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
        edits = {} if spelled(stored) == before else differences(noted, spelled(stored))
        if edits and not arguments.accept_edits:
            raise UsageError(
                f"{path / CONFIG} was edited since iteration {progress.iteration}: {in_words(edits)}; to go on with "
                f"that: canter resume {path} --accept-edits"
            )
        changes = differences(noted, wanted)
        if "total_steps" in changes and (config.total_steps or progress.env_steps) < progress.env_steps:
            raise UsageError(
                f"total_steps={config.total_steps} is below the {progress.env_steps:,} steps that are done"
            )
        if changes:
            print(f"From iteration {progress.iteration} on: {in_words(changes)}")
            note = {"iteration": progress.iteration, "date": f"{datetime.now(UTC):%FT%TZ}", "changes": changes}
            append(path / EDITS, json.dumps(note).encode() + b"\n")

    scratch = arguments.from_scratch
    return RunFolder(path, config.checkpoints, settings=dump_config(config), examine=examine, from_scratch=scratch)


def spelled(config: TrainConfig) -> dict[str, str]:
    """Every setting by its key, spelled out."""
    return {key: repr(value) for key, value in flatten(to_plain(config)).items()}


def differences(old: dict[str, str], new: dict[str, str]) -> dict[str, list[str]]:
    """Keys whose value differs, with both values."""
    keys = {**old, **new}
    pairs = {key: [old.get(key, ABSENT), new.get(key, ABSENT)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def in_words(changes: dict[str, list[str]]) -> str:
    """Old and new value of each."""
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

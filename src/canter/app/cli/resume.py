"""`canter resume`: going on with a run; what may change meanwhile, and is written down."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canter.app.check.before_run import check_machine
from canter.app.cli.parser import Parser, UsageError, add_config_flags, config_overrides, flag_of
from canter.app.cli.training import add_output_flags, agree, train_and_evaluate
from canter.app.experiments.session import announcement
from canter.app.experiments.settings import differences, in_words, spelled, with_overrides
from canter.app.experiments.sweep import stored_config
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.core.plain import from_plain
from canter.core.storage.files import append, read_untrusted
from canter.core.storage.strict import parse
from canter.core.storage.tree import Malformed, parse_json
from canter.runs.policies import Progress
from canter.runs.records import find_run
from canter.runs.run_folder import CONFIG, EDITS, RunFolder

MAX_EDITS = 1 << 20


def resume_command(argv: list[str]) -> None:
    """Go on with a run where it stopped."""
    arguments = resume_parser(argv).parse(argv)
    path = find_run(arguments.run, arguments.run_dir)
    stored = stored_config(path)
    config = resumed_config(stored, config_overrides(arguments))
    check_machine(config)
    agree(config)
    print(announcement(config, f"the settings of {path}"))
    scratch = arguments.from_scratch
    folder = old_run(path, stored, config, accept_edits=arguments.accept_edits, from_scratch=scratch)
    if scratch or not (folder.store.steps() or folder.leftovers()):
        print("It begins at the beginning")
    train_and_evaluate(config, folder, arguments)


def resume_parser(argv: list[str]) -> Parser:
    """The arguments of `canter resume`."""
    parser = Parser(
        "resume",
        "RUN [--total-steps N] [--KEY VALUE ...] [--accept-edits | --from-scratch] [--console KIND]",
        "Go on with a run from its newest checkpoint, exactly as if it had never stopped, or with settings that\n"
        "are changed from there on by their flags; what changes is written down with the iteration.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, `latest`, or the beginning of its name")
    short = {"--total-steps": ("total_steps", "train up to so many transitions in all; may extend the run")}
    add_config_flags(parser, argv, short)
    parser.switch("--accept-edits", f"go on with what was changed in the run's {CONFIG}")
    parser.switch("--from-scratch", "begin again at the beginning; what there is now is set aside")
    parser.run_dir()
    add_output_flags(parser)
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
    config = with_overrides(stored, overrides)
    for key in differences(spelled(stored), spelled(config)):
        reason = next((why for fixed, why in FIXED.items() if f"{key}.".startswith(f"{fixed}.")), None)
        if reason is not None:
            raise UsageError(f"{flag_of(key)} cannot change when a run goes on: {reason}")
    return config


def old_run(
    path: Path, stored: TrainConfig, config: TrainConfig, *, accept_edits: bool = False, from_scratch: bool = False
) -> RunFolder:
    """The folder of a run that goes on with `config`, where its file says `stored`.

    Settings that were edited since the checkpoint are refused unless accepted, as is a budget that is used up already.
    What changes is written down with the iteration from which it holds.
    """

    def examine(settings: str | None, progress: Progress) -> None:
        trained = stored if settings is None else from_plain(parse(settings, f"checkpoint of {path}")[0], TrainConfig())
        before, wanted, now = spelled(trained), spelled(config), progress.iteration
        # A kill before the next checkpoint leaves changes that are known, but in no checkpoint.
        noted = before | _noted_edits(path, now)
        edits = {} if spelled(stored) == before else differences(noted, spelled(stored))
        if edits and not accept_edits:
            advice = f"to go on with that: canter resume {path} --accept-edits"
            raise UsageError(f"{path / CONFIG} was edited since iteration {now}: {in_words(edits)}; {advice}")
        changes, done = differences(noted, wanted), progress.env_steps
        if "total_steps" in changes and (config.total_steps or done) < done:
            raise UsageError(f"total_steps={config.total_steps} is below the {done:,} steps that are done")
        if changes:
            print(f"From iteration {now} on: {in_words(changes)}")
            note = {"iteration": now, "date": f"{datetime.now(UTC):%FT%TZ}", "changes": changes}
            append(path / EDITS, json.dumps(note).encode() + b"\n")

    settings = dump_config(config)
    return RunFolder(path, config.checkpoints, settings=settings, examine=examine, from_scratch=from_scratch)


def _noted_edits(path: Path, iteration: int) -> dict[str, str]:
    """Changes that were written down at this iteration or later: key to value, the last one of each."""
    edits: dict[str, str] = {}
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        lines = read_untrusted(path / EDITS, MAX_EDITS, within=path).splitlines()
    for line in lines:
        with contextlib.suppress(Malformed, TypeError, ValueError, LookupError):
            note = parse_json(line)
            if note["iteration"] >= iteration:
                edits |= {str(key): str(new) for key, (_, new) in dict(note["changes"]).items()}
    return edits

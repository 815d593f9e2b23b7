"""A run on the command line: train, say how it goes, and at the end what to do next; of several ranks one speaks."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from canter.app.cli.parser import Parser
from canter.app.console.console import CONSOLES, make_console
from canter.app.experiments.session import LOGS, InitFrom, carry_out, program
from canter.app.experiments.settings import spelled
from canter.config import TrainConfig
from canter.core import distributed
from canter.core.distributed.world import agree_on, world
from canter.core.machine import describe_versions
from canter.core.registry import nearest
from canter.core.specs import AskedToEnd, Env
from canter.envs.imports import allowed_imports
from canter.runs.permissions import recalled
from canter.runs.run_folder import RunFolder
from canter.training.guard import RunFailed
from canter.training.trainer import RunStopped


def add_output_flags(parser: Parser) -> None:
    """The flags that choose what is shown and where metrics go."""
    kinds = (
        "live (a table, on a terminal), lines (one every few seconds, elsewhere), verbose (a block per rollout) "
        "or quiet"
    )
    parser.flag("--console", "KIND", kinds, type=one_of("auto", *CONSOLES), default="auto")

    def places(text: str) -> list[str]:
        return [one_of(*LOGS)(name) for name in text.split(",")]

    also = "metrics also to tensorboard, wandb or both: --log tensorboard,wandb"
    parser.flag("--log", "NAMES", also, type=places, default=[])


def one_of(*names: str) -> Callable[[str], str]:
    """The type of a flag that takes one of these names."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown name {text!r}, {nearest(text, names)}")
        return text

    return check


def train_and_evaluate(
    config: TrainConfig,
    folder: RunFolder,
    arguments: argparse.Namespace,
    env: Env | None = None,
    init_from: InitFrom | None = None,
) -> None:
    """Train in a run folder, show how it goes, then say how good the policy is without noise; see `carry_out`."""
    writers = [make_console(arguments.console), *(LOGS[name](folder.path) for name in arguments.log)]
    try:
        with sigterm_unwinds():
            say = partial(print, flush=True)  # at once, also where the output goes to a file
            carry_out(config, folder, env=env, writers=writers, init_from=init_from, say=say)
    except RunStopped as stop:
        complain(f"{stop}; go on with: {resume_line(folder.path)}")
        leave(128 + stop.received)
    except KeyboardInterrupt:
        lost = "stopped at once, without saving what was learned since the last checkpoint"
        complain(f"{lost}; go on with: {resume_line(folder.path)}")
        leave(128 + signal.SIGINT)
    except RunFailed as failed:
        complain(f"{failed.what}\n{failed.kept}. Go on with: {resume_line(folder.path)}", failed.rank)
        world.end()  # all ranks come here, and none may leave, and end all, before the folder is closed
        leave(1)


def resume_line(path: Path) -> str:
    """What to type to go on with a run, with the permissions that this command had where the run has not kept them."""
    permissions = [f"--allow-import {module}" for module in sorted(allowed_imports()) if module not in recalled(path)]
    ranks = distributed.world_size()
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)
    how = f"--standalone --nproc-per-node {ranks}" if here else "(as before)"
    start = program() if ranks == 1 else f"torchrun {how} -m canter"
    return " ".join([start, *permissions, "resume", shlex.quote(str(path))])


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does, step by step: the terminal is restored and the run's lock given back."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise AskedToEnd(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def join_ranks() -> None:
    """Join the group of ranks if torchrun started this process; only rank 0 writes to the terminal."""
    if world.start() and distributed.rank() > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - to the end of the program
        logging.disable(logging.WARNING)


def complain(text: str, rank: int | None = None) -> None:
    """Print an error, once for all ranks: the first cause is what is shown, of this rank or of the one named."""
    if world.first_to_say(text):
        who = f"rank {distributed.rank() if rank is None else rank}: " if distributed.world_size() > 1 else ""
        print(f"canter: {who}{text}", file=sys.stderr)


def leave(code: int) -> NoReturn:
    """End the program; as one of several ranks at once, as others may be waiting for this one for ever."""
    if distributed.active():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def agree(config: TrainConfig) -> None:
    """Refuse to go on where ranks were given different settings, or run different versions."""
    if distributed.active():
        versions = {f"the version of {name}": str(version) for name, version in describe_versions().items()}
        agree_on(versions | spelled(config))

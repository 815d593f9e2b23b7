"""A run on the command line: train, say how it goes, and at the end what came of it and what to do next."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from canter import distributed
from canter.cli.parser import Parser
from canter.cli.ranks import complain, leave
from canter.config import TrainConfig
from canter.console.console import CONSOLES, make_console
from canter.distributed.world import world
from canter.envs.imports import allowed_imports
from canter.experiments.init_from import InitFrom
from canter.experiments.session import LOGS, carry_out, program
from canter.registry import nearest
from canter.runs.permissions import recalled
from canter.runs.run_folder import RunFolder
from canter.specs import AskedToEnd, Env
from canter.training.rescue import RunFailed
from canter.training.trainer import RunStopped


def add_output_flags(parser: Parser) -> None:
    """The flags that choose what is shown and where metrics go."""
    parser.flag(
        "--console",
        metavar="KIND",
        type=one_of("auto", *CONSOLES),
        default="auto",
        help="live (a table, on a terminal), lines (one every few seconds, elsewhere), verbose (a block per rollout) "
        "or quiet",
    )
    parser.flag(
        "--log",
        metavar="NAMES",
        type=lambda text: [one_of(*LOGS)(name) for name in text.split(",")],
        default=[],
        help="metrics also to tensorboard, wandb or both: --log tensorboard,wandb",
    )


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
            carry_out(config, folder, env=env, writers=writers, init_from=init_from, say=say)
    except RunStopped as stop:
        complain(f"{stop}; go on with: {resume_line(folder.path)}")
        leave(128 + stop.received)
    except KeyboardInterrupt:
        complain(
            "stopped at once, without saving what was learned since the last checkpoint; go on with: "
            f"{resume_line(folder.path)}"
        )
        leave(128 + signal.SIGINT)
    except RunFailed as failed:
        complain(f"{failed.what}\n{failed.kept}. Go on with: {resume_line(folder.path)}", failed.rank)
        world.end()  # all ranks come here, and none may leave, and end all, before the folder is closed
        leave(1)


def say(text: str) -> None:
    """Print it at once, also where the output goes to a file."""
    print(text, flush=True)


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

"""Ranks on the command line: one of them speaks, and all go on with the run that they had before a restart."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from canter import distributed
from canter.cli.parser import UsageError
from canter.cli.runs import old_run, spelled
from canter.config import TrainConfig
from canter.config_file import dump_config
from canter.distributed.world import agree_on, from_rank_0, world
from canter.experiments.folders import check_name, new_run
from canter.machine import describe_versions
from canter.runs.run_folder import CONFIG, RunFolder

RUN = "run"
"""Where the ranks note the folder of their run."""


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


def check_folder(arguments: argparse.Namespace) -> None:
    """Refuse a name that no new run can have."""
    if arguments.resume_if_present and arguments.name is None:
        raise UsageError("--resume-if-present needs the --name of the run")
    if not arguments.resume_if_present and distributed.rank() == 0 and world.kept(RUN) is None:
        check_name(Path(arguments.run_dir), arguments.name)


def folder_of_ranks(arguments: argparse.Namespace, config: TrainConfig) -> RunFolder:
    """A folder for a new run; or that of the run that torchrun restarts, or that is there and may be gone on with."""
    parent, name = Path(arguments.run_dir), arguments.name
    if distributed.rank() > 0:
        return RunFolder(from_rank_0(None), config.checkpoints, settings=dump_config(config))
    before = world.kept(RUN)
    if before is None and arguments.resume_if_present and (parent / name / CONFIG).is_file():
        before = str(parent / name)
    if before is None:
        folder = new_run(parent, name, config)
    else:
        arguments.accept_edits, arguments.from_scratch = False, False
        folder = old_run(Path(before), config, config, arguments)
    world.keep(RUN, str(folder.path))
    from_rank_0(str(folder.path))
    return folder

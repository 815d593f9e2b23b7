"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from canter.cli.listing import envs_command, presets_command
from canter.cli.parser import UsageError
from canter.cli.train import resume_command, train_command
from canter.registry import nearest
from canter.runtime.checkpoint import NoCheckpoint
from canter.runtime.lock import RunLocked

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train_command,
    "resume": resume_command,
    "envs": envs_command,
    "presets": presets_command,
}
"""What follows `canter`; each takes the arguments behind its name, and its docstring is its help."""


def overview() -> str:
    """The help of `canter` itself."""
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:<{width}}  {(command.__doc__ or '').partition(chr(10))[0]}" for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: canter COMMAND ...",
            "",
            "Train control policies.",
            "",
            "commands:",
            *lines,
            "",
            "`canter COMMAND --help` explains one. To begin: canter train CartPole-v1",
        ]
    )


def dispatch(argv: list[str]) -> None:
    """Run the command that the arguments name."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
    elif argv[0] in COMMANDS:
        COMMANDS[argv[0]](argv[1:])
    else:
        raise UsageError(f"unknown command {argv[0]!r}: {nearest(argv[0], COMMANDS)}")


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `canter` command; what the user got wrong is one line on stderr and exit code 2."""
    # Networks of this size are slower with several threads than with one.
    torch.set_num_threads(1)
    try:
        dispatch(sys.argv[1:] if argv is None else argv)
    except (ValueError, KeyError, ImportError, RunLocked, NoCheckpoint) as error:
        # A KeyError's own text is the repr of its message.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"canter: {' '.join(str(message).split())}", file=sys.stderr)
        sys.exit(2)

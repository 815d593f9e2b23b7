"""The command line: dispatch to the commands of the table in `canter.app.cli.commands`."""

from __future__ import annotations

import argparse
import gc
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canter import __version__
from canter.app.cli.commands import COMMANDS, parse_arguments
from canter.app.cli.index import gymnasium_ids, read_index
from canter.app.cli.parser import Command, Parser, UsageError
from canter.app.cli.process import exit_on_error, exit_process, join_ranks, report_error
from canter.app.console.text import printable_output, two_columns
from canter.core.registry import nearest

HELP = """\
usage: canter COMMAND ...

Train control policies.

commands:
{commands}

`canter COMMAND --help` explains a command. To start: canter demo
--allow-import MODULE lets any command import your module: for what it registers, and for environments
called MODULE:NAME. A run remembers the modules it was made with."""


def main(argv: list[str] | None = None) -> None:
    """Run the `canter` command; for errors and exit codes see `exit_on_error`."""
    with printable_output() as out:
        try:
            dispatch(sys.argv[1:] if argv is None else argv)
            out.flush()
        except KeyboardInterrupt:
            report_error("stopped by SIGINT")
            exit_process(128 + signal.SIGINT)
        except Exception as error:
            exit_on_error(error)
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            print(f"canter: not all of the output could be written: {out.lost}", file=sys.stderr)
            sys.exit(1)


def dispatch(argv: list[str]) -> None:
    """Run the command that the arguments name."""
    name, *rest = take_permissions(argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP.format(commands=two_columns({name: command.summary for name, command in COMMANDS.items()})))
        return
    if name in ("--version", "-V"):
        print(f"canter {__version__}")
        return
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}: {nearest(name, COMMANDS)}")
    command = COMMANDS[name]
    if [name, *rest] != argv:  # modules of the user were imported and may have registered anything
        load_everything()
    elif "canter.app.api" not in sys.modules:
        check_arguments(name, command, rest)
    if not command.light:
        load_everything()
    if command.ranked:
        join_ranks()
    load_function(command)(parse_arguments(name, rest))


def take_permissions(argv: list[str]) -> list[str]:
    """Import the modules of `--allow-import MODULE`, a flag of every command; return the rest."""
    rest: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if flag.replace("_", "-") != "--allow-import":
            rest.append(token)
            continue
        module = value if equals else next(tokens, None)
        if module is None:
            raise UsageError("--allow-import needs the module to trust, such as my_package")
        from canter.envs.imports import allow_import, import_trusted

        allow_import(module)
        import_trusted(module)
    return rest


def check_arguments(name: str, command: Command, argv: list[str]) -> None:
    """Answer `--help` and refuse unknown names from the cached index, without torch."""
    parser = Parser(name, command)
    if "--help" in argv or "-h" in argv:
        parser.print_help()
        sys.exit(0)
    flags = [token.partition("=")[0] for token in argv if token.startswith("--")]
    unknown = next((flag for flag in flags if not parser.knows(flag)), None)
    if unknown is not None:
        raise parser.unknown_flag(unknown)
    if name in ("train", "check") and argv and not argv[0].startswith("-"):
        check_env(argv[0])


def check_env(env_id: str) -> None:
    """Refuse an unknown environment id, unless only its scheme or its package knows the ids."""
    scheme, colon, name = env_id.rpartition(":")
    if scheme == "tensor":
        kind = "environment tensor:"
        known = read_index("tensor")
    elif colon or "/" in env_id or env_id in read_index("gymnasium") or Path(env_id).exists():
        return
    else:
        kind = "Gymnasium environment "
        known = gymnasium_ids()
    if name not in known:
        raise UsageError(f"unknown {kind}{name!r}: {nearest(name, known)} `canter envs` lists what there is")


def load_everything() -> None:
    """Import everything that settings may name, and torch."""
    gc.disable()  # these objects stay: searching them for garbage, here and at exit, takes a fifth of the time
    importlib.import_module("canter.app.api")
    import torch

    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)  # networks of this size are slower with several


def load_function(command: Command) -> Callable[[argparse.Namespace], Any]:
    """Import the function of a command."""
    module, _, function = command.function.partition(":")
    return getattr(importlib.import_module(f"canter.app.cli.{module}"), function)

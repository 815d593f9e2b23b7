"""The command line."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from tempfile import NamedTemporaryFile

import torch

from canter.cli.check import check_command
from canter.cli.evaluation import eval_command
from canter.cli.explain import explain_command
from canter.cli.export import export_command
from canter.cli.importing import import_command
from canter.cli.listing import envs_command, presets_command, runs_command, summaries
from canter.cli.parser import UsageError
from canter.cli.play import play_command
from canter.cli.ranks import complain, join_ranks, leave
from canter.cli.report import report_command
from canter.cli.train import distill_command, resume_command, train_command
from canter.console.printable import printable_output
from canter.distributed import RankLost
from canter.envs.gymnasium_contract import place_of, text_of
from canter.envs.imports import allow_import
from canter.registry import nearest
from canter.storage.lock import RunLocked

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train_command,
    "distill": distill_command,
    "resume": resume_command,
    "play": play_command,
    "eval": eval_command,
    "export": export_command,
    "check": check_command,
    "import": import_command,
    "explain": explain_command,
    "runs": runs_command,
    "report": report_command,
    "envs": envs_command,
    "presets": presets_command,
}
"""What follows `canter`; each takes the arguments behind its name, and its docstring is its help."""


HELP = """\
usage: canter COMMAND ...

Train control policies.

commands:
{commands}

`canter COMMAND --help` explains one. To begin: canter train CartPole-v1
--allow-import MODULE lets any of them import that module of yours: for what it registers, and for
environments called MODULE:NAME."""


def take_permissions(argv: list[str]) -> list[str]:
    """The arguments without `--allow-import MODULE`, which every command understands."""
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
        allow_import(module)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where `python -m` would look; last, so that it hides nothing
        importlib.import_module(module)
    return rest


def dispatch(argv: list[str]) -> None:
    """Run the command that the arguments name."""
    argv = take_permissions(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP.format(commands=summaries(COMMANDS)))
    elif argv[0] in COMMANDS:
        if argv[0] in ("train", "resume"):
            join_ranks()
        COMMANDS[argv[0]](argv[1:])
    else:
        raise UsageError(f"unknown command {argv[0]!r}: {nearest(argv[0], COMMANDS)}")


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `canter` command; what the user got wrong is one line on stderr and exit code 2.

    Any other error is one line too, with exit code 1; its traceback goes to a file.
    """
    # Networks of this size are slower with several threads than with one.
    torch.set_num_threads(1)
    with printable_output() as out:
        try:
            dispatch(sys.argv[1:] if argv is None else argv)
            out.flush()
        except RankLost:  # whoever knows why has said so
            leave(1)
        except (ValueError, KeyError, ImportError, OSError, RunLocked) as error:
            # A KeyError's own text is the repr of its message.
            message = error.args[0] if isinstance(error, KeyError) and error.args else error
            complain(" ".join(str(message).split()))
            leave(2)
        except KeyboardInterrupt:
            complain("stopped by SIGINT")
            leave(128 + signal.SIGINT)
        except Exception as error:  # of an environment or another part of the user's own, or a mistake in Canter
            complain(unexpected(error))
            leave(2 if out_of_memory(error) else 1)
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            print(f"canter: not all of the output could be written: {out.lost}", file=sys.stderr)
            sys.exit(1)


def out_of_memory(error: Exception) -> bool:
    """Whether there was not enough memory, of the machine or of the GPU."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error))


def unexpected(error: Exception) -> str:
    """One line about an error that nothing foresaw; its traceback goes to a file."""
    if out_of_memory(error):
        first = (str(error).splitlines() or [""])[0]
        return f"there is not enough memory for this: {type(error).__name__} {first}"
    with NamedTemporaryFile("w", prefix="canter-", suffix=".txt", delete=False, errors="replace") as file:
        file.write("".join(traceback.format_exception(error)))
    notes = " ".join(getattr(error, "__notes__", ()))
    what = f"{type(error).__name__}: {text_of(error)} ({place_of(error)})"
    return f"{what}. {notes + '. ' if notes else ''}The traceback is in {file.name}"

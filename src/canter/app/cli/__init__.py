"""The command line."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import NoReturn

from canter import __version__
from canter.app.cli.index import UsageError, check_arguments
from canter.app.console.text import printable_output, two_columns
from canter.core.registry import UserError, nearest


@dataclass(frozen=True)
class Command:
    """What follows `canter`: where its function is, which takes the arguments behind its name, and what it does."""

    place: str
    summary: str
    """The first line of the function's docstring."""
    light: bool = False
    """Whether it answers without torch."""

    def load(self) -> Callable[[list[str]], None]:
        """The function."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(f"canter.app.cli.{module}"), name)


COMMANDS: dict[str, Command] = {
    "train": Command("train:train_command", "Train a policy and print how it learns."),
    "distill": Command("train:distill_command", "Train a student to do what a teacher does that sees more."),
    "resume": Command("resume:resume_command", "Go on with a run where it stopped."),
    "sweep": Command("sweep:sweep_command", "Train many runs: seeds, and settings with several values."),
    "play": Command("evaluation:play_command", "Watch a policy in a window, or record a video of it."),
    "eval": Command("evaluation:eval_command", "Play many episodes and say how good a policy is."),
    "export": Command(
        "export:export_command", "Write a policy as ONNX and torch.export files that run without Canter."
    ),
    "check": Command("check:check_command", "Look at an environment and the settings for it before training."),
    "import": Command("export:import_command", "Turn a settings file of rl_games or RSL-RL into one of Canter's."),
    "explain": Command("explain:explain_command", "Say what made the NaN or infinity of a run."),
    "runs": Command("listing:runs_command", "List the runs and how far they have come.", light=True),
    "report": Command("report:report_command", "Write a page about one run, or one that compares several."),
    "envs": Command("listing:envs_command", "List the environments and how their ids are written.", light=True),
    "presets": Command("listing:presets_command", "List the known-good settings.", light=True),
}

RANKED = ("train", "distill", "resume")
"""What torchrun may start as several ranks."""


HELP = """\
usage: canter COMMAND ...

Train control policies.

commands:
{commands}

`canter COMMAND --help` explains one. To begin: canter train CartPole-v1
--allow-import MODULE lets any of them import that module of yours: for what it registers, and for
environments called MODULE:NAME. A run that you made remembers it."""


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
        from canter.envs.imports import allow_import, import_trusted

        allow_import(module)
        import_trusted(module)
    return rest


def dispatch(argv: list[str]) -> None:
    """Run the command that the arguments name."""
    rest = take_permissions(argv)
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(HELP.format(commands=two_columns({name: command.summary for name, command in COMMANDS.items()})))
    elif rest[0] in ("--version", "-V"):
        print(f"canter {__version__}")
    elif rest[0] in COMMANDS:
        command = COMMANDS[rest[0]]
        if rest == argv:  # nothing of the user's own was imported
            check_arguments(rest[0], rest[1:])
        if not command.light:
            load_everything()
        if rest[0] in RANKED:
            from canter.app.cli.training import join_ranks

            join_ranks()
        command.load()(rest[1:])
    else:
        raise UsageError(f"unknown command {rest[0]!r}: {nearest(rest[0], COMMANDS)}")


def load_everything() -> None:
    """Import all that may be named in settings, and torch."""
    gc.disable()  # what comes now stays: looking for garbage in it, here and at the end, takes a fifth of the time
    importlib.import_module("canter.app.api")
    import torch

    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)  # networks of this size are slower with several


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `canter` command; what the user got wrong is one line on stderr and exit code 2.

    Any other error is one line too, with exit code 1; its traceback goes to a file.
    """
    with printable_output() as out:
        try:
            dispatch(sys.argv[1:] if argv is None else argv)
            out.flush()
        except KeyboardInterrupt:
            end_with("stopped by SIGINT", 128 + signal.SIGINT)
        except Exception as error:
            if type(error).__name__ == "RankLost":  # the rank that failed has reported the reason
                end_with(None, 1)
            if is_user_error(error):
                end_with(" ".join(str(error).split()), 2)
            # From the user's environment or another part of their own, or a mistake in Canter.
            end_with(unexpected(error), 2 if is_out_of_memory(error) else 1)
        if out.lost is not None and not isinstance(out.lost, BrokenPipeError):
            print(f"canter: not all of the output could be written: {out.lost}", file=sys.stderr)
            sys.exit(1)


def end_with(text: str | None, code: int) -> NoReturn:
    """End the program with an error; of several ranks only one says it."""
    training = sys.modules.get("canter.app.cli.training")
    if training is not None:
        if text is not None:
            training.complain(text)
        training.leave(code)
    print(f"canter: {text}", file=sys.stderr)
    sys.exit(code)


def is_user_error(error: Exception) -> bool:
    """Return True if the message of an error tells the user all there is to know, without a traceback."""
    if isinstance(error, OSError):
        return error.errno is not None or isinstance(error, UserError)
    if isinstance(error, ImportError):  # a package that is not installed, but not a broken import of Canter's own
        return (error.name or "").partition(".")[0] != "canter"
    return isinstance(error, UserError)


OUT_OF_MEMORY = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Text of RuntimeErrors that torch raises, besides `torch.OutOfMemoryError`, when memory is exhausted."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the machine or the GPU had too little memory."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def unexpected(error: Exception) -> str:
    """One line about an error that nothing foresaw; its traceback goes to a file."""
    if is_out_of_memory(error):
        first = (str(error).splitlines() or [""])[0]
        return f"there is not enough memory for this: {type(error).__name__} {first}"
    with NamedTemporaryFile("w", prefix="canter-", suffix=".txt", delete=False, errors="replace") as file:
        file.write("".join(traceback.format_exception(error)))
    notes = " ".join(getattr(error, "__notes__", ()))
    from canter.core.specs import EnvFailed
    from canter.envs.contract import place_of, text_of

    what = text_of(error)
    if not isinstance(error, EnvFailed):  # which says so itself
        what = f"{type(error).__name__}: {what} ({place_of(error)})"
    return f"{what}. {notes + '. ' if notes else ''}The traceback is in {file.name}"

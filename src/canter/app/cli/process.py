"""Start and end of a command's process: ranks, signals, error messages and exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import NoReturn

from canter.core.registry import UserError
from canter.runs.records import TRACEBACK_IN

OUT_OF_MEMORY = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Text of RuntimeErrors, other than `torch.OutOfMemoryError`, that torch raises when memory is
exhausted."""
MAX_USER_ERROR = 10_000
"""Characters of an error meant for the user; a longer one, of the user's code, goes to a file."""


def join_ranks() -> None:
    """Join the process group if torchrun started this process; only rank 0 writes output."""
    from canter.core import distributed
    from canter.core.distributed.world import world

    if world.start() and distributed.rank() > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - to the end of the program
        logging.disable(logging.WARNING)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: restore the terminal and release the run's lock."""
    from canter.core.specs import TerminationRequested

    def raise_exit(number: int, frame: FrameType | None) -> None:
        raise TerminationRequested(128 + number)

    before = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report_error(text: str, rank: int | None = None) -> None:
    """Print an error once for all ranks: the first cause, with the rank where it occurred."""
    prefix = ""
    if "canter.core.distributed.world" in sys.modules:
        from canter.core import distributed
        from canter.core.distributed.world import world

        if not world.is_first_report(text):
            return
        if distributed.world_size() > 1:
            prefix = f"rank {distributed.rank() if rank is None else rank}: "
    print(f"canter: {prefix}{text}", file=sys.stderr)


def exit_process(code: int) -> NoReturn:
    """End the program; one of several ranks ends at once, as the others may wait for it."""
    distributed = sys.modules.get("canter.core.distributed")  # without importing torch
    if distributed is not None and distributed.active():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def exit_on_error(error: Exception) -> NoReturn:
    """Report an error in one line and end the program.

    Errors meant for the user have exit code 2. Others, from the user's own code or a mistake in
    Canter, have exit code 1 and a file with the traceback.
    """
    if type(error).__name__ == "RankLost":  # the rank that failed has reported the reason
        exit_process(1)
    if is_user_error(error) and len(str(error)) <= MAX_USER_ERROR:
        report_error(" ".join(str(error).split()))
        exit_process(2)
    if is_out_of_memory(error):
        first_line = (str(error).splitlines() or [""])[0]
        report_error(f"there is not enough memory for this: {type(error).__name__} {first_line}")
        exit_process(2)
    report_error(describe_unexpected(error))
    exit_process(1)


def is_user_error(error: Exception) -> bool:
    """Return True if the message of an error is enough for the user, without a traceback."""
    if isinstance(error, OSError):
        return error.errno is not None or isinstance(error, UserError)
    if isinstance(error, ImportError):  # a package that is not installed, but not a broken import of Canter's own
        return (error.name or "").partition(".")[0] != "canter"
    return isinstance(error, UserError)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the machine or the GPU had too little memory."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def describe_unexpected(error: Exception) -> str:
    """Return one line about an unexpected error; its traceback is written to a file, unless its run did."""
    from canter.core.specs import EnvFailed
    from canter.envs.failures import place_of, text_of

    message = text_of(error)
    if not isinstance(error, EnvFailed):  # whose message names the environment and the place
        message = f"{type(error).__name__}: {message} ({place_of(error)})"
    notes = " ".join(getattr(error, "__notes__", ()))
    if notes:
        message = f"{message}. {notes}"
    if TRACEBACK_IN in notes:
        return message
    with NamedTemporaryFile("w", prefix="canter-", suffix=".txt", delete=False, errors="replace") as file:
        file.write("".join(traceback.format_exception(error)))
    return f"{message}. {TRACEBACK_IN} {file.name}"

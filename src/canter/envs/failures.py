"""Failures and hangs of environments: which environment, which step, which line of code.

N environments are often stepped one after the other, or by several threads. Whoever calls them
records the number of the environment in `EnvCalls`: an error then carries that number, and the
watchdog can tell which call does not return.
"""

from __future__ import annotations

import logging
import math
import mmap
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Self

from canter.core.specs import INTERRUPTS, ContractBroken, EnvFailed

_log = logging.getLogger(__name__)

HANG_WARNING_SECONDS = 60.0
"""Seconds after which a log line says that an environment is slow to return."""
MAX_CHARACTERS = 2_000
"""Characters of an error's text that are printed."""
MARGIN = 500
"""Characters that may be added to a text that was cut, such as its place."""
STEPPING_THREADS = "canter-env"
"""Prefix of the names of threads that step environments."""
_all_calls: weakref.WeakSet[EnvCalls] = weakref.WeakSet()


class EnvNote(str):
    """A note on an environment's error: text for a traceback, and the environment's number."""

    number: int


class EnvCalls:
    """Watched calls of numbered environments; inside `with`, set `number` before each call.

    An error that leaves the block gets the number as a note, see `env_number`.
    """

    __slots__ = ("__weakref__", "number", "thread")

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.thread = 0
        """Identifier of the thread that is in the block, 0 if none is."""
        _all_calls.add(self)

    def __enter__(self) -> Self:
        """Make the calls of this thread visible to the watchdog."""
        self.thread = get_ident()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Add the number to an error."""
        self.thread = 0
        number = self.number
        if error is not None and number is not None:
            note = EnvNote(f"in environment {number}")
            note.number = number
            with suppress(Exception):  # an error class may forbid attributes
                error.add_note(note)


class SharedEnvCalls(EnvCalls):
    """Calls in a forked process, whose parent can read the number too; None outside of the block."""

    def __init__(self) -> None:
        self._number = memoryview(mmap.mmap(-1, 8)).cast("q")
        super().__init__()

    @property
    def number(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of the environment that is being called."""
        number = self._number[0]
        return None if number < 0 else number

    @number.setter
    def number(self, number: int | None) -> None:
        self._number[0] = -1 if number is None else number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Add the number to an error, and remove it here."""
        super().__exit__(kind, error, _)
        self.number = None


def env_number(error: BaseException) -> int | None:
    """Return the number of the environment that raised an error, or None if it is unknown."""
    if isinstance(error, EnvFailed):
        return error.row
    numbers = [note.number for note in getattr(error, "__notes__", ()) if isinstance(note, EnvNote)]
    return numbers[-1] if numbers else None


class EnvironmentFailed(EnvFailed):
    """An environment raised, died or broke its contract; the message says where."""


def failure(error: BaseException, call: str, step: int | None, before: int = 0) -> EnvironmentFailed:
    """Return an environment's error with its number, the call, its step and its line.

    `before` is the number of environments of lower ranks, which are counted first.
    """
    if isinstance(error, EnvironmentFailed):
        return error
    number = env_number(error)
    name = "the environment" if number is None else f"environment {before + number}"
    when = "" if step is None else f" at its step {step}"
    trace = ""
    if isinstance(error, EnvFailed):
        message = f"{name} failed{when}: {text_of(error)}"
        trace = error.trace
    elif isinstance(error, ContractBroken):
        text = text_of(error)
        named = text.startswith(("reset()", "step()"))
        message = f"{name}{when}: {text}" if named else f"{name}{when}: {call}() {text}"
    else:
        message = f"{name} failed{when}: {call}() raised {format_error(error)}"
    return EnvironmentFailed(message, number, trace)


def to_env_failed(error: BaseException, call: str) -> EnvFailed:
    """Return an error of a call in another process as one that can be sent, with its number and traceback."""
    text = text_of(error) if isinstance(error, ContractBroken) else f"{call}() raised {format_error(error)}"
    return EnvFailed(text, env_number(error), traceback.format_exc())


@contextmanager
def attributed(call: str, step: int | None = None) -> Iterator[None]:
    """Convert errors inside to `EnvironmentFailed`, except for interrupts and signals."""
    try:
        yield
    except INTERRUPTS:
        raise
    except BaseException as error:
        raise failure(error, call, step) from error


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error, or "no place" if it has none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place"


def text_of(error: BaseException) -> str:
    """Return the text of an error on one line, cut if it is long; "" if its `__str__` raises."""
    try:
        return shortened(" ".join(str(error).split()))
    except Exception:
        return ""


def shortened(text: str) -> str:
    """Return at most `MAX_CHARACTERS` of a text that is printed; tracebacks have all of it."""
    if len(text) <= MAX_CHARACTERS + MARGIN:
        return text
    return f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters, all of them in the traceback)"


def format_error(error: BaseException) -> str:
    """Return an error as its type, text and place."""
    return f"{type(error).__name__}: {text_of(error)} ({place_of(error)})"


def format_exit(code: int) -> str:
    """Return the exit code of a process, or the signal that ended it, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Watchdog:
    """Calls `late(seconds)` once for each `begin` that lasts longer than `seconds`.

    `begin` only reads the clock; a thread checks every quarter of the time, at most every second.
    The thread starts with the first `begin` and stops with `close`, or when nothing refers to the
    watchdog any more.
    """

    def __init__(self, seconds: float, late: Callable[[float], None]) -> None:
        self.seconds = seconds
        self.late = late
        self._since: float | None = None
        self._reported: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the clock for the next call."""
        self._since = time.monotonic()
        # An environment that nobody closed is closed when Python exits; no thread can be started or
        # joined then.
        if self._thread is None and not sys.is_finalizing():
            pause = min(self.seconds / 4, 1.0)
            arguments = (weakref.ref(self), self._closed, pause)  # weak, or the thread would keep the watchdog alive
            self._thread = threading.Thread(target=_watch, args=arguments, name="canter-watchdog", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the clock: the call has returned."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None and not sys.is_finalizing():
            self._thread.join()

    def check(self) -> None:
        """Report the running call if it takes too long."""
        since = self._since
        if since is not None and since != self._reported and time.monotonic() - since > self.seconds:
            self._reported = since
            self.late(time.monotonic() - since)


def _watch(reference: weakref.ref[Watchdog], closed: threading.Event, pause: float) -> None:
    """Check from time to time, until the watchdog is closed or gone."""
    while not closed.wait(pause):
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.check()
        del watchdog


def locate_hang(thread: int) -> str:
    """Return the number of the environment that a thread waits for, and its `file:line`."""
    # NOTE: a call that does not return cannot report its line; the interpreter's frames are the one
    # place that has it.
    frames = sys._current_frames()
    names = {running.ident: running.name for running in threading.enumerate()}
    steppers = [ident for ident in frames if names.get(ident, "").startswith(STEPPING_THREADS)]
    numbers = {calls.thread: calls.number for calls in list(_all_calls)}
    # While other threads step environments, the waiting thread itself is in no call.
    in_call = [ident for ident in (thread, *steppers) if numbers.get(ident) is not None]
    ident = [*in_call, *steppers, thread][0]
    name = f"environment {numbers[ident]}" if ident in in_call else "the environment"
    if ident not in frames:
        return name
    line = traceback.extract_stack(frames[ident])[-1]
    return f"{name}, in {line.name} ({line.filename}:{line.lineno})"


def warn_of_hanging(thread: int, seconds: float) -> None:
    """Log which environment has not returned from its call."""
    _log.warning("waiting for %s, which has not returned for %.0f s", locate_hang(thread), seconds)


@contextmanager
def watched(seconds: float = math.inf) -> Iterator[Watchdog]:
    """Log a warning if this thread's call of an environment takes too long."""
    watchdog = Watchdog(min(HANG_WARNING_SECONDS, seconds), partial(warn_of_hanging, get_ident()))
    watchdog.begin()
    try:
        yield watchdog
    finally:
        watchdog.close()

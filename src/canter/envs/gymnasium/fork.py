"""A forked process that answers calls, and may raise, die or hang.

A `Fork` is a copy of this process, with the environments as they are at that moment; it writes
observations to memory that both processes see.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from canter.core.specs import EnvFailed
from canter.envs.failures import SharedEnvCalls, format_exit, to_env_failed

EMPTY, RESULT = b"\0", b"\1"
"""First byte of a fork's answer; the result itself follows the second."""
DEATH_SECONDS = 5.0
"""Seconds that a process may take to end after it closed its pipes."""
_pipe_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
"""This process's ends of all pipes."""


def shared(array: np.ndarray) -> np.ndarray:
    """Return a copy in memory that this process will share with those forked from it."""
    memory = mmap.mmap(-1, max(1, array.nbytes))
    copy = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


class Fork:
    """A forked process that calls the functions of `calls` on request and returns the results.

    A request is one byte, and most answers are one byte. Read and written as such, past the lengths
    that a `Connection` sends, and through pipes, not a socket, both sides are awake sooner: it
    happens in every step.
    """

    def __init__(self, calls: dict[str, Callable[[], Any]], running: SharedEnvCalls) -> None:
        requests, self.requests = Pipe(duplex=False)
        self.answers, answers = Pipe(duplex=False)
        self.codes = {name: bytes([code]) for code, name in enumerate(calls)}
        self.running = running
        """The number of the environment that the process calls."""
        self.call = ""
        """The last call that was requested."""
        self.busy = False
        """True while an answer is on its way."""
        self.cause_of_death = ""
        self._killed_for = ""
        """Reason why this process killed it."""
        with warnings.catch_warnings():
            # Of Python 3.12, because of other threads' locks: those of Python and malloc are taken
            # care of.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                self.requests.close()
                self.answers.close()
                _serve(requests, answers, list(calls.items()))
            finally:
                os._exit(0)  # exit handlers are for the parent process
        requests.close()
        answers.close()
        _pipe_ends.update((self.requests, self.answers))

    def ask(self, call: str) -> None:
        """Start a call in the process; there must be none under way."""
        self.call = call
        try:
            os.write(self.requests.fileno(), self.codes[call])
        except OSError:
            raise self._death() from None
        self.busy = True

    def result(self) -> Any:
        """Return the result of the call; raise `EnvFailed` if it raised or the process died."""
        try:
            kind = os.read(self.answers.fileno(), 1)
            answer = [] if kind == EMPTY else self.answers.recv()
        except (EOFError, OSError):
            raise self._death() from None
        self.busy = False
        if isinstance(answer, EnvFailed):
            raise answer
        return answer

    def kill(self, reason: str) -> None:
        """Kill the process, whose call then fails for this reason."""
        self._killed_for = reason
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process."""
        if not self.cause_of_death:
            self.kill("ended")
            self._death()
        self.requests.close()
        self.answers.close()

    def _death(self) -> EnvFailed:
        """Wait for a process to end, and return its cause of death as an error."""
        self.busy = False
        if not self.cause_of_death:
            self.cause_of_death = self._wait()
        number = self.running.number
        if self._killed_for:
            text = self._killed_for
        elif number is None:
            text = f"the process that steps a part of the environments died: {self.cause_of_death}"
        else:
            text = f"its process died in {self.call}(): {self.cause_of_death}"
        return EnvFailed(f"{text} (process {self.pid})", number)

    def _wait(self) -> str:
        """Return how the process ended, and kill it if it goes on without its pipes."""
        until = time.monotonic() + DEATH_SECONDS
        while True:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # a program may ignore SIGCHLD
                return "of unknown cause"
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return format_exit(code) if code else "exit code 0, or it closed its file descriptors"
            if time.monotonic() > until:
                self.kill(f"its process closed its file descriptors in {self.call}()")
            time.sleep(0.001)


def _serve(requests: Connection, answers: Connection, calls: list[tuple[str, Callable[[], Any]]]) -> None:
    """Answer requests until the parent process closes its ends, or is gone."""
    gc.freeze()  # a garbage collection would copy all memory that is shared with the parent so far
    for end in _pipe_ends:
        end.close()  # or the processes at the other ends would not see that the parent closed its ends
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)  # signals with a handler, such as Ctrl-C, are for the parent
    with suppress(EOFError, OSError):
        while code := os.read(requests.fileno(), 1):
            name, call = calls[code[0]]
            try:
                answer = call()
            except BaseException as error:  # SystemExit too
                answer = to_env_failed(error, name)
            os.write(answers.fileno(), RESULT if answer else EMPTY)
            if answer:
                answers.send(answer)

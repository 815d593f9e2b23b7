"""Gymnasium environments in other processes, which may raise, die or hang.

`Workers` have one environment each. An `AsyncVectorEnv` by itself waits for ever where the error of a worker cannot be
pickled, and knows no more than that a pipe was closed where a worker died.

A `Fork` is a copy of this process that has a group of environments as they are at that moment, and writes what they
show to memory that both see. Threads would wait for each other's Python, a third of a step of Gymnasium's MuJoCo.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import concatenate

from canter.core.specs import EnvFailed
from canter.envs.contract import CheckContract, row_of, said
from canter.envs.gymnasium.description import quiet_mujoco
from canter.envs.watchdog import Watchdog

FORKS = sys.platform == "linux"
"""Elsewhere a process that has threads cannot be forked safely, or not at all."""
NOTHING, SOMETHING = b"\0", b"\1"
"""What a fork answers; the second is followed by what there is to tell."""
_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
"""This process's ends of all pipes."""


class ClosesQuietly(gymnasium.Wrapper):
    """An error in `close` has no consequence; Gymnasium makes one more environment, to look at, and closes that too."""

    def close(self) -> None:
        """As the environment's own."""
        with suppress(Exception):
            super().close()


@contextmanager
def reported(call: str) -> Iterator[None]:
    """Whatever is raised inside becomes an `EnvFailed`, which every process can read."""
    try:
        yield
    except BaseException as error:
        raise EnvFailed(f"{call}() raised {said(error)}") from error


class Reports(CheckContract):
    """Whatever the environment raises becomes an `EnvFailed`; the last observation of an episode is not overwritten."""

    def reset(self, **kwargs: Any) -> Any:
        """As the environment's own."""
        with reported("reset"):
            return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        """As the environment's own."""
        with reported("step"):
            obs, reward, terminated, truncated, info = super().step(action)
            # A copy: the reset of the same step may write to the same array.
            return deepcopy(obs) if terminated or truncated else obs, reward, terminated, truncated, info


def work(
    index: int, env_fn: Any, pipe: Any, parent_pipe: Any, memory: Any, errors: Any, *rest: Any, env_id: str
) -> None:
    """What a worker process does: Gymnasium's loop, around an environment whose errors can be told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which finishes the iteration first

    def make() -> gymnasium.Env:
        with quiet_mujoco(env_id):  # a worker that was not forked warns by itself
            return Reports(env_fn())

    try:
        _async_worker(index, make, pipe, parent_pipe, memory, errors, *rest)
    except BaseException as error:  # it could not be made
        errors.put((index, EnvFailed, EnvFailed(f"__init__() raised {said(error)}"), traceback.format_exc()))
        with suppress(OSError):
            pipe.send((None, False))


class Workers:
    """Steps an `AsyncVectorEnv`; a worker that fails, dies or takes longer than `step_timeout` is an `EnvFailed`.

    `close` ends workers that do not end by themselves within `close_timeout` seconds.
    """

    def __init__(self, env: AsyncVectorEnv, step_timeout: float, close_timeout: float) -> None:
        self.env, self.close_timeout = env, close_timeout
        self._waiting_for = 0
        self._late: int | None = None
        """The worker that was ended because it hung."""
        self._watchdog = Watchdog(step_timeout, self._end)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As `AsyncVectorEnv.reset`."""
        obs, info = zip(*self._ask("reset", seed, options), strict=True)
        return self._observations(obs), self._infos(info)

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """As `AsyncVectorEnv.step`."""
        obs, reward, terminated, truncated, info = zip(*self._ask("step", actions), strict=True)
        columns = np.array(reward, np.float64), np.array(terminated, bool), np.array(truncated, bool)
        return self._observations(obs), *columns, self._infos(info)

    def close(self) -> None:
        """End all workers."""
        self._watchdog.close()
        # Where one hung, others may hang too: the run has waited long enough.
        patience = self.close_timeout if self._late is None else min(self.close_timeout, 1.0)
        env, until = self.env, time.monotonic() + patience
        for pipe in filter(None, env.parent_pipes):
            with suppress(OSError):
                pipe.send(("close", None))
        for process in env.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in filter(None, env.parent_pipes):
            pipe.close()
        env.closed = True

    def _ask(self, what: str, *arguments: Any) -> list[Any]:
        """Send a call to all workers and wait for their answers."""
        env, self._waiting_for = self.env, 0
        self._watchdog.begin()
        try:
            getattr(env, f"{what}_async")(*arguments)
            answers = []
            for self._waiting_for, pipe in enumerate(env.parent_pipes):
                answers.append(pipe.recv())
        except (EOFError, OSError) as error:
            raise self._dead(what) from error
        finally:
            self._watchdog.end()
            env._state = AsyncState.DEFAULT
        if not all(success for _, success in answers):
            raise self._told(what)
        return [result for result, _ in answers]

    def _end(self, seconds: float) -> None:
        """End the worker that is being waited for; the wait then ends as if it had died by itself."""
        self._late = self._waiting_for
        self.env.processes[self._late].kill()

    def _dead(self, what: str) -> EnvFailed:
        if self._late is not None:
            process = self.env.processes[self._late]
            text = f"{what}() took more than {self._watchdog.seconds:g} s (env.step_timeout), so it was ended"
            return EnvFailed(f"{text} ({process.name}, process {process.pid})", self._late)
        self.env.processes[self._waiting_for].join(1.0)  # its pipe is closed a moment before it is gone
        for number, process in enumerate(self.env.processes):
            if process.exitcode is not None:
                text = f"its worker died in {what}(): {_how(process.exitcode)}"
                return EnvFailed(f"{text} ({process.name}, process {process.pid})", number)
        return EnvFailed(f"its worker closed the connection in {what}()", self._waiting_for)

    def _told(self, what: str) -> EnvFailed:
        try:
            number, _, value, trace = self.env.error_queue.get(timeout=10.0)
        except queue.Empty:
            return EnvFailed(f"a worker failed in {what}() and did not say why", None)
        return EnvFailed(str(value), number, trace)

    def _observations(self, rows: tuple[Any, ...]) -> Any:
        env = self.env
        if not env.shared_memory:
            env.observations = concatenate(env.single_observation_space, rows, env.observations)
        return deepcopy(env.observations) if env.copy else env.observations

    def _infos(self, rows: Any) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for number, info in enumerate(rows):
            infos = self.env._add_info(infos, info, number)
        return infos


def shared(array: np.ndarray) -> np.ndarray:
    """A copy in memory that this process will share with those forked from it."""
    memory = mmap.mmap(-1, max(1, array.nbytes))
    copy = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


class Fork:
    """A forked process that calls the functions of `calls` when it is asked to, and gives what they return.

    A call is asked for by one byte, and most often answered by one. Read and written as such, past the lengths that a
    `Connection` sends, and through pipes, not a socket, both sides are awake sooner: it happens in every step.
    """

    def __init__(self, calls: dict[str, Callable[[], Any]]) -> None:
        (orders, self.orders), (self.answers, answers) = Pipe(duplex=False), Pipe(duplex=False)
        self.codes = {name: bytes([code]) for code, name in enumerate(calls)}
        self.asked, self.died = False, ""
        """Whether an answer is on its way; and what the process died of, if it did."""
        with warnings.catch_warnings():
            # Of Python 3.12, because of other threads' locks: those of Python and malloc are taken care of.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                self.orders.close()
                self.answers.close()
                _serve(orders, answers, list(calls.items()))
            finally:
                os._exit(0)  # whatever the other process would do at its end is not for this one
        orders.close()
        answers.close()
        _ends.update((self.orders, self.answers))

    def ask(self, what: str) -> None:
        """Begin a call."""
        if self.asked:  # by somebody who never came for the answer
            with suppress(EnvFailed):
                self.result()
        try:
            os.write(self.orders.fileno(), self.codes[what])
        except OSError:
            raise self._dead() from None
        self.asked = True

    def result(self) -> Any:
        """What the call returned; `EnvFailed` where it raised, or where the process died."""
        self.asked = False
        try:
            told = os.read(self.answers.fileno(), 1)
            answer = [] if told == NOTHING else self.answers.recv()
        except (EOFError, OSError):
            raise self._dead() from None
        if isinstance(answer, EnvFailed):
            raise answer
        return answer

    def end(self) -> None:
        """End the process."""
        if not self.died:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._dead()
        self.orders.close()
        self.answers.close()

    def _dead(self) -> EnvFailed:
        """What to say of a process that is gone, or about to be."""
        if not self.died:
            self.died = "nobody knows of what"
            with suppress(ChildProcessError):  # where a program ignores SIGCHLD
                code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                self.died = _how(code)
        text = f"the process that steps a part of the environments died: {self.died} (process {self.pid})"
        return EnvFailed(text, None)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _serve(orders: Connection, answers: Connection, calls: list[tuple[str, Callable[[], Any]]]) -> None:
    """Answer until the other process closes its ends, or is gone."""
    gc.freeze()  # looking for garbage would copy all that is shared with it so far
    for end in _ends:
        end.close()  # or the processes at the other ends would not hear of the end either
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)  # what is handled is for the other process, such as Ctrl-C
    with suppress(EOFError, OSError):
        while code := os.read(orders.fileno(), 1):
            what, call = calls[code[0]]
            try:
                answer = call()
            except Exception as error:
                row = row_of(error.__traceback__)
                answer = EnvFailed(f"{what}() raised {said(error)}", row, traceback.format_exc())
            os.write(answers.fileno(), SOMETHING if answer else NOTHING)  # most often there is nothing to tell
            if answer:
                answers.send(answer)

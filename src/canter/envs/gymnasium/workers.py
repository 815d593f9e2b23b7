"""One worker process for each environment, which may raise, die or hang.

`AsyncStepper` steps an `AsyncVectorEnv`. By itself an `AsyncVectorEnv` waits for ever if a worker's
error cannot be pickled, and reports no more than a closed pipe if a worker died.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import concatenate

from canter.core.specs import EnvFailed
from canter.envs.contract import validate_reset, validate_step
from canter.envs.failures import Watchdog, format_exit, to_env_failed
from canter.envs.gymnasium.vector import Stepper, VectorStep, merge_infos


class WorkerEnv(gymnasium.Wrapper):
    """The environment of a worker: checked, with errors as `EnvFailed`, which pickles.

    Errors of `close` are ignored; Gymnasium also closes one that it makes to read its spaces.
    """

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment and check what it returns."""
        with _as_env_failed("reset"):
            return validate_reset(self.env.reset(**kwargs), self.observation_space)

    def step(self, action: Any) -> Any:
        """Step the environment and check the result; copy the last observation of an episode."""
        with _as_env_failed("step"):
            result = validate_step(self.env.step(action), self.observation_space)
            obs, reward, terminated, truncated, info = result
            # A copy: the reset of the same step may write to the same array.
            return deepcopy(obs) if terminated or truncated else obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment."""
        with suppress(Exception):
            super().close()


@contextmanager
def _as_env_failed(call: str) -> Iterator[None]:
    """Convert errors inside to `EnvFailed`."""
    try:
        yield
    except BaseException as error:
        raise to_env_failed(error, call) from error


def run_worker(
    index: int,
    env_fn: Callable[[], gymnasium.Env],
    pipe: Any,
    parent_pipe: Any,
    memory: Any,
    errors: Any,
    *rest: Any,
    making: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run Gymnasium's worker loop in a process, which sends an error if it cannot make its environment.

    The environment, a `WorkerEnv`, is made in the context that `making` returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which finishes the iteration first

    def make() -> gymnasium.Env:
        with making():
            return env_fn()

    try:
        _async_worker(index, make, pipe, parent_pipe, memory, errors, *rest)
    except BaseException as error:  # it could not be made
        failed = to_env_failed(error, "__init__")
        errors.put((index, EnvFailed, failed, failed.trace))
        with suppress(OSError):
            pipe.send((None, False))


class AsyncStepper(Stepper):
    """Steps an `AsyncVectorEnv`; a worker that fails, dies or is late is an `EnvFailed`.

    `close` kills workers that do not end by themselves within `close_timeout` seconds.
    """

    env: AsyncVectorEnv

    def __init__(self, env: AsyncVectorEnv, step_timeout: float, close_timeout: float) -> None:
        super().__init__(env)
        self.close_timeout = close_timeout
        self._waiting_for = 0
        self._hung: int | None = None
        """The worker that was killed because it hung."""
        self._watchdog = Watchdog(step_timeout, self._kill)

    def reset(self, seeds: list[int] | None = None, mask: np.ndarray | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `mask`."""
        options = None if mask is None else {"reset_mask": mask.copy()}
        obs, infos = zip(*self._call("reset", partial(self.env.reset_async, cast(Any, seeds), options)), strict=True)
        return self._observations(obs), merge_infos(self.env, enumerate(infos))

    def step(self, actions: np.ndarray) -> VectorStep:
        """Apply one action per environment."""
        results = self._call("step", partial(self.env.step_async, actions))
        obs, reward, terminated, truncated, infos = zip(*results, strict=True)
        columns = np.array(reward, np.float64), np.array(terminated, bool), np.array(truncated, bool)
        return self._observations(obs), *columns, merge_infos(self.env, enumerate(infos))

    def close(self) -> None:
        """End all workers."""
        self._watchdog.close()
        # If one hung, others may hang too: the run has waited long enough.
        patience = self.close_timeout if self._hung is None else min(self.close_timeout, 1.0)
        until = time.monotonic() + patience
        for pipe in filter(None, self.env.parent_pipes):
            with suppress(OSError):
                pipe.send(("close", None))
        for process in self.env.processes:
            while process.is_alive() and time.monotonic() < until:
                with suppress(queue.Empty):  # a worker cannot end before its error is read, if that is long
                    self.env.error_queue.get_nowait()
                process.join(0.05)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in filter(None, self.env.parent_pipes):
            pipe.close()
        self.env.closed = True

    def _call(self, name: str, send: Callable[[], None]) -> list[Any]:
        """Send a call to all workers and return their results."""
        env = self.env
        self._waiting_for = 0
        self._watchdog.begin()
        try:
            send()
            answers = []
            for self._waiting_for, pipe in enumerate(env.parent_pipes):
                answers.append(pipe.recv())
        except (EOFError, OSError) as error:
            raise self._worker_death(name) from error
        finally:
            self._watchdog.end()
            env._state = AsyncState.DEFAULT
        if not all(success for _, success in answers):
            raise self._worker_error(name)
        return [result for result, _ in answers]

    def _kill(self, seconds: float) -> None:
        """Kill the worker that is late; waiting then ends as if the worker had died."""
        self._hung = self._waiting_for
        self.env.processes[self._hung].kill()

    def _worker_death(self, call: str) -> EnvFailed:
        if self._hung is not None:
            process = self.env.processes[self._hung]
            text = f"{call}() took more than {self._watchdog.seconds:g} s (env.step_timeout), so it was ended"
            return EnvFailed(f"{text} ({process.name}, process {process.pid})", self._hung)
        self.env.processes[self._waiting_for].join(1.0)  # its pipe is closed a moment before it is gone
        for number, process in enumerate(self.env.processes):
            if process.exitcode is not None:
                text = f"its worker died in {call}(): {format_exit(process.exitcode)}"
                return EnvFailed(f"{text} ({process.name}, process {process.pid})", number)
        return EnvFailed(f"its worker closed the connection in {call}()", self._waiting_for)

    def _worker_error(self, call: str) -> EnvFailed:
        try:
            number, _, value, trace = self.env.error_queue.get(timeout=10.0)
        except queue.Empty:
            return EnvFailed(f"a worker failed in {call}() and sent no error", None)
        return EnvFailed(str(value), number, trace)

    def _observations(self, rows: tuple[Any, ...]) -> Any:
        env = self.env
        if not env.shared_memory:
            env.observations = concatenate(env.single_observation_space, rows, env.observations)
        return deepcopy(env.observations) if env.copy else env.observations

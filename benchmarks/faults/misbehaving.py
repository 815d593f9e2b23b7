"""An environment that misbehaves in a way of one's choice, from a step of one's choice on.

    canter --allow-import misbehaving train misbehaving:Misbehaving --env.options.kind obs_short --env.options.at 400

It is Gymnasium's; `STEPS`, `RESETS`, `PROCESS` and `CLOSE` list the kinds.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Unpicklable(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Speechless(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises(error: Callable[[], BaseException]) -> Callable[[np.ndarray], Any]:
    """A step that raises."""

    def step(obs: np.ndarray) -> Any:
        raise error()

    return step


def gives(obs: Any = None, reward: Any = 1.0, terminated: Any = False, truncated: Any = False, info: Any = None) -> Any:
    """A step that gives something else in one place; `obs` is a function of what it would give."""

    def step(usual: np.ndarray) -> Any:
        return usual if obs is None else obs(usual), reward, terminated, truncated, {} if info is None else info

    return step


def hang(obs: np.ndarray) -> Any:
    """A step that does not come back."""
    time.sleep(3600)


def spin(obs: np.ndarray) -> Any:
    """Compute for ever."""
    while True:
        pass


def segfault(obs: np.ndarray) -> Any:
    """A step that reads where there is no memory."""
    faulthandler.disable()  # the test runner's would tell of it
    ctypes.string_at(0)


def spoilt(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """The same observation with one bad number."""
    return lambda usual: np.where(np.arange(3) == 1, value, usual).astype(np.float64)


STEPS: dict[str, Callable[[np.ndarray], Any]] = {
    "raise_zero_division": lambda obs: 1 / (obs[0] * 0).item(),
    "raise_value_error": raises(lambda: ValueError("the robot fell apart")),
    "raise_key_error": raises(lambda: KeyError("joint")),
    "raise_assertion": raises(AssertionError),
    "raise_runtime_error": raises(lambda: RuntimeError("line one\nline two")),
    "raise_os_error": raises(lambda: OSError("no such device")),
    "raise_memory_error": raises(MemoryError),
    "raise_stop_iteration": raises(StopIteration),
    "raise_recursion": raises(lambda: RecursionError("too deep")),
    "raise_system_exit": raises(lambda: SystemExit(0)),
    "long_message": raises(lambda: ValueError("the robot fell apart " * 500_000)),
    "raise_unpicklable": raises(Unpicklable),
    "raise_speechless": raises(Speechless),
    "obs_short": gives(obs=lambda usual: usual[:1]),
    "obs_long": gives(obs=lambda usual: np.zeros(5, np.float32)),
    "obs_scalar": gives(obs=lambda usual: 1.0),
    "obs_matrix": gives(obs=lambda usual: usual[None]),
    "obs_none": gives(obs=lambda usual: None),
    "obs_text": gives(obs=lambda usual: np.array(["1.0", "2.0", "3.0"])),
    "obs_objects": gives(obs=lambda usual: np.array([1, None, 2], dtype=object)),
    "obs_ragged": gives(obs=lambda usual: [[1.0], [2.0, 3.0], []]),
    "obs_dict": gives(obs=lambda usual: {"policy": usual}),
    "obs_complex": gives(obs=lambda usual: usual.astype(np.complex64)),
    "obs_nan": gives(obs=spoilt(np.nan)),
    "obs_inf": gives(obs=spoilt(np.inf)),
    "obs_too_large": gives(obs=spoilt(-1e300)),
    "final_obs_nan": gives(obs=spoilt(np.nan), terminated=True),
    "reward_nan": gives(reward=float("nan")),
    "reward_inf": gives(reward=float("-inf")),
    "reward_text": gives(reward="1.0"),
    "reward_none": gives(reward=None),
    "reward_vector": gives(reward=np.ones(2)),
    "reward_complex": gives(reward=1j),
    "terminated_text": gives(terminated="False"),
    "terminated_none": gives(terminated=None),
    "terminated_vector": gives(terminated=np.zeros(3, bool)),
    "terminated_number": gives(terminated=0.5),
    "truncated_text": gives(truncated="False"),
    "truncated_none": gives(truncated=None),
    "four_values": lambda obs: (obs, 1.0, False, {}),
    "no_values": lambda obs: None,
    "info_list": lambda obs: (obs, 1.0, False, False, ["x"]),
}
"""What a step does instead, by kind."""

RESETS: dict[str, Callable[[np.ndarray], Any]] = {
    "reset_raises": raises(lambda: ValueError("no start")),
    "reset_short": lambda obs: (obs[:1], {}),
    "reset_text": lambda obs: (np.array(["a", "b", "c"]), {}),
    "reset_only_obs": lambda obs: obs,
    "reset_nan": lambda obs: (spoilt(np.nan)(obs), {}),
}
"""What a reset gives instead."""

PROCESS: dict[str, Callable[[np.ndarray], Any]] = {
    "exit": lambda obs: os._exit(3),
    "kill": lambda obs: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": segfault,
    "hang": hang,
    "stop": lambda obs: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": spin,
}
"""What ends or stops the process that steps it; for worker and forked processes only."""
MAKER = os.getpid()
"""The process that imported this module: the trainer, and a worker process that is spawned."""

STRAY: dict[str, Callable[[], Any]] = {
    "chdir": lambda: os.chdir("/"),
    "flood": lambda: print("careful: the joint is at its limit", file=sys.stderr),
    "close_stdout": lambda: sys.stdout.close(),
    "close_descriptors": lambda: os.closerange(1, 256),
}
"""What a step does to its process besides, with the usual result."""

CLOSE: dict[str, Callable[[], Any]] = {
    "close_raises": lambda: 1 / 0,
    # The parent of worker processes makes one to look at, and closes it.
    "close_hangs": lambda: time.sleep(3600) if multiprocessing.parent_process() or os.getpid() != MAKER else None,
}
"""What `close` does; a run must not be harmed by it."""


class Misbehaving(gymnasium.Env):
    """Three numbers, two actions, episodes of 20 steps; misbehaves from step `at` on, counted over all episodes.

    Where the variable `MENDED` is set, somebody has repaired it.
    """

    def __init__(self, kind: str = "", at: int = 400, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.kind, self.at, self.steps = "" if "MENDED" in os.environ else kind, at, 0

    def _obs(self) -> np.ndarray:
        return self.np_random.random(3, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """An observation and nothing else to know."""
        super().reset(seed=seed)
        self.begun = self.steps
        misbehaves = self.steps >= self.at and self.kind in RESETS
        return RESETS[self.kind](self._obs()) if misbehaves else (self._obs(), {})

    def step(self, action: Any) -> Any:
        """The action is the reward."""
        self.steps += 1
        if self.steps >= self.at:
            for kinds in (STEPS, PROCESS):
                if self.kind in kinds:
                    return kinds[self.kind](self._obs())
            if self.kind in STRAY:
                STRAY[self.kind]()
        return self._obs(), float(action), self.steps - self.begun >= 20, False, {}

    def close(self) -> None:
        """Nothing is held."""
        if self.kind in CLOSE:
            CLOSE[self.kind]()

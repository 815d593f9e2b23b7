"""The interface of a batch of Gymnasium environments, for any vector environment of a user.

N environments. `Stepper` is what the adapter drives. It has three backends: `VectorStepper` here
for any `gymnasium.vector.VectorEnv`, EnvPool's included, `SyncStepper` for environments of this
process (`sync`), and `AsyncStepper` for worker processes (`workers`).

A vector environment restarts ended episodes in one of three ways, its autoreset mode, which it must
declare: a wrong one would mix episodes without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from canter.core.registry import UserError
from canter.envs.contract import check_columns, validate_reset
from canter.envs.failures import EnvCalls
from canter.envs.gymnasium.state import StateUnavailable, obstacle, unwrap

VectorStep = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
"""Observations, rewards, terminated, truncated and infos of N environments, as `VectorEnv.step`
returns them."""
EnvInfos = list[tuple[int, dict[str, Any]]]
"""Infos of some environments, each with the number of its environment."""
STEP_TIMEOUT = 600.0
"""Seconds that a worker process may take for a step or a reset."""
CLOSE_TIMEOUT = 60.0
"""Seconds that a worker process may take to end."""


class Stepper:
    """N environments in one of Gymnasium's autoreset modes; a backend has `reset` and `step`.

    Results may be the backend's own arrays, overwritten by the next call.
    """

    info_keys: tuple[str, ...] = ()
    """Entries of info that the adapter reads; a backend may leave out the others."""
    info_names: set[str]
    """Names of entries of info seen so far by this process."""
    marks_ends = False
    """True if a step has `info["final_obs"]` exactly when an episode ended."""
    idle_cores = 0
    """Cores of this machine that could step a part of the environments on request."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.info_names = set()

    def reset(self, seeds: list[int] | None = None, mask: np.ndarray | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `mask` (bool `[N]`); return obs and infos."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> VectorStep:
        """Apply one action per environment."""
        raise NotImplementedError

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Copy the exact state and return a function that makes a saveable tree of the copy.

        Raises `StateUnavailable` if the state is not known.
        """
        raise StateUnavailable(obstacle(self.env))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        raise StateUnavailable(f"the saved state cannot be restored: {obstacle(self.env)}")

    def seen_info(self) -> set[str]:
        """Return the names of entries of info seen so far, for messages about one that is missing."""
        return self.info_names

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def merge_infos(env: VectorEnv, numbered: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the infos of single environments, by number, as one info of the vector environment."""
    infos: dict[str, Any] = {}
    for number, info in numbered:
        infos = env._add_info(infos, info, number)
    return infos


class VectorStepper(Stepper):
    """Steps any vector environment through its own `reset` and `step`."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        base = env.unwrapped
        if isinstance(base, SyncVectorEnv):
            base.envs = [
                single if isinstance(single, NumberedEnv) else NumberedEnv(single, number)  # by an earlier adapter
                for number, single in enumerate(base.envs)
            ]
        self.takes_many_seeds = isinstance(base, SyncVectorEnv | AsyncVectorEnv)

    def reset(self, seeds: list[int] | None = None, mask: np.ndarray | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset through the environment's `reset`; a single generator gets the first seed."""
        if mask is not None:
            # NOTE: a copy, and a new dict each time: Gymnasium takes the mask out of the dict.
            return self.env.reset(options={"reset_mask": mask.copy()})
        if seeds is None:
            return self.env.reset()
        try:
            return self.env.reset(seed=cast(Any, seeds))
        except (gymnasium.error.Error, TypeError, ValueError):
            if self.takes_many_seeds:
                raise
            return self.env.reset(seed=seeds[0])

    def step(self, actions: np.ndarray) -> VectorStep:
        """Step through the environment's own `step` and check the shapes of rewards and flags."""
        result = self.env.step(actions)
        _, reward, terminated, truncated, _ = result
        check_columns(self.env.num_envs, reward=reward, terminated=terminated, truncated=truncated)
        return result


class NumberedEnv(gymnasium.Wrapper):
    """One environment of a vector environment, with its number for errors and the watchdog."""

    state_attributes = ()

    def __init__(self, env: gymnasium.Env, number: int) -> None:
        super().__init__(env)
        self.calls = EnvCalls(number)

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment and check what it returns."""
        with self.calls:
            return validate_reset(self.env.reset(**kwargs), self.observation_space)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        with self.calls:
            return self.env.step(action)


_SPELLINGS = {mode.value.lower(): mode for mode in AutoresetMode}

_HOW_TO_DECLARE = """
  next_step: the step after an end ignores its action, resets and returns reward 0
  same_step: the ending step resets already; the last observation is in info["final_obs"]
  disabled:  the caller resets, with reset(options={"reset_mask": mask})
Declare one: env.metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.SAME_STEP on the environment, or
the argument autoreset="same_step" here."""


def parse_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return a mode by any spelling: `next_step`, `NEXT_STEP`, `NextStep` or the enum."""
    if isinstance(mode, AutoresetMode):
        return mode
    key = str(mode).replace("_", "").replace("-", "").lower()
    if key not in _SPELLINGS:
        raise UserError(f"autoreset mode {mode!r} is unknown; the modes are next_step, same_step and disabled")
    return _SPELLINGS[key]


def find_mode(env: VectorEnv, requested: AutoresetMode | str | None) -> AutoresetMode:
    """Return the mode that `env` declares, or the `requested` one; raise UserError if there is none, or two."""
    declared = (env.metadata or {}).get("autoreset_mode")
    modes = [parse_mode(mode) for mode in (declared, requested) if mode is not None]
    if not modes:
        raise UserError(f"{env} does not declare how it resets, one of three ways:{_HOW_TO_DECLARE}")
    if len(set(modes)) > 1:
        raise UserError(
            f"autoreset={modes[1].name.lower()!r} contradicts {env}, which declares {modes[0].name.lower()!r}; "
            "leave the argument out, or make the environment with the other mode"
        )
    return modes[0]


def name_of(env: VectorEnv) -> str:
    """Return the id that an environment was made with, or the name of its class."""
    base = env.unwrapped
    return base.spec.id if isinstance(base.spec, GymnasiumSpec) else type(base).__name__


def truncates(env: VectorEnv) -> bool | None:
    """Return True if the environments are known to have a time limit, None if nothing is known."""
    base = env.unwrapped
    limited = False
    if isinstance(base, SyncVectorEnv):
        limited = any(isinstance(wrapper, TimeLimit) for wrapper in unwrap(base.envs[0])[0])
    elif isinstance(base.spec, GymnasiumSpec):
        limited = (base.spec.kwargs.get("max_episode_steps", base.spec.max_episode_steps) or 0) > 0
    return limited or None

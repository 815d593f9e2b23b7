"""Gymnasium's environments of one process, stepped without copies that nothing here reads, and several at a time.

N environments. `SyncVectorEnv.step` copies observations twice and collects the info of every environment, key by key;
around a small simulator that costs as much as the simulator. `SyncSteps` gives the same transitions without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeGuard

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from canter.core.distributed import cores
from canter.envs.contract import as_flag, as_number, checked_reset, checked_step
from canter.envs.gymnasium.state import StateUnavailable, map_parts, obstacle, put_rows, take_rows
from canter.envs.gymnasium.workers import FORKS, Fork, shared

FEW = 4
"""Environments for which a second thread or process does not pay."""
NUMBERS = (float, np.float64)
"""Types of rewards that need no look."""
WRITTEN = ("_observations", "_rewards", "_terminations", "_truncations")
"""Fields of a vector environment that a step writes row by row."""


class SyncSteps:
    """Steps a `SyncVectorEnv` in `same_step` mode and keeps its fields as `SyncVectorEnv.step` would.

    With `groups` above 1, as many groups of environments are stepped at the same time: the first here, the others in
    threads, which pays where most of a step is spent outside of Python, or in `forked` processes. Each environment has
    its own state and random stream, so that the results are the same.
    """

    def __init__(self, env: SyncVectorEnv, info_keys: Iterable[str], groups: int = 1, *, forked: bool = False) -> None:
        self.env, self.info_keys = env, tuple(info_keys)
        self.groups = [group.tolist() for group in np.array_split(np.arange(env.num_envs), groups)]
        self.pool = ThreadPoolExecutor(groups - 1, "canter-env") if groups > 1 and not forked else None
        self.forked, self.forks = forked and groups > 1, list[Fork]()
        self.actions = np.zeros(0)
        """What forked processes read; those of a step."""
        self.parts = list[Any]()
        """Where forked processes write observations of several parts, for each environment."""
        self.usual_dtype: np.dtype | None = None
        """That of observations which were looked at and found right; another is looked at again."""

    @cached_property
    def stepped(self) -> list[tuple[Any, Any]]:
        """As `past_wrappers` gives it of each environment, found in the first step."""
        return [past_wrappers(env) for env in self.env.envs]

    @staticmethod
    def fits(env: Any) -> TypeGuard[SyncVectorEnv]:
        """Whether `env` is of this kind; a wrapper around it, or a class derived from it, has a `step` of its own."""
        return type(env) is SyncVectorEnv and env.autoreset_mode is AutoresetMode.SAME_STEP

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """As `SyncVectorEnv.step`, but the arrays are the environment's own and only the wanted infos are there."""
        env = self.env
        first, *others = self.groups
        running: list[Any] = []
        if self.forked:
            running = self._begin_forks(actions)
        elif self.pool is not None:
            running = [self.pool.submit(self._step_group, group, actions) for group in others]
        noted = self._step_group(first, actions)
        for job in running:
            noted += job.result()
        if not isinstance(env._observations, np.ndarray) and not self.forks:
            concatenate(env.single_observation_space, env._env_obs, env._observations)
        np.logical_or(env._terminations, env._truncations, out=env._autoreset_envs)
        infos: dict[str, Any] = {}
        for index, info in noted:
            infos = env._add_info(infos, info, index)
        return env._observations, env._rewards, env._terminations, env._truncations, infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As `SyncVectorEnv.reset`; random streams go on where no seed is given."""
        self.gather() if seed is None else self.forget()
        return self.env.reset(seed=seed, options=options)

    def close(self) -> None:
        """Stop the threads and processes, and close the environments."""
        if self.pool is not None:
            self.pool.shutdown()
        self.forget()
        self.env.close()

    def elsewhere(self) -> dict[int, dict[str, Any]]:
        """The states of environments that live in forked processes, by number, as `gymnasium_state.snapshot` has them.

        What the environments of this process with these numbers say is old then.
        """
        for fork in self.forks:
            fork.ask("snapshot")
        return {number: state for fork in self.forks for number, state in fork.result().items()}

    def gather(self) -> None:
        """Bring all environments back into this process, as they are; the next step forks anew."""
        if self.forks:
            reason = obstacle(self.env)
            if reason is not None:
                raise StateUnavailable(
                    f"environments in forked processes cannot be brought back: {reason}; give reset() a seed, or use "
                    "vectorization=sync"
                )
            put_rows(self.env, self.elsewhere())
            self.forget()

    def forget(self) -> None:
        """End forked processes, whose environments are to begin anew."""
        for fork in self.forks:
            fork.end()
        self.forks = []

    def _begin_forks(self, actions: np.ndarray) -> list[Fork]:
        """Let forked processes step; they are forked where they are not yet, from the environments as they are."""
        if not self.forks or self.actions.dtype != actions.dtype:
            self.gather()
            self.actions = shared(actions)
            for name in WRITTEN:
                setattr(self.env, name, map_parts(shared, getattr(self.env, name)))
            if not isinstance(self.env._observations, np.ndarray):
                numbers = range(self.env.num_envs)
                self.parts = [map_parts(lambda x, n=n: x[n : n + 1], self.env._observations) for n in numbers]
            self.forks = [Fork(self._calls(group)) for group in self.groups[1:]]
        self.actions[...] = actions
        for fork in self.forks:
            fork.ask("step")
        return self.forks

    def _calls(self, group: list[int]) -> dict[str, Callable[[], Any]]:
        """What a forked process is asked for."""
        step = partial(self._step_group, group, self.actions)
        return {"step": step, "snapshot": partial(take_rows, self.env, group)}

    def _step_group(self, group: list[int], actions: np.ndarray) -> list[tuple[int, dict[str, Any]]]:
        """Step some environments; gives what is to be known of them, by number."""
        env, noted = self.env, []
        # Other threads wait while Python runs: whatever can be done outside of this loop is.
        stepped, env_obs, rewards = self.stepped, env._env_obs, env._rewards
        terminations, truncations = env._terminations, env._truncations
        rows, shape, ndarray, dtype, parts = None, None, np.ndarray, self.usual_dtype, self.parts
        if isinstance(env._observations, ndarray):
            rows, shape = env._observations, env._observations.shape[1:]
        for env_number in group:
            inner, limit = stepped[env_number]
            came = inner.step(actions[env_number])
            try:
                obs, reward, terminated, truncated, info = came
            except (TypeError, ValueError):
                obs, reward, terminated, truncated, info = checked_step(came, env.single_observation_space)
            # The usual types need no call; whatever else comes is looked at.
            if reward.__class__ not in NUMBERS or terminated.__class__ is not bool or truncated.__class__ is not bool:
                reward, terminated = as_number(reward), as_flag(terminated, "terminated")
                truncated = as_flag(truncated, "truncated")
            if (
                obs.__class__ is not ndarray
                or obs.shape != shape
                or obs.dtype is not dtype
                or info.__class__ is not dict
            ):
                dtype = self._look(came)
            if limit is not None:
                limit._elapsed_steps = elapsed = limit._elapsed_steps + 1
                truncated = truncated or elapsed >= limit._max_episode_steps
            rewards[env_number], terminations[env_number], truncations[env_number] = reward, terminated, truncated
            if terminated or truncated:
                # A copy: the reset may write to the same array.
                noted.append((env_number, {"final_obs": copy.deepcopy(obs), "final_info": self._wanted(info)}))
                obs, info = self._reset(env_number, shape)
            env_obs[env_number] = obs
            if rows is not None:
                rows[env_number] = obs
            elif parts:
                concatenate(env.single_observation_space, [obs], parts[env_number])
            if self.info_keys:
                noted.append((env_number, self._wanted(info)))
        return noted

    def _reset(self, env_number: int, shape: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; what it shows is looked at unless it is as usual."""
        came = self.env.envs[env_number].reset()
        if came.__class__ is tuple and len(came) == 2 and came[0].__class__ is np.ndarray:
            obs, info = came
            if obs.shape == shape and obs.dtype is self.usual_dtype and info.__class__ is dict:
                return obs, info
        return checked_reset(came, self.env.single_observation_space)

    def _look(self, came: Any) -> np.dtype | None:
        """Refuse what breaks the contract; gives the dtype of observations that need no second look."""
        obs, *_ = checked_step(came, self.env.single_observation_space)
        self.usual_dtype = obs.dtype if isinstance(obs, np.ndarray) else None
        return self.usual_dtype

    def _wanted(self, info: dict[str, Any]) -> dict[str, Any]:
        return {key: info[key] for key in self.info_keys if key in info}


def past_wrappers(env: Any) -> tuple[Any, Any]:
    """What to step in the place of an environment, and the `TimeLimit` whose steps the caller then counts, or None.

    `gymnasium.make` wraps every environment in two that take a twentieth of a step of HalfCheetah: one counts, the
    other looks whether there was a reset. Where there was none, it is left to say so.
    """
    limit = env if type(env) is TimeLimit else None
    inner = env.env if limit is not None else env
    if type(inner) is OrderEnforcing and inner.has_reset:
        return inner.env, limit
    return env, None


def groups_of(env: SyncVectorEnv, vectorization: str) -> dict[str, Any]:
    """In how many groups environments of one process are stepped at the same time, and whether in forked processes.

    By default as many as cores where Gymnasium's MuJoCo does the work and four or more fall to each, or else one.
    """
    groups, why_not = min(cores(), env.num_envs), why_not_forked(env)
    if vectorization == "forked" and why_not is not None:
        raise ValueError(f"vectorization=forked: {why_not}; use threads or async")
    if vectorization == "auto":
        why_not = why_not or obstacle(env)  # nobody asked for processes in which something of one's own might not work
        # A window belongs to the thread that opened it.
        apart = in_mujoco(env) and env.render_mode != "human"
        groups = max(1, min(cores(), env.num_envs // FEW)) if apart else 1
    return {"groups": groups, "forked": vectorization != "threads" and why_not is None}


def in_mujoco(env: SyncVectorEnv) -> bool:
    """Whether these are Gymnasium's own MuJoCo environments, which `auto` steps in groups."""
    return type(env.envs[0].unwrapped).__module__.startswith("gymnasium.envs.mujoco")


def why_not_forked(env: SyncVectorEnv) -> str | None:
    """Why environments cannot be stepped in forked processes, None if they can."""
    if not FORKS:
        return "this system has no safe fork"
    if env.render_mode is not None:
        return "pictures are drawn in this process"
    return None

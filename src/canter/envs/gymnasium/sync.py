"""Environments of this process, stepped without unused copies, and in several threads.

N environments. `SyncVectorEnv.step` copies observations twice and collects the info of every
environment key by key, which costs as much as a small simulator. `SyncStepper` returns the same
transitions without it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from canter.core import distributed
from canter.core.registry import UserError
from canter.envs.contract import to_numbers, validate_reset, validate_step
from canter.envs.failures import STEPPING_THREADS, EnvCalls
from canter.envs.gymnasium import state as exact
from canter.envs.gymnasium.infos import InfoMeans
from canter.envs.gymnasium.state import StateUnavailable, obstacle, unwrap
from canter.envs.gymnasium.vector import EnvInfos, Stepper, VectorStep, merge_infos

FORKS = sys.platform == "linux"
"""True where a process that has threads can be forked safely."""
OWN = ("gymnasium.", "canter.")
"""Packages whose environments and wrappers do not crash, hang or change the state of the process."""
FEW = 4
"""Number of environments for which a second thread or process does not pay."""
FLOATS = (float, np.float64)
"""Types of rewards that need no check."""


class SyncStepper(Stepper):
    """Steps a `SyncVectorEnv` and keeps its fields as `SyncVectorEnv.step` would.

    With `groups` above 1, in `same_step` mode, as many groups of environments are stepped at the
    same time: the first in this thread, the others in threads, which pays if most of a step is
    spent outside of Python. Each environment has its own state and random stream, so the results
    are the same.
    """

    env: SyncVectorEnv

    def __init__(self, env: SyncVectorEnv, groups: int = 1, *, log_info: bool = False) -> None:
        super().__init__(env)
        self.marks_ends = env.autoreset_mode is AutoresetMode.SAME_STEP
        self.resets_next = env.autoreset_mode is AutoresetMode.NEXT_STEP
        groups = min(groups, env.num_envs) if self.marks_ends else 1
        self.groups = [group.tolist() for group in np.array_split(np.arange(env.num_envs), groups)]
        self.calls = {group[0]: EnvCalls() for group in self.groups}
        """Calls of each group, by the number of its first environment."""
        self.infos = {group[0]: InfoMeans() for group in self.groups} if log_info else {}
        """Means of the numbers in `info`, by the same number."""
        self.pool = ThreadPoolExecutor(groups - 1, STEPPING_THREADS) if groups > 1 else None
        """Threads for all groups but the first; they start when they are first used."""
        self.parts: list[Any] = []
        """The place of each environment's observation of several parts, if it is written here."""
        self.checked_dtype: np.dtype | None = None
        """Dtype of observations that were checked; another dtype is checked again."""
        self._state_known = False
        """True once the state of every environment is known to be complete; nothing changes that
        later."""

    @cached_property
    def step_targets(self) -> list[tuple[Any, Any]]:
        """Results of `skip_wrappers` for all environments, found in the first step."""
        return [skip_wrappers(env) for env in self.env.envs]

    def step(self, actions: np.ndarray) -> VectorStep:
        """Apply one action per environment; infos hold only `info_keys` and ends of episodes."""
        env = self.env
        env_infos = self._step_groups(actions)
        np.logical_or(env._terminations, env._truncations, out=env._autoreset_envs)
        return env._observations, env._rewards, env._terminations, env._truncations, merge_infos(env, env_infos)

    def _step_groups(self, actions: np.ndarray) -> EnvInfos:
        """Step all groups and return infos by number."""
        env = self.env
        running = [self.pool.submit(self._step_group, group, actions) for group in self.groups[1:]] if self.pool else []
        env_infos = self._step_group(self.groups[0], actions)
        for job in running:
            env_infos += job.result()
        if not isinstance(env._observations, np.ndarray):
            concatenate(env.single_observation_space, env._env_obs, env._observations)
        return env_infos

    def reset(self, seeds: list[int] | None = None, mask: np.ndarray | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset environments; without seeds their random streams continue."""
        env = self.env
        rows = slice(None) if mask is None else mask
        for flags in (env._terminations, env._truncations, env._autoreset_envs):
            flags[rows] = False
        env_infos = self._reset_envs(seeds, mask)
        return env._observations, merge_infos(env, env_infos)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Copy the exact state quickly; the returned function makes a tree of the copy."""
        if not self._state_known:
            reason = obstacle(self.env)
            if reason is not None:
                raise StateUnavailable(reason)
            self._state_known = True
        return partial(exact.as_tree, self._copy_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit, in environments made with the same options."""
        exact.restore(self.env, state)

    def take_infos(self, means: InfoMeans) -> None:
        """Move the totals of all groups to `means`."""
        for infos in self.infos.values():
            means.merge(infos.take())

    def close(self) -> None:
        """Stop the threads and close the environments."""
        if self.pool is not None:
            self.pool.shutdown()
        self.env.close()

    @property
    def idle_cores(self) -> int:
        """Number of cores that could step environments in forked processes, on request."""
        if not self.marks_ends or len(self.groups) > 1 or in_mujoco(self.env):
            return 0
        return distributed.cores() - 1 if fork_obstacle(self.env) is None else 0

    def _reset_envs(self, seeds: list[int] | None, mask: np.ndarray | None) -> EnvInfos:
        """Reset environments, write all observations and return infos by number."""
        env = self.env
        numbers = range(env.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        env_infos = self._reset_group(numbers, seeds, None if mask is None else {}, self.calls[0])
        env._observations = concatenate(env.single_observation_space, env._env_obs, env._observations)
        return env_infos

    def _reset_group(
        self, group: Iterable[int], seeds: list[int] | None, options: dict[str, Any] | None, calls: EnvCalls
    ) -> EnvInfos:
        """Reset some environments and return infos by number."""
        env = self.env
        env_infos: EnvInfos = []
        with calls:
            for number in group:
                calls.number = number
                seed = None if seeds is None else seeds[number]
                result = env.envs[number].reset(seed=seed, options=options)
                env._env_obs[number], info = validate_reset(result, env.single_observation_space)
                if selected := self._select(info):
                    env_infos.append((number, selected))
        return env_infos

    def _copy_state(self) -> dict[str, Any]:
        """Copy the exact state of all environments."""
        return exact.snapshot(self.env)

    def _step_group(self, group: list[int], actions: np.ndarray) -> EnvInfos:
        """Step some environments and return infos by number."""
        env = self.env
        env_infos: EnvInfos = []
        # Other threads wait while Python runs, so as little as possible is done in this loop.
        targets, env_obs, rewards = self.step_targets, env._env_obs, env._rewards
        terminations, truncations = env._terminations, env._truncations
        same_step, keeps_info, ndarray = self.marks_ends, bool(self.info_keys), np.ndarray
        pending = env._autoreset_envs if self.resets_next else None
        rows = env._observations if isinstance(env._observations, ndarray) else None
        shape = None if rows is None else rows.shape[1:]
        dtype = self.checked_dtype
        infos = self.infos.get(group[0])
        with self.calls[group[0]] as calls:
            for number in group:
                calls.number = number
                if pending is not None and pending[number]:
                    reward, terminated, truncated = 0.0, False, False
                    obs, info = self._reset_one(number, shape)
                else:
                    inner, limit = targets[number]
                    result = inner.step(actions[number])
                    try:
                        obs, reward, terminated, truncated, info = result
                    except (TypeError, ValueError):
                        obs, reward, terminated, truncated, info = validate_step(result, env.single_observation_space)
                    # The usual types need no call; anything else is checked.
                    if (
                        reward.__class__ not in FLOATS
                        or terminated.__class__ is not bool
                        or truncated.__class__ is not bool
                    ):
                        reward, terminated, truncated = to_numbers(reward, terminated, truncated)
                    if (
                        obs.__class__ is not ndarray
                        or obs.shape != shape
                        or obs.dtype is not dtype
                        or info.__class__ is not dict
                    ):
                        dtype = self._check(result)
                    if limit is not None:
                        limit._elapsed_steps = elapsed = limit._elapsed_steps + 1
                        truncated = truncated or elapsed >= limit._max_episode_steps
                    if info and infos is not None:
                        infos.add(info)
                rewards[number] = reward
                terminations[number] = terminated
                truncations[number] = truncated
                if same_step and (terminated or truncated):
                    # A copy: the reset may write to the same array.
                    env_infos.append((number, {"final_obs": copy.deepcopy(obs), "final_info": self._select(info)}))
                    obs, info = self._reset_one(number, shape)
                env_obs[number] = obs
                if rows is not None:
                    rows[number] = obs
                elif self.parts:
                    concatenate(env.single_observation_space, [obs], self.parts[number])
                if keeps_info and (selected := self._select(info)):
                    env_infos.append((number, selected))
        return env_infos

    def _reset_one(self, number: int, shape: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode; its first observation is checked unless it has the usual form."""
        result = self.env.envs[number].reset()
        if result.__class__ is tuple and len(result) == 2 and result[0].__class__ is np.ndarray:
            obs, info = result
            if obs.shape == shape and obs.dtype is self.checked_dtype and info.__class__ is dict:
                return obs, info
        return validate_reset(result, self.env.single_observation_space)

    def _check(self, result: Any) -> np.dtype | None:
        """Check what a step returned; return the dtype of observations to trust from now on."""
        obs, *_ = validate_step(result, self.env.single_observation_space)
        self.checked_dtype = obs.dtype if isinstance(obs, np.ndarray) else None
        return self.checked_dtype

    def _select(self, info: dict[str, Any]) -> dict[str, Any]:
        self.info_names.update(info)
        return {key: info[key] for key in self.info_keys if key in info}


def skip_wrappers(env: Any) -> tuple[Any, Any]:
    """Return what to step in place of an environment, and a `TimeLimit` for the caller to count.

    `gymnasium.make` puts two wrappers around every environment that take a twentieth of a step of
    HalfCheetah: one counts, the other checks that there was a reset. If there was none, the second
    wrapper is kept to raise its error.
    """
    limit = env if type(env) is TimeLimit else None
    inner = env.env if limit is not None else env
    if type(inner) is OrderEnforcing and inner.has_reset:
        return inner.env, limit
    return env, None


def choose_groups(env: SyncVectorEnv, vectorization: str) -> dict[str, Any]:
    """Return the number of groups that this process steps, and True if it forks processes.

    By default one group per core if MuJoCo does the work and each group has four or more
    environments, else one.
    """
    forked = vectorization == "forked"
    groups = min(distributed.cores(), env.num_envs)
    reason = fork_obstacle(env)
    if forked and reason is not None:
        raise UserError(f"vectorization=forked: {reason}; use threads or async")
    if vectorization == "auto":
        reason = reason or obstacle(env)  # the user did not ask for processes, in which own code might not work
        # A window belongs to the thread that opened it.
        independent = in_mujoco(env) and env.render_mode != "human"
        groups = max(1, min(distributed.cores(), env.num_envs // FEW)) if independent else 1
        forked = reason is None
    return {
        "groups": groups,
        "forked": forked and (groups > 1 or (vectorization == "forked" and runs_foreign_code(env))),
    }


def in_mujoco(env: SyncVectorEnv) -> bool:
    """Return True for Gymnasium's own MuJoCo environments, which `auto` steps in groups."""
    return type(env.envs[0].unwrapped).__module__.startswith("gymnasium.envs.mujoco")


def runs_foreign_code(env: Any) -> bool:
    """Return True if an environment or a wrapper is neither Gymnasium's nor Canter's.

    Such code may end, stop or change the process that runs it. False for environments that are not
    a `SyncVectorEnv`.
    """
    for single in env.envs if isinstance(env, SyncVectorEnv) else ():
        wrappers, base = unwrap(single)
        if not all(f"{type(part).__module__}.".startswith(OWN) for part in (*wrappers, base)):
            return True
    return False


def fork_obstacle(env: SyncVectorEnv) -> str | None:
    """Return why environments cannot be stepped in forked processes, or None if they can."""
    if not FORKS:
        return "this system has no safe fork"
    if env.render_mode is not None:
        return "pictures are drawn in this process"
    return None

"""Gymnasium vector environments, whatever their way of resetting, as Canter environments.

N is the number of environments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from canter.core import distributed
from canter.core.space_arrays import OwnArrays
from canter.core.specs import ACTION_MASK, ContractBroken, EnvFailed, EnvSpec, Step
from canter.core.struct import Obs, tree_copy_
from canter.envs.contract import CheckContract, check_space_obs
from canter.envs.gymnasium.autoreset import find_mode, parse_mode
from canter.envs.gymnasium.description import explained, import_module_of, name_of, refuse_lost_steps, truncates
from canter.envs.gymnasium.pinned import Courier
from canter.envs.gymnasium.state import StateUnavailable, as_tree, obstacle, restore, snapshot
from canter.envs.gymnasium.sync import SyncSteps, groups_of, in_mujoco, why_not_forked
from canter.envs.gymnasium.workers import ClosesQuietly, Workers, work
from canter.envs.spaces import ObsBuffer, ObsReader, TupleActions, action_codec, copy_info_

Autoreset = Literal["next_step", "same_step", "disabled"]
STEP_TIMEOUT, CLOSE_TIMEOUT = 600.0, 60.0
"""Seconds that a worker process may take for a step or a reset, and to end."""
GOES_ON = np.array([[False], [False], [True]])
"""Flags of environments whose episodes go on: not terminated, not truncated, valid."""
Vectorization = Literal["auto", "sync", "threads", "forked", "async", "vector_entry_point"]


class GymnasiumEnv:
    """Any `gymnasium.vector.VectorEnv`, wrapped or not, as a `canter.core.specs.Env`.

    The three autoreset modes give the same transitions. `same_step` and `disabled` put the last observation of an
    episode into `Step.final_obs`; `next_step` leaves it in `Step.obs` and makes the step after it a filler row. The
    mode is the one the environment declares, or `autoreset`; failing both, a probe of at most `probe_steps` random
    steps finds it out, or refuses.

    Actions are cast, reshaped and shifted to the space, never clipped. A mask of allowed actions is read from the
    observation key `action_mask` or, when the reset done here shows one, from `info["action_mask"]`; the latter is
    added to the observation groups, and rows without one allow everything.

    `info_keys` names numbers of `info` to pass on as `Step.info`, float32 `[N]`, 0 where absent; for rows that ended
    they are the ended episode's. So many `groups` of the environments of a `SyncVectorEnv` in `same_step` mode are
    stepped at the same time, in threads or in `forked` processes, without a change to the results.

    NOTE: in `same_step` mode Gymnasium keeps a reference to the last observation while it resets. An environment that
    reuses one array for all its observations spoils it there; `make_gymnasium` copies it in time.
    """

    _closed = False
    seeds_by_row = True

    def __init__(
        self,
        env: VectorEnv,
        *,
        autoreset: Autoreset | AutoresetMode | None = None,
        info_keys: tuple[str, ...] = (),
        device: torch.device | str = "cpu",
        env_id: str = "",
        probe_steps: int = 2000,
        groups: int = 1,
        forked: bool = False,
        step_timeout: float = STEP_TIMEOUT,
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"{env} is no gymnasium.vector.VectorEnv; wrap a function that makes it in gymnasium.vector."
                "SyncVectorEnv([make_it]), or use make_gymnasium with its id"
            )
        self._env, self._steps = env, env
        if type(env) is AsyncVectorEnv:
            self._steps = Workers(env, step_timeout, close_timeout)
        self._action = action_codec(env.single_action_space)
        self._reader = ObsReader(env.single_observation_space, env.num_envs, self._action.spec)
        mode = find_mode(env, autoreset, self._reader, probe_steps)
        refuse_lost_steps(env, mode)
        self._settle = {
            AutoresetMode.NEXT_STEP: self._settle_next_step,
            AutoresetMode.SAME_STEP: self._settle_same_step,
            AutoresetMode.DISABLED: self._settle_disabled,
        }[mode]
        self._mask_in_info = self._reader.add_mask(lambda: [self._reset()[1]])
        self.spec = EnvSpec(
            obs=self._reader.specs,
            action=self._action.spec,
            own_arrays=OwnArrays(self._action.array, self._reader.choices),
            num_envs=env.num_envs,
            device=torch.device(device),
            final_obs="in_place" if mode is AutoresetMode.NEXT_STEP else "separate",
            truncates=truncates(env),
            env_id=env_id or name_of(env),
            durations="duration" in info_keys,
        )
        """Shapes, dtypes, bounds and conventions."""
        self._allocate(info_keys)
        wanted = (*info_keys, *[ACTION_MASK] * self._mask_in_info)
        if SyncSteps.fits(env):
            self._steps = SyncSteps(env, wanted, groups, forked=forked)
        self._tells_ends = isinstance(self._steps, SyncSteps)
        """Whether there is `info["final_obs"]` where an episode ended, and only there."""

    def _allocate(self, info_keys: tuple[str, ...]) -> None:
        """Memory for everything that a step hands out, as tensors and as arrays over the same numbers."""
        num_envs = self.spec.num_envs
        self._known = False
        """Whether nothing of the state of these environments is unknown, as far as was looked."""
        self._obs, self._final = self._reader.buffer(), self._reader.buffer()
        flags = torch.zeros((3, num_envs), dtype=torch.bool)
        info = {key: torch.zeros(num_envs) for key in info_keys}
        self._step = Step(self._obs.tensors, torch.zeros(num_envs), flags[0], flags[1], flags[2], info=info)
        self._reward, self._flags = self._step.reward.numpy(), flags.numpy()
        self._terminated, self._truncated, self._valid = self._flags
        self._info = {key: column.numpy() for key, column in self._step.info.items()}
        self._pending = np.zeros(num_envs, dtype=bool)
        """Rows whose next step is a filler, in `next_step` mode."""
        self._every, self._none = np.ones(num_envs, dtype=bool), np.zeros(num_envs, dtype=bool)
        device, everything = self.spec.device, replace(self._step, final_obs=self._final.tensors)
        self._courier = None if device.type == "cpu" else Courier(everything, device)

    def reset(self, seed: int | None = None) -> Obs:
        """Start every environment anew. Returns the first observations, groups of `[N, ...]`.

        With a seed every environment gets its own, hashed from `seed`, so neighbouring seeds share none. A vector
        environment with a single generator gets one.
        """
        raw, info = self._reset() if seed is None else self._reset_seeded(env_seeds(seed, self.spec.num_envs))
        self._pending[:] = False
        self._write(self._obs, raw, info, ended=self._none)
        return dict(self._obs.tensors) if self._courier is None else self._courier().obs

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment: `[N, A]` float32, `[N]` int64 or `[N, K]` int64."""
        raw, reward, terminated, truncated, info = self._steps.step(self._action.encode(action))
        if self._steps is self._env:  # others have looked at each environment
            _check_columns(self.spec.num_envs, reward=reward, terminated=terminated, truncated=truncated)
        self._reward[:] = reward
        for key, column in self._info.items():
            column[:] = 0
            copy_info_(column, info, key, self._every)
        done, self._flags[...] = self._none, GOES_ON
        if not self._tells_ends or "final_obs" in info:
            self._terminated[:] = terminated
            self._truncated[:] = truncated
            self._truncated &= ~self._terminated
            done = self._terminated | self._truncated
        final_obs = self._settle(raw, info, done)
        if self._courier is not None:
            step = self._courier()
            return step if final_obs is not None else replace(step, final_obs=None)
        own, flags = self._step, (self._step.terminated, self._step.truncated, self._step.valid)
        return Step(dict(own.obs), own.reward, *flags, final_obs, dict(own.info))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; `StateUnavailable` where not all of it is known."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Gives the state as it is now, whenever that is asked for; a quick copy until then."""
        if not self._known:  # nothing changes that later
            reason = obstacle(self._env)
            if reason is not None:
                raise StateUnavailable(f"the state of {self.spec.env_id} cannot be saved: {reason}")
            self._known = True
        elsewhere = self._steps.elsewhere() if isinstance(self._steps, SyncSteps) else None
        own, pending = snapshot(self._env, elsewhere), self._pending.copy()
        obs = {name: group.clone() for name, group in self._obs.tensors.items()}
        return lambda: {"env": as_tree(own), "pending": torch.from_numpy(pending), "obs": obs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit, in an environment made with the same options."""
        if isinstance(self._steps, SyncSteps):
            self._steps.forget()
        restore(self._env, state["env"])
        self._pending[:] = state["pending"].numpy()
        tree_copy_(self._obs.tensors, state["obs"])

    @property
    def idle_cores(self) -> int:
        """Cores that could step a part of the environments, in forked processes, and do so only on demand."""
        steps = self._steps
        if not isinstance(steps, SyncSteps) or len(steps.groups) > 1 or in_mujoco(steps.env):
            return 0
        return distributed.cores() - 1 if why_not_forked(steps.env) is None else 0

    @property
    def render_fps(self) -> float:
        """Pictures per second that show the task at its own speed."""
        return float(self._env.metadata.get("render_fps") or 30)

    def render(self) -> list[np.ndarray]:
        """A picture `[H, W, 3]` uint8 of every environment, if made with the option `render_mode="rgb_array"`."""
        try:
            return [np.asarray(frame) for frame in self._env.render() or ()]
        except gymnasium.error.DependencyNotInstalled as error:
            raise ImportError(f"pictures of {self.spec.env_id} need another package: {error}") from error

    def close(self) -> None:
        """Close the vector environment; calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._steps.close()

    def _settle_next_step(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> None:
        """A row that ended a step ago was just reset: no transition, whatever the environment says about it."""
        np.logical_not(self._pending, out=self._valid)
        self._reward[self._pending] = 0
        self._terminated &= self._valid
        self._truncated &= self._valid
        np.logical_and(done, self._valid, out=self._pending)
        self._write(self._obs, raw, info, ended=self._pending)

    def _settle_same_step(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> Obs | None:
        """Rows that ended show the next episode already; what belongs to the ended one is under `final_`."""
        self._write(self._obs, raw, info, ended=self._none)
        if done is self._none or not done.any():
            return None
        if info.get("final_obs") is None:
            raise ValueError(
                f"environment {np.flatnonzero(done)[0]} ended in same_step mode without info['final_obs']; the value "
                "of a truncated episode needs it, so let the vector environment report it or use another mode"
            )
        final_info = info.get("final_info") or {}
        for key, column in self._info.items():
            column[done] = 0
            copy_info_(column, final_info, key, done)
        self._reader.write_final(self._final, info["final_obs"], done)
        self._write_mask(self._final, final_info, rows=done, ended=self._every)
        return dict(self._final.tensors)

    def _settle_disabled(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> Obs | None:
        """Reset rows that ended, which the environment leaves to its caller."""
        self._write(self._obs, raw, info, ended=done)
        if not done.any():
            return None
        self._write(self._final, raw, info, ended=self._every)
        # NOTE: a copy, and new options each time: Gymnasium takes the mask out of the dict it is given.
        raw, info = self._reset(options={"reset_mask": done.copy()})
        self._reader.write(self._obs, raw, rows=done)
        self._write_mask(self._obs, info, rows=done, ended=self._none)
        return dict(self._final.tensors)

    def _write(self, target: ObsBuffer, raw: Any, info: dict[str, Any], ended: np.ndarray) -> None:
        self._reader.write(target, raw)
        self._write_mask(target, info, rows=self._every, ended=ended)

    def _write_mask(self, target: ObsBuffer, info: dict[str, Any], rows: np.ndarray, ended: np.ndarray) -> None:
        """Fill the mask from `info` if it comes from there, and check it; rows of `ended` need no allowed action."""
        if ACTION_MASK not in target.arrays:
            return
        mask = target.arrays[ACTION_MASK]
        if self._mask_in_info:
            mask[rows] = True
            copy_info_(mask, info, ACTION_MASK, rows)
        self._reader.mask_rule.check_(mask, ended)

    def _reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset as the arguments say; an observation that does not fit its space is named with its environment."""
        try:
            return self._steps.reset(**arguments)
        except (TypeError, ValueError) as error:
            singles = self._env._env_obs if isinstance(self._env, SyncVectorEnv) else []
            for number, obs in enumerate(singles):
                if obs is not None:
                    _check_row(obs, self._env.single_observation_space, number, error)
            raise

    def _reset_seeded(self, seeds: list[int]) -> tuple[Any, dict[str, Any]]:
        self._env.action_space.seed(seeds[0])
        try:
            return self._reset(seed=seeds)
        except (gymnasium.error.Error, TypeError, ValueError):
            if isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                raise
            return self._reset(seed=seeds[0])


def _check_columns(num_envs: int, **columns: Any) -> None:
    """Refuse rewards and flags of a vector environment that are not one number or flag per row."""
    for name, values in columns.items():
        found = np.asarray(values)
        if found.shape != (num_envs,):
            raise ContractBroken(f"{name} has shape {found.shape}, not ({num_envs},); one per row")
        if found.dtype.kind not in ("fiu" if name == "reward" else "b"):
            raise ContractBroken(f"{name} is {found.dtype}, it must be {'numbers' if name == 'reward' else 'bool'}")


def _check_row(obs: Any, space: gymnasium.Space, number: int, cause: Exception) -> None:
    try:
        check_space_obs(obs, space)
    except ContractBroken as error:
        raise EnvFailed(f"reset() {error}", number) from cause


def env_seeds(seed: int, num_envs: int, bits: int = 32) -> list[int]:
    """N different seeds of at most 32 `bits`, hashed from `seed`: those of `seed` and `seed + 1` are unrelated.

    They are those of this rank's environments among all.
    """
    total = num_envs * distributed.world_size()
    draws = np.random.SeedSequence(seed).generate_state(2 * total) >> (32 - bits)
    first_seen = np.sort(np.unique(draws, return_index=True)[1])[:total]
    return draws[first_seen].tolist()[distributed.own_rows(num_envs)]


def make_gymnasium(
    env_id: str,
    num_envs: int,
    *,
    vectorization: Vectorization = "auto",
    autoreset: Autoreset | None = None,
    info_keys: tuple[str, ...] = (),
    device: torch.device | str = "cpu",
    wrappers: Sequence[Callable[[gymnasium.Env], gymnasium.Env]] = (),
    vector_kwargs: dict[str, Any] | None = None,
    step_timeout: float = STEP_TIMEOUT,
    close_timeout: float = CLOSE_TIMEOUT,
    **kwargs: Any,
) -> GymnasiumEnv:
    """Registered with Gymnasium; the id alone will do: CartPole-v1, HalfCheetah-v5 (pip install "canter[mujoco]").

    N copies of it; `module:Name-v0` imports `module` first. `sync` steps them one after the other, `threads` in one
    thread for each core, `forked` in one process for each core, and `async` in one process each; `vector_entry_point`
    is the environment's own batched implementation. `auto` is `forked` for Gymnasium's MuJoCo where the state of each
    environment is known, `threads` where it is not, because MuJoCo leaves Python while it works, and otherwise `sync`
    where there is a choice. `autoreset` is `same_step` unless given, for it wastes no rows; an own implementation has
    the mode it has. `wrappers` go around each environment, `vector_kwargs` to the vector environment, `kwargs` to each
    environment. See `GymnasiumEnv` for the rest.
    """
    import_module_of(env_id)
    registered = gymnasium.registry.get(env_id.rpartition(":")[2])
    mode = parse_mode(autoreset or AutoresetMode.SAME_STEP)
    if vectorization == "auto" and registered is not None and registered.entry_point is None:
        vectorization = "vector_entry_point"
    if vectorization in ("threads", "forked") and mode is not AutoresetMode.SAME_STEP:
        raise ValueError(
            f"vectorization={vectorization} needs autoreset=same_step; with autoreset={autoreset} environments are "
            "stepped one after the other"
        )
    vector_kwargs, around = dict(vector_kwargs or {}), cast(list[Any], list(wrappers))
    if vectorization != "vector_entry_point":
        vector_kwargs["autoreset_mode"] = mode
        around.append(TupleActions.if_needed)
        if vectorization == "async":
            around.append(ClosesQuietly)
            vector_kwargs.setdefault("worker", partial(work, env_id=env_id))
        elif mode is not AutoresetMode.SAME_STEP:  # in which `SyncSteps` looks at what comes
            around.append(CheckContract)
        if str(registered and registered.entry_point).startswith("gymnasium.envs."):
            # Its checks are for environments that nobody has checked yet; the wrapper around every step would remain.
            kwargs = {"disable_env_checker": True, **kwargs}
    in_process = vectorization in ("auto", "threads", "forked")
    kind = "sync" if in_process else vectorization
    with explained(env_id):
        env = gymnasium.make_vec(env_id, num_envs, kind, vector_kwargs, around, **kwargs)
    try:
        about: dict[str, Any] = {"step_timeout": step_timeout, "close_timeout": close_timeout, "env_id": env_id}
        if in_process and isinstance(env, SyncVectorEnv):
            about |= groups_of(env, vectorization)
        return GymnasiumEnv(env, autoreset=autoreset, info_keys=info_keys, device=device, **about)
    except Exception:
        with suppress(Exception):
            env.close()  # worker processes would outlive a refused space
        raise

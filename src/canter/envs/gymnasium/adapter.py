"""Gymnasium vector environments of any kind as Canter environments.

N is the number of environments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from canter.core import distributed
from canter.core.declarations import OwnArrays
from canter.core.interface import Interface
from canter.core.registry import UserError, nearest
from canter.core.specs import ACTION_MASK, ContractBroken, EnvSpec, Step
from canter.core.struct import Obs, tree_copy_
from canter.envs.failures import EnvCalls
from canter.envs.gymnasium.forked import ForkedStepper
from canter.envs.gymnasium.infos import InfoMeans
from canter.envs.gymnasium.state import StateUnavailable
from canter.envs.gymnasium.sync import SyncStepper, runs_foreign_code
from canter.envs.gymnasium.vector import (
    CLOSE_TIMEOUT,
    STEP_TIMEOUT,
    Stepper,
    VectorStepper,
    find_mode,
    name_of,
    truncates,
)
from canter.envs.gymnasium.workers import AsyncStepper
from canter.envs.spaces import ObsBuffer, ObsReader, PinnedCopier, action_codec, copy_info_

Autoreset = Literal["next_step", "same_step", "disabled"]
DURATION = "duration"
"""Entry of `info` with the time that a step took, which every step must have if it is requested."""
CONTINUES = np.array([[False], [False], [True]])
"""Flags of environments whose episodes continue: not terminated, not truncated, valid."""


class GymnasiumEnv:
    """Any `gymnasium.vector.VectorEnv`, wrapped or not, as a `canter.core.specs.Env`.

    The three autoreset modes lead to the same transitions. `same_step` and `disabled` put the last
    observation of an episode into `Step.final_obs`; `next_step` leaves it in `Step.obs` and makes
    the step after it a filler row. The mode is the one the environment declares, or `autoreset`;
    without both the environment is refused.

    Actions are cast, reshaped and shifted to the space, never clipped. A mask of allowed actions is
    read from the observation key `action_mask` or, if the reset done here returns one, from
    `info["action_mask"]`; the latter is added to the observation groups, and rows without one allow
    everything.

    `info_keys` names numbers of `info` (one name, or several) to pass on as `Step.info`, float32
    `[N]`, 0 if absent; in rows that ended they are the ended episode's. `duration` must be there in
    every step, and the others at least once in the first rollout (`absent_info`). With `log_info`
    the numbers in `info` are averaged over steps and environments, see `read_metrics`.

    The environments of a `SyncVectorEnv` in `same_step` mode are stepped in `groups` at the same
    time, in threads or in `forked` processes, without a change to the results. A process that is late
    for `step_timeout` or `close_timeout` is killed.

    NOTE: in `same_step` mode Gymnasium keeps a reference to the last observation while it resets.
    An environment that reuses one array for all its observations overwrites it there, unless this
    class steps it, see `Stepper`.
    """

    _closed = False
    seeds_by_row = True

    def __init__(
        self,
        env: VectorEnv,
        *,
        autoreset: Autoreset | AutoresetMode | None = None,
        info_keys: str | Sequence[str] = (),
        log_info: bool = True,
        device: torch.device | str = "cpu",
        env_id: str = "",
        groups: int = 1,
        forked: bool = False,
        step_timeout: float = STEP_TIMEOUT,
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"{env} is not a gymnasium.vector.VectorEnv; wrap a function that makes it in gymnasium.vector."
                "SyncVectorEnv([make_it]), or use make_gymnasium with its id"
            )
        keys = parse_info_keys(info_keys)
        self._env = env
        self._stepper: Stepper
        # A wrapper around Gymnasium's classes, or a class derived from them, has a `step` of its
        # own.
        if type(env) is SyncVectorEnv:
            options: dict[str, Any] = {"groups": groups, "log_info": log_info}
            limits: dict[str, Any] = {"step_timeout": step_timeout, "close_timeout": close_timeout}
            self._stepper = ForkedStepper(env, **options, **limits) if forked else SyncStepper(env, **options)
        elif type(env) is AsyncVectorEnv:
            self._stepper = AsyncStepper(env, step_timeout, close_timeout)
        else:
            self._stepper = VectorStepper(env)
        self._action = action_codec(env.single_action_space)
        self._reader = ObsReader(env.single_observation_space, env.num_envs, self._action.spec)
        mode = find_mode(env, autoreset)
        _refuse_lost_steps(env, mode)
        self._settle = {
            AutoresetMode.NEXT_STEP: self._settle_next_step,
            AutoresetMode.SAME_STEP: self._settle_same_step,
            AutoresetMode.DISABLED: self._settle_disabled,
        }[mode]
        self._stepper.info_keys = (*keys, ACTION_MASK)
        self._mask_in_info = self._reader.add_mask(self._first_infos)
        if not self._mask_in_info:
            self._stepper.info_keys = keys
        self._logs_rows = log_info and not isinstance(self._stepper, SyncStepper)  # that one adds infos itself
        self.spec = EnvSpec(
            obs=self._reader.specs,
            action=self._action.spec,
            own_arrays=OwnArrays(self._action.array, self._reader.choices),
            num_envs=env.num_envs,
            device=torch.device(device),
            final_obs="in_place" if mode is AutoresetMode.NEXT_STEP else "separate",
            truncates=truncates(env),
            env_id=env_id or name_of(env),
            durations=DURATION in keys,
            interface=(env.metadata or {}).get("interface", Interface()),
        )
        """Shapes, dtypes, bounds and conventions."""
        self._allocate(keys)

    def _first_infos(self) -> list[dict[str, Any]]:
        """Return the info of a reset; close the environments, and their processes, if it fails."""
        try:
            return [self._stepper.reset()[1]]
        except BaseException:
            with suppress(Exception):
                self._stepper.close()
            raise

    def _allocate(self, info_keys: tuple[str, ...]) -> None:
        """Allocate the buffers of a step, as tensors and as arrays over the same memory."""
        num_envs = self.spec.num_envs
        self._obs = self._reader.buffer()
        self._final = self._reader.buffer()
        flags = torch.zeros((3, num_envs), dtype=torch.bool)
        info = {key: torch.zeros(num_envs) for key in info_keys}
        self._step = Step(self._obs.tensors, torch.zeros(num_envs), flags[0], flags[1], flags[2], info=info)
        self._reward = self._step.reward.numpy()
        self._flags = flags.numpy()
        self._terminated, self._truncated, self._valid = self._flags
        self._info = {key: column.numpy() for key, column in self._step.info.items()}
        self._absent = set(info_keys)
        self._infos = InfoMeans()
        self._timed = np.ones(num_envs, dtype=bool)
        """Rows of the last step that have a duration."""
        self._pending = np.zeros(num_envs, dtype=bool)
        """Rows whose next step is a filler, in `next_step` mode."""
        self._every = np.ones(num_envs, dtype=bool)
        self._none = np.zeros(num_envs, dtype=bool)
        self._copier: PinnedCopier | None = None
        """Copies steps to the device; None on a CPU."""
        if self.spec.device.type != "cpu":
            self._copier = PinnedCopier(replace(self._step, final_obs=self._final.tensors), self.spec.device)

    def reset(self, seed: int | None = None) -> Obs:
        """Reset every environment and return the first observations, groups of `[N, ...]`.

        With a seed every environment gets its own, hashed from `seed`, so neighbouring seeds share
        none. A vector environment with a single generator gets one.
        """
        self.read_metrics()  # drop the steps before, such as those of the environment check
        seeds = None if seed is None else env_seeds(seed, self.spec.num_envs)
        if seeds is not None:
            self._env.action_space.seed(seeds[0])
        raw, info = self._stepper.reset(seeds)
        self._pending[:] = False
        self._write(self._obs, raw, info, ended=self._none)
        return dict(self._obs.tensors) if self._copier is None else self._copier().obs

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment: `[N, A]` float32, `[N]` int64 or `[N, K]` int64."""
        raw, reward, terminated, truncated, info = self._stepper.step(self._action.encode(action))
        self._reward[:] = reward
        self._copy_info(info, self._every)
        done = self._none
        self._flags[...] = CONTINUES
        if not self._stepper.marks_ends or "final_obs" in info:
            self._terminated[:] = terminated
            self._truncated[:] = truncated
            self._truncated &= ~self._terminated
            done = self._terminated | self._truncated
        if self._logs_rows and info:
            self._add_infos(info, done)
        final_obs = self._settle(raw, info, done)
        if DURATION in self._info:
            self._check_durations()
        if self._copier is not None:
            copied = self._copier()
            return copied if final_obs is not None else replace(copied, final_obs=None)
        step = self._step
        return Step(
            dict(step.obs), step.reward, step.terminated, step.truncated, step.valid, final_obs, dict(step.info)
        )

    def _copy_info(self, info: dict[str, Any], rows: np.ndarray) -> None:
        """Copy the requested entries of `info` for some rows; an absent one is 0."""
        for key, column in self._info.items():
            column[rows] = 0
            copied = copy_info_(column, info, key, rows)
            if copied.any() and (key != DURATION or column.any()):
                self._absent.discard(key)
            if key == DURATION:
                self._timed[rows] = copied[rows]
        if self._absent:
            self._stepper.info_names |= {name for name in info if not name.startswith("_")}

    def _check_durations(self) -> None:
        """Raise ContractBroken for a valid step without a duration, or with a negative one."""
        durations = self._info[DURATION]
        wrong = np.flatnonzero(self._valid & (~self._timed | (durations < 0)))
        if wrong.size:
            row = int(wrong[0])
            with EnvCalls(row):
                if self._timed[row]:
                    raise ContractBroken(f"step() returned info['duration'] = {durations[row]:g}, below 0")
                raise ContractBroken(
                    "step() returned no info['duration'], which env.options.info_keys requests and every step must "
                    f"have; {self._advise(DURATION)}"
                )

    def absent_info(self) -> str | None:
        """Return an error about a requested entry of `info` that no step has had so far; None if all appeared."""
        if not self._absent:
            return None
        key = min(self._absent)
        if key == DURATION:
            return "info['duration'], which env.options.info_keys requests, was 0 in every step: no time passes"
        return f"step() never returned info[{key!r}], which env.options.info_keys requests; {self._advise(key)}"

    def _advise(self, key: str) -> str:
        """Return the entries of info there are, for a message about one that is missing."""
        names = sorted(self._stepper.seen_info() - {"final_obs", "final_info"})
        if key in names:
            return f"info[{key!r}] is not a number"
        return f"info has {', '.join(names)}: {nearest(key, names)}" if names else "info was empty"

    def _add_infos(self, info: dict[str, Any], done: np.ndarray) -> None:
        """Add the numbers in `info` to their means; those of a reset, which is no step, do not count."""
        final_info = info.get("final_info")
        if isinstance(final_info, dict):
            self._infos.add_rows(final_info, done)
            self._infos.add_rows(info, ~done)
        else:
            self._infos.add_rows(info, ~self._pending)

    def read_metrics(self) -> dict[str, float]:
        """Return the means of the numbers in `info` since the last call, by key; {} without `log_info`."""
        if isinstance(self._stepper, SyncStepper):
            self._stepper.take_infos(self._infos)
        return self._infos.read()

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state for the next step; raise `StateUnavailable` if it is unknown."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Copy the state quickly and return a function that makes a saveable tree of the copy."""
        try:
            env = self._stepper.snapshot()
        except StateUnavailable as error:
            raise StateUnavailable(f"the state of {self.spec.env_id} cannot be saved: {error}") from None
        pending = self._pending.copy()
        obs = {name: group.clone() for name, group in self._obs.tensors.items()}
        return lambda: {"env": env(), "pending": torch.from_numpy(pending), "obs": obs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit, in an environment with the same options."""
        self._stepper.load_state_dict(state["env"])
        self._pending[:] = state["pending"].numpy()
        tree_copy_(self._obs.tensors, state["obs"])

    @property
    def runs_foreign_code(self) -> bool:
        """True if this process steps an environment or wrapper that is not Gymnasium's or Canter's."""
        return not isinstance(self._stepper, ForkedStepper) and runs_foreign_code(self._env.unwrapped)

    @property
    def idle_cores(self) -> int:
        """Number of cores that could step environments in forked processes, on request."""
        return self._stepper.idle_cores

    @property
    def render_fps(self) -> float:
        """Pictures per second that show the task at its own speed."""
        return float(self._env.metadata.get("render_fps") or 30)

    def render(self) -> list[np.ndarray]:
        """Return a picture `[H, W, 3]` uint8 of every environment; needs `render_mode`."""
        try:
            return [np.asarray(frame) for frame in self._env.render() or ()]
        except gymnasium.error.DependencyNotInstalled as error:
            raise ImportError(f"pictures of {self.spec.env_id} need another package: {error}") from error

    def close(self) -> None:
        """Close the vector environment; calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._stepper.close()

    def _settle_next_step(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> None:
        """Mark rows that ended a step ago as fillers: they were only reset."""
        np.logical_not(self._pending, out=self._valid)
        self._reward[self._pending] = 0
        self._terminated &= self._valid
        self._truncated &= self._valid
        np.logical_and(done, self._valid, out=self._pending)
        self._write(self._obs, raw, info, ended=self._pending)

    def _settle_same_step(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> Obs | None:
        """Return the last observations of ended rows; `obs` has the next episode's first."""
        self._write(self._obs, raw, info, ended=self._none)
        if done is self._none or not done.any():
            return None
        if info.get("final_obs") is None:
            raise UserError(
                f"environment {np.flatnonzero(done)[0]} ended in same_step mode without info['final_obs']; the value "
                "of a truncated episode needs it, so let the vector environment report it or use another mode"
            )
        final_info = info.get("final_info") or {}
        self._copy_info(final_info, done)
        self._reader.write_final(self._final, info["final_obs"], done)
        self._write_mask(self._final, final_info, rows=done, ended=self._every)
        return dict(self._final.tensors)

    def _settle_disabled(self, raw: Any, info: dict[str, Any], done: np.ndarray) -> Obs | None:
        """Reset rows that ended and return their last observations."""
        self._write(self._obs, raw, info, ended=done)
        if not done.any():
            return None
        self._write(self._final, raw, info, ended=self._every)
        raw, info = self._stepper.reset(mask=done)
        self._reader.write(self._obs, raw, rows=done)
        self._write_mask(self._obs, info, rows=done, ended=self._none)
        return dict(self._final.tensors)

    def _write(self, target: ObsBuffer, raw: Any, info: dict[str, Any], ended: np.ndarray) -> None:
        self._reader.write(target, raw)
        self._write_mask(target, info, rows=self._every, ended=ended)

    def _write_mask(self, target: ObsBuffer, info: dict[str, Any], rows: np.ndarray, ended: np.ndarray) -> None:
        """Fill the mask from `info` and check it; rows of `ended` need no allowed action."""
        if ACTION_MASK not in target.arrays:
            return
        mask = target.arrays[ACTION_MASK]
        if self._mask_in_info:
            mask[rows] = True
            copy_info_(mask, info, ACTION_MASK, rows)
        self._reader.mask_rule.check_(mask, ended)


def parse_info_keys(keys: str | Sequence[str]) -> tuple[str, ...]:
    """Return the requested entries of `info`; a string is one name, as from a flag with a single name."""
    if isinstance(keys, str):
        return (keys,)
    if not isinstance(keys, Sequence) or not all(isinstance(key, str) for key in keys):
        raise UserError(f"env.options.info_keys={keys!r}: expected names of entries of info, such as [duration]")
    return tuple(dict.fromkeys(keys))


def env_seeds(seed: int, num_envs: int, bits: int = 32) -> list[int]:
    """Return N different seeds of at most 32 `bits`, hashed from `seed`.

    They are the seeds of this rank's environments among those of all ranks. Those of `seed` and
    `seed + 1` are unrelated.
    """
    total = num_envs * distributed.world_size()
    draws = np.random.SeedSequence(seed).generate_state(2 * total) >> (32 - bits)
    first_seen = np.sort(np.unique(draws, return_index=True)[1])[:total]
    return draws[first_seen].tolist()[distributed.rank_slice(num_envs)]


def _refuse_lost_steps(env: VectorEnv, mode: AutoresetMode) -> None:
    """Raise UserError for a combination in which Gymnasium itself loses steps."""
    base = env.unwrapped
    if mode is AutoresetMode.NEXT_STEP and isinstance(base, AsyncVectorEnv) and not base.shared_memory:
        # NOTE: its workers forget to clear their flag when reset after an end, and lose the next
        # action (1.4.0).
        raise UserError(
            "AsyncVectorEnv with shared_memory=False in next_step mode loses the first step after a reset; "
            "make it with shared_memory=True or with autoreset_mode='SameStep'"
        )

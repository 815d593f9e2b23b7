"""Fill rollouts: let the policy act, step the environments, write the transition.

T steps, N environments, M names of simulator metrics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.algorithms.base import Algorithm
from canter.core import distributed
from canter.core.data.rollout import Rollout, StepWriter
from canter.core.declarations import MetricSource
from canter.core.specs import (
    INTERRUPTS,
    LOST_FINAL_OBS,
    ContractBroken,
    Env,
    SnapshotState,
    Stateful,
    resumes_exactly,
    seeds_by_row,
)
from canter.core.struct import Metrics, Obs, tree_copy_, tree_map
from canter.envs.contract import absent_info, check_layout, check_obs
from canter.envs.directory import directory_of
from canter.envs.failures import HANG_WARNING_SECONDS, Watchdog, attributed, failure, warn_of_hanging
from canter.training.episodes import Episodes, EpisodeTracker
from canter.training.progress import Stopwatch


class EnvMetrics:
    """A table of the simulator's metrics (`Step.metrics`) by step, at a fixed address.

    Names are added when they first appear. The first rollouts, which run eagerly, fix them for a
    captured collection.
    """

    def __init__(self, horizon: int, device: torch.device) -> None:
        self.names: list[str] = []
        self.nothing = torch.tensor(torch.nan, device=device)
        self.table = self.nothing.expand(horizon, 0)
        """`[T, M]`, NaN where a step did not report."""

    def write(self, t: int, reported: dict[str, Tensor]) -> None:
        """Store the metrics of step t."""
        new = [name for name in reported if name not in self.names]
        if new:
            self.names += new
            self.table = torch.cat([self.table, self.nothing.expand(len(self.table), len(new))], 1)
        if self.names:
            self.table[t].copy_(torch.stack([reported.get(name, self.nothing) for name in self.names]))

    def means(self) -> dict[str, Tensor]:
        """Return means over all ranks' reports as 0-d tensors by `env/<name>`; NaN if none."""
        if not self.names:
            return {}
        sums = distributed.sum_(torch.stack([self.table.nansum(0), (~self.table.isnan()).sum(0).to(self.table)]))
        return {f"env/{name}": mean for name, mean in zip(self.names, (sums[0] / sums[1]).unbind(), strict=True)}


_log = logging.getLogger(__name__)

PARTIAL = "the environment saves only a part of its state"
"""Reason why episodes restart if an environment has `resumes = "partial"`."""


class Collector:
    """Fills one rollout after another; episodes continue from each to the next."""

    def __init__(self, env: Env, algorithm: Algorithm[Any], seed: int, patience: float = HANG_WARNING_SECONDS) -> None:
        self.env = env
        self.algorithm = algorithm
        self.seed = seed
        self.watchdog = Watchdog(patience, partial(warn_of_hanging, threading.get_ident()))
        if env.spec.final_obs == "unknown" and env.spec.truncates is not False:
            _log.warning("%s: %s", env.spec.env_id or type(env).__name__, LOST_FINAL_OBS)
        algorithm.prepare_env(env)
        obs = self._reset_env(seed)
        self.state = algorithm.policy.initial_state(env.spec.num_envs)
        self.rollout = Rollout.allocate(
            algorithm.horizon, obs, algorithm.empty_record(), env.spec, self.state, algorithm.sequence_length
        )
        self.writers = self.rollout.step_writers()
        tree_copy_(self.rollout.obs_at(algorithm.horizon), obs)
        self.tracker = EpisodeTracker(algorithm.horizon, env.spec.num_envs, env.spec.device)
        self.reported = EnvMetrics(algorithm.horizon, env.spec.device)
        self._metric_source = env if isinstance(env, MetricSource) else None
        self.steps_before = 0
        self.fill: Callable[[Rollout[Any]], Metrics] | None = None
        """Fills a rollout by one program, with the policy in it; None steps the environments."""
        self.threads: int | None = None
        """Threads of a run that chose their number; loading a checkpoint restores its number."""
        self._copy_env_state: Callable[[], Callable[[], Any]] | None = None
        """Copies the environment's state, see `env_snapshot`; None if it has none."""
        if isinstance(env, Stateful):  # checked once: a runtime protocol check is slow
            self._copy_env_state = env.snapshot if isinstance(env, SnapshotState) else partial(_copy_state_dict, env)
        self.clock = Stopwatch()

    @torch.no_grad()
    def collect(self, act: Callable[..., Any] | None = None) -> Rollout[Any]:
        """Step every environment T times; `act` may be another form of the algorithm's own.

        Raises `EnvironmentFailed` if an environment fails, and on a CPU `NonFiniteObservation`;
        then nothing of the algorithm has changed but its random streams.
        """
        act = act or self.algorithm.act
        self.clock.lap("other")
        obs = self.rollout.begin()
        state = self.state
        reset = self.rollout.reset[0]
        try:
            if self.fill is not None:
                self._fill_at_once(self.fill)
            for t, writer in enumerate(self.writers if self.fill is None else ()):
                self.rollout.store_state(t, state, self.algorithm.sequence_length)
                action, record, state = act(obs, state, reset)
                self.clock.lap("policy")
                obs = self._step(t, action, record, writer)
                if self.algorithm.reads_reset:
                    reset = self.rollout.mark_resets(self.env.spec.final_obs, t)
        finally:
            self.watchdog.end()
        if self.steps_before == 0:
            self._check_info()
        self.rollout.mark_resets(self.env.spec.final_obs)
        self.tracker.search(self.rollout, self.steps_before)
        tree_copy_(self.state, state)
        self.tracker.add(self.rollout)
        self.clock.lap("policy")
        return self.rollout

    def _step(self, t: int, action: Tensor, record: Any, writer: StepWriter[Any]) -> Obs:
        """Step the environments and write the transition; return the next observations.

        An error is attributed to the environment and the step in which it failed.
        """
        try:
            self.watchdog.begin()
            step = self.env.step(action)
            self.clock.lap("env")
            if t == 0 or self.steps_before == 0:
                check_layout(step, self.env.spec)
            obs = writer.write(record, step)
        except BaseException as error:
            if isinstance(error, INTERRUPTS):
                raise
            spec = self.env.spec
            envs_before = distributed.rank() * spec.num_envs // spec.num_agents
            raise failure(error, "step", self.steps_before + t, envs_before) from error
        if step.metrics or self.reported.names:
            self.reported.write(t, step.metrics)
        return obs

    def _fill_at_once(self, fill: Callable[[Rollout[Any]], Metrics]) -> None:
        """Fill the rollout by one program; an error is attributed to the environment."""
        try:
            self.watchdog.begin()
            metrics = fill(self.rollout)
        except BaseException as error:
            if isinstance(error, INTERRUPTS):
                raise
            raise failure(error, "step", self.steps_before) from error
        self.clock.lap("env")
        for t in range(self.algorithm.horizon if metrics else 0):
            self.reported.write(t, {name: values[t] for name, values in metrics.items()})

    def _check_info(self) -> None:
        """Raise `EnvironmentFailed` if the first rollout had no entry of info that the settings request."""
        absent = absent_info(self.env)
        if absent is not None:
            raise failure(ContractBroken(absent), "step", None)

    def _reset_env(self, seed: int) -> Obs:
        """Restart all episodes."""
        self.watchdog.begin()
        if distributed.rank() and not seeds_by_row(self.env):
            # Ranks must not all play the same episodes, and this environment ignores its
            # rank.
            draws = np.random.SeedSequence(seed, spawn_key=(distributed.rank(),)).generate_state(1, np.uint64)
            seed = int(draws[0]) >> 1
        try:
            with attributed("reset"), directory_of(self.env).during("reset()"):
                obs = self.env.reset(seed)
                check_obs(obs, self.env.spec, "reset()")
        finally:
            self.watchdog.end()
        return obs

    def keep_episodes(self, flags: Tensor | None = None) -> None:
        """Keep the episodes of the last rollout on the device until they are read; no host sync.

        `flags` are read with them, see `EpisodeTracker.keep`.
        """
        self.tracker.keep(self.rollout, flags)
        self.steps_before += self.algorithm.horizon

    def read_episodes(self) -> Episodes:
        """Return the episodes of all rollouts kept since the last reading, or of the last rollout.

        Raises `NonFinite` if one of them or its update has NaN or infinity.
        """
        if not self.tracker.kept:
            self.keep_episodes()
        return self.tracker.read(self.steps_before)

    def read_host_metrics(self) -> dict[str, float]:
        """Return the metrics that this rank's environment gathered on the host since the last call, by `env/<name>`."""
        if self._metric_source is None:
            return {}
        return {f"env/{name}": value for name, value in self._metric_source.read_metrics().items()}

    def env_metrics(self) -> Metrics:
        """Return the simulator's metrics of the last rollout by `env/<name>`, 0-d on the device."""
        return self.reported.means()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next rollout depends on, except the algorithm.

        `env` is None if the environment cannot save its state. `episodes_restart` is the reason why
        episodes restart when the state is loaded, or None if they continue.
        """
        return self._state(self.env_snapshot()())

    def env_snapshot(self) -> Callable[[], dict[str, Any]]:
        """Copy the environment's state; return a function that builds its part of `state_dict`."""
        reason = "this kind of environment cannot save its state"
        if self._copy_env_state is not None:
            try:
                read_copy = self._copy_env_state()
                restart = None if resumes_exactly(self.env) else PARTIAL
                return lambda: {"env": read_copy(), "episodes_restart": restart}
            except NotImplementedError as error:
                reason = str(error)
        return lambda: {"env": None, "episodes_restart": reason}

    def state_after_failure(self, env_state: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        """Return `state_dict` with an earlier state of the environment, or None and a `reason`.

        Then episodes restart, but what outlives them in an environment, such as the opponents of
        self-play, is saved as it is now.
        """
        if env_state is None:
            env_state = {"env": None, "episodes_restart": reason}
            with suppress(Exception):
                env_state["env"] = self.env_snapshot()()["env"]
        return self._state(env_state)

    def _state(self, env_state: dict[str, Any]) -> dict[str, Any]:
        own = {"steps_before": self.steps_before, "threads": self.threads}
        return tree_map(torch.clone, self.tensors()) | own | env_state

    def tensors(self) -> dict[str, Any]:
        """Return the live tensors that the next rollout starts from."""
        return {
            "obs": self.rollout.obs_at(self.algorithm.horizon),
            "reset": self.rollout.reset[self.algorithm.horizon],
            "state": self.state,
            "running_return": self.tracker.running_return,
            "running_length": self.tracker.running_length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; episodes restart if it has none of the environment."""
        self.steps_before = state["steps_before"]
        if self.threads is not None and state.get("threads") is not None:
            self.threads = int(state["threads"])
            torch.set_num_threads(self.threads)
        if state["env"] is not None:
            if not isinstance(self.env, Stateful):
                raise TypeError(f"{type(self.env).__name__} cannot load the environment state that was saved")
            self.env.load_state_dict(state["env"])
        if state["episodes_restart"] is not None:
            _log.warning("all episodes restart: %s", state["episodes_restart"])
            self._restart()
        else:
            tree_copy_(self.tensors(), state)

    def _restart(self) -> None:
        # Not the first seed again, or a run stopped early and often would see the same few
        # episodes.
        draws = np.random.SeedSequence(self.seed, spawn_key=(self.steps_before,)).generate_state(1, np.uint64)
        tree_copy_(self.rollout.obs_at(self.algorithm.horizon), self._reset_env(int(draws[0]) >> 1))
        self.rollout.reset[self.algorithm.horizon].fill_(True)
        self.tracker.running_return.zero_()
        self.tracker.running_length.zero_()


def _copy_state_dict(env: Stateful) -> Callable[[], dict[str, Any]]:
    """Copy the state of an environment without a faster `snapshot`."""
    state = env.state_dict()
    return lambda: state

"""Numbers that a simulator reports of its own, on the way to the log.

T steps, M names.

Steps environments with the current policy.

T steps, N environments.
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
from canter.core.data.rollout import Rollout
from canter.core.specs import FROM_OUTSIDE, LOST_FINAL_OBS, Env, Stateful
from canter.core.struct import Metrics, Obs, tree_copy_, tree_map
from canter.envs.contract import blamed, check_form, check_obs, failure
from canter.envs.watchdog import PATIENCE, Watchdog, warn_of_hanging
from canter.training.episodes import Episodes, EpisodeTracker
from canter.training.progress import Stopwatch


class EnvMetrics:
    """What the simulator itself reports (`Step.metrics`), by step, at an address that stays once all names are known.

    A name is learned when it first comes: the first rollouts, which run eagerly, fix the names for a captured
    collection.
    """

    def __init__(self, horizon: int, device: torch.device) -> None:
        self.names: list[str] = []
        self.nothing = torch.tensor(torch.nan, device=device)
        self.table = self.nothing.expand(horizon, 0)
        """`[T, M]`, NaN where a step did not report."""

    def write(self, t: int, reported: dict[str, Tensor]) -> None:
        """Keep what step t reported."""
        new = [name for name in reported if name not in self.names]
        if new:
            self.names += new
            self.table = torch.cat([self.table, self.nothing.expand(len(self.table), len(new))], 1)
        if self.names:
            self.table[t].copy_(torch.stack([reported.get(name, self.nothing) for name in self.names]))

    def means(self) -> dict[str, Tensor]:
        """By `env/<name>`, 0-d: means over the steps that reported, on all ranks; NaN where none did."""
        if not self.names:
            return {}
        sums = distributed.sum_(torch.stack([self.table.nansum(0), (~self.table.isnan()).sum(0).to(self.table)]))
        return {f"env/{name}": mean for name, mean in zip(self.names, (sums[0] / sums[1]).unbind(), strict=True)}


_log = logging.getLogger(__name__)

PARTIAL = "the environment saves a part of its state, and no more than that part was loaded"
"""Why episodes do not go on where an environment has `resumes = "partial"`."""


class Collector:
    """Fills one rollout after another; episodes run on from each to the next."""

    def __init__(self, env: Env, algorithm: Algorithm[Any], seed: int, patience: float = PATIENCE) -> None:
        self.env, self.algorithm, self.seed = env, algorithm, seed
        self.watchdog = Watchdog(patience, partial(warn_of_hanging, threading.get_ident()))
        if env.spec.final_obs == "unknown" and env.spec.truncates is not False:
            _log.warning("%s: %s", env.spec.env_id or type(env).__name__, LOST_FINAL_OBS)
        obs = self._reset_env(seed)
        self.state = algorithm.policy.initial_state(env.spec.num_envs)
        self.rollout = Rollout.allocate(
            algorithm.horizon, obs, algorithm.empty_record(), env.spec, self.state, algorithm.sequence_length
        )
        self.rows = self.rollout.rows()
        tree_copy_(self.rollout.obs_at(algorithm.horizon), obs)
        self.tracker = EpisodeTracker(algorithm.horizon, env.spec.num_envs, env.spec.device)
        self.reported = EnvMetrics(algorithm.horizon, env.spec.device)
        self.steps_before = 0
        self.threads: int | None = None
        """Threads that the run learns with, where that was chosen; a checkpoint's number then takes its place."""
        self.take: Callable[[], Callable[[], Any]] | None = None
        """Takes a copy of the environment's state, see `env_snapshot`; None where it has none to give."""
        if isinstance(env, Stateful):  # which takes long to find out
            self.take = getattr(env, "snapshot", None) or partial(_whole, env)
        self.clock = Stopwatch()

    @torch.no_grad()
    def collect(self, act: Callable[..., Any] | None = None) -> Rollout[Any]:
        """T steps of every environment; `act` may be another form of the algorithm's own.

        Raises `EnvironmentFailed` where an environment does not do its part, and on a CPU `NonFiniteObservation`; then
        nothing of the algorithm has changed but its random streams.
        """
        act = act or self.algorithm.act
        self.clock.lap("other")
        obs, state, reset, spec = self.rollout.begin(), self.state, self.rollout.reset[0], self.env.spec
        t, stepping, remembers, lap = 0, False, len(self.rollout.state) > 0, self.clock.lap
        try:
            for t, row in enumerate(self.rows):
                if remembers:
                    self.rollout.keep_state(t, state, self.algorithm.sequence_length)
                action, record, state = act(obs, state, reset)
                lap("policy")
                stepping = True
                self.watchdog.begin()
                step = self.env.step(action)
                lap("env")
                if self.steps_before == 0 or t == 0:
                    check_form(step, spec)
                obs = row.write(record, step)
                stepping = False
                if self.algorithm.reads_reset:
                    reset = self.rollout.mark_resets(spec.final_obs, t)
                if step.metrics or self.reported.names:
                    self.reported.write(t, step.metrics)
        except BaseException as error:
            if not stepping or isinstance(error, FROM_OUTSIDE):
                raise
            before = distributed.rank() * spec.num_envs // spec.num_agents
            raise failure(error, "step", self.steps_before + t, before) from error
        finally:
            self.watchdog.end()
        self.rollout.mark_resets(spec.final_obs)
        self.tracker.search(self.rollout, self.steps_before)
        tree_copy_(self.state, state)
        self.tracker.add(self.rollout)
        self.clock.lap("policy")
        return self.rollout

    def _reset_env(self, seed: int) -> Obs:
        """Start all episodes anew."""
        self.watchdog.begin()
        if distributed.rank() and not getattr(self.env, "seeds_by_row", False):
            # It knows nothing of ranks, which must not all play the same episodes.
            draws = np.random.SeedSequence(seed, spawn_key=(distributed.rank(),)).generate_state(1, np.uint64)
            seed = int(draws[0]) >> 1
        try:
            with blamed("reset"):
                obs = self.env.reset(seed)
                check_obs(obs, self.env.spec, "reset()")
        finally:
            self.watchdog.end()
        return obs

    def keep_episodes(self, flags: Tensor | None = None) -> None:
        """Keep the episodes of the last rollout on the device, without waiting for it, until they are read.

        `flags` are read with them, see `EpisodeTracker.keep`.
        """
        self.tracker.keep(self.rollout, flags)
        self.steps_before += self.algorithm.horizon

    def read_episodes(self) -> Episodes:
        """Episodes of all rollouts kept since the last reading; where none was, of the last rollout.

        Raises `NonFinite` if an environment gave NaN or infinity in any of them, or an update left some.
        """
        if not self.tracker.kept:
            self.keep_episodes()
        return self.tracker.read(self.steps_before)

    def env_metrics(self) -> Metrics:
        """What the simulator reported in the last rollout, by `env/<name>`, 0-d on the device."""
        return self.reported.means()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next rollout depends on besides the algorithm.

        `env` is None where the environment cannot give its state. `episodes_restart` says why episodes cannot go on,
        None where they can.
        """
        return self._state(self.env_snapshot()())

    def env_snapshot(self) -> Callable[[], dict[str, Any]]:
        """Gives `env` and `episodes_restart` as of now, whenever asked for; `Stateful` says what makes it quick."""
        reason = "this kind of environment cannot save its state"
        if self.take is not None:
            try:
                env = self.take()
                reason = None if getattr(self.env, "resumes", "exact") == "exact" else PARTIAL
                return lambda: {"env": env(), "episodes_restart": reason}
            except NotImplementedError as error:
                reason = str(error)
        return lambda: {"env": None, "episodes_restart": reason}

    def state_after_failure(self, env_state: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        """As `state_dict`, with the environment as it was; None where that is not known: `reason` then says why.

        What outlives episodes in an environment, such as the pool of opponents in self-play, is then saved as it is
        now.
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
        """What the next rollout begins with, where it lives."""
        return {
            "obs": self.rollout.obs_at(self.algorithm.horizon),
            "reset": self.rollout.reset[self.algorithm.horizon],
            "state": self.state,
            "running_return": self.tracker.running_return,
            "running_length": self.tracker.running_length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved collector stood; with new episodes, where the environment could not save its own."""
        self.steps_before = state["steps_before"]
        if self.threads is not None and state.get("threads") is not None:
            self.threads = int(state["threads"])
            torch.set_num_threads(self.threads)
        if state["env"] is not None:
            if not isinstance(self.env, Stateful):
                raise TypeError(f"{type(self.env).__name__} cannot load the environment state that was saved")
            self.env.load_state_dict(state["env"])
        if state["episodes_restart"] is not None:
            _log.warning("all episodes start anew: %s", state["episodes_restart"])
            self._restart()
        else:
            tree_copy_(self.tensors(), state)

    def _restart(self) -> None:
        # Another seed than at the start, or a run stopped early and often would see the same few episodes.
        draws = np.random.SeedSequence(self.seed, spawn_key=(self.steps_before,)).generate_state(1, np.uint64)
        tree_copy_(self.rollout.obs_at(self.algorithm.horizon), self._reset_env(int(draws[0]) >> 1))
        self.rollout.reset[self.algorithm.horizon].fill_(True)
        self.tracker.running_return.zero_()
        self.tracker.running_length.zero_()


def _whole(env: Stateful) -> Callable[[], dict[str, Any]]:
    """The state of an environment that knows no quicker copy."""
    state = env.state_dict()
    return lambda: state

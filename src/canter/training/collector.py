"""Steps environments with the current policy and keeps account of their episodes.

T steps, N environments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.algorithms.base import Algorithm
from canter.data.rollout import Rollout
from canter.functional.batch_means import in_groups
from canter.machine import set_threads
from canter.specs import LOST_FINAL_OBS, Env, Resumable
from canter.struct import tree_copy_, tree_map
from canter.training.env_metrics import EnvMetrics
from canter.training.stopwatch import Stopwatch

_log = logging.getLogger(__name__)

PARTIAL = "the environment saves a part of its state, and no more than that part was loaded"
"""Why episodes do not go on where an environment has `resumes = "partial"`."""


class NonFiniteObservation(RuntimeError):
    """An environment gave NaN or infinity; the message names the environment, the key and the step."""


@dataclass
class Episodes:
    """Episodes that ended in one rollout, on the host, in the order in which they ended."""

    return_: list[float]
    """Sum of the raw rewards of each episode."""
    length: list[int]
    terminated: list[bool]
    """Whether it ended by itself rather than being cut off."""
    env_steps: int
    """Real transitions in the rollout; reset rows are not counted."""
    resets: int
    """Episodes that began in the rollout."""
    mean_reward: float
    """Mean of the raw reward over the real transitions."""
    gain_and_time: list[list[float]]
    """`[2][G]` sums of the raw rewards and of the durations, over at most 20 groups of environments."""


class EpisodeTracker:
    """Running returns and lengths of N episodes, on the device."""

    def __init__(self, horizon: int, num_envs: int, device: torch.device) -> None:
        self.running_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.running_length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        # Row t holds the running values after step t; they are an episode's totals where it ended.
        self.return_ = torch.zeros((horizon, num_envs), dtype=torch.float64, device=device)
        self.length = torch.zeros((horizon, num_envs), dtype=torch.int64, device=device)

    def add(self, rollout: Rollout[Any]) -> None:
        """Count the steps of a rollout; a row that is not valid adds nothing."""
        done = rollout.done
        row = torch.arange(len(done), device=done.device).unsqueeze(-1)
        ended = torch.where(done, row, -1).cummax(0).values
        before = torch.cat([torch.full_like(ended[:1], -1), ended[:-1]])  # the last end before each row, -1 for none
        for running, totals, gained in (
            (self.running_return, self.return_, torch.where(rollout.valid, rollout.reward, 0.0)),
            (self.running_length, self.length, rollout.valid),
        ):
            total = running + gained.cumsum(0, dtype=running.dtype)
            earlier = torch.where(before >= 0, total.gather(0, before.clamp(min=0)), 0)
            torch.sub(total, earlier, out=totals)
            running.copy_(torch.where(done[-1], 0, totals[-1]))

    def read(self, rollout: Rollout[Any]) -> Episodes:
        """The episodes that ended in the rollout just collected."""
        ended, valid = rollout.done, rollout.valid
        rewards = torch.where(valid, rollout.reward, 0.0)
        begun = rollout.reset[:-1] & valid
        totals = torch.stack([total.sum().double() for total in (valid, begun, rewards)])
        env_steps, resets, reward = totals.tolist()
        time = torch.where(valid, rollout.duration, 0.0)
        return Episodes(
            return_=self.return_[ended].tolist(),
            length=self.length[ended].tolist(),
            terminated=rollout.terminated[ended].tolist(),
            env_steps=int(env_steps),
            resets=int(resets),
            mean_reward=reward / max(env_steps, 1),
            gain_and_time=in_groups(torch.stack([rewards, time]).sum(1, dtype=torch.float64).cpu()).tolist(),
        )


class Collector:
    """Fills one rollout after another; episodes run on from each to the next."""

    def __init__(self, env: Env, algorithm: Algorithm[Any], seed: int) -> None:
        self.env, self.algorithm, self.seed = env, algorithm, seed
        if env.spec.final_obs == "unknown" and env.spec.truncates is not False:
            _log.warning("%s: %s", env.spec.env_id or type(env).__name__, LOST_FINAL_OBS)
        obs = env.reset(seed)
        self.state = algorithm.policy.initial_state(env.spec.num_envs)
        self.rollout = Rollout.allocate(
            algorithm.horizon, obs, algorithm.empty_record(), env.spec, self.state, algorithm.sequence_length
        )
        self.rows = self.rollout.rows(env.spec.final_obs)
        tree_copy_(self.rollout.obs_at(algorithm.horizon), obs)
        self.tracker = EpisodeTracker(algorithm.horizon, env.spec.num_envs, env.spec.device)
        self.reported = EnvMetrics(algorithm.horizon, env.spec.device)
        self.steps_before = 0
        self.threads: int | None = None
        """Threads that the run learns with, once that is decided."""
        self.clock = Stopwatch()

    @torch.no_grad()
    def collect(self, act: Callable[..., Any] | None = None) -> Rollout[Any]:
        """T steps of every environment; `act` may be another form of the algorithm's own."""
        act = act or self.algorithm.act
        self.clock.lap("other")
        obs, state, reset = self.rollout.begin(), self.state, self.rollout.reset[0]
        for t, row in enumerate(self.rows):
            self.rollout.keep_state(t, state, self.algorithm.sequence_length)
            action, record, state = act(obs, state, reset)
            self.clock.lap("policy")
            step = self.env.step(action)
            self.clock.lap("env")
            obs, reset = row.write(record, step), row.reset
            self.reported.write(t, step.metrics)
        tree_copy_(self.state, state)
        self.tracker.add(self.rollout)
        self.clock.lap("policy")
        return self.rollout

    def read_episodes(self) -> Episodes:
        """Episodes that ended in the last rollout; stops the run if an environment gave NaN or infinity."""
        check_finite(self.rollout, self.steps_before)
        self.steps_before += self.algorithm.horizon
        return self.tracker.read(self.rollout)

    def env_metrics(self) -> dict[str, Tensor]:
        """What the simulator reported in the last rollout, by `env/<name>`, 0-d on the device."""
        return self.reported.means()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next rollout depends on besides the algorithm.

        `env` is None where the environment cannot give its state. `episodes_restart` says why episodes cannot go on,
        None where they can.
        """
        env, reason = None, "this kind of environment cannot save its state"
        if isinstance(self.env, Resumable):
            try:
                env = self.env.state_dict()
                reason = None if getattr(self.env, "resumes", "exact") == "exact" else PARTIAL
            except NotImplementedError as error:
                reason = str(error)
        tensors = {
            "obs": self.rollout.obs_at(self.algorithm.horizon),
            "reset": self.rollout.reset[self.algorithm.horizon],
            "state": self.state,
            "running_return": self.tracker.running_return,
            "running_length": self.tracker.running_length,
        }
        saved = tree_map(lambda tensor: tensor.clone(), tensors)
        own = {"steps_before": self.steps_before, "threads": self.threads}
        return saved | own | {"env": env, "episodes_restart": reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved collector stood; with new episodes, where the environment could not save its own."""
        self.steps_before = state["steps_before"]
        if self.threads is None and state.get("threads") is not None:
            self.threads = int(state["threads"])
            set_threads(self.threads)
        if state["env"] is not None:
            if not isinstance(self.env, Resumable):
                raise TypeError(f"{type(self.env).__name__} cannot load the environment state that was saved")
            self.env.load_state_dict(state["env"])
        if state["episodes_restart"] is not None:
            _log.warning("all episodes start anew: %s", state["episodes_restart"])
            self._restart()
            return
        tree_copy_(self.rollout.obs_at(self.algorithm.horizon), state["obs"])
        self.rollout.reset[self.algorithm.horizon].copy_(state["reset"])
        tree_copy_(self.state, state["state"])
        self.tracker.running_return.copy_(state["running_return"])
        self.tracker.running_length.copy_(state["running_length"])

    def _restart(self) -> None:
        # Another seed than at the start, or a run stopped early and often would see the same few episodes.
        draws = np.random.SeedSequence(self.seed, spawn_key=(self.steps_before,)).generate_state(1, np.uint64)
        tree_copy_(self.rollout.obs_at(self.algorithm.horizon), self.env.reset(int(draws[0]) >> 1))
        self.rollout.reset[self.algorithm.horizon].fill_(True)
        self.tracker.running_return.zero_()
        self.tracker.running_length.zero_()


def check_finite(rollout: Rollout[Any], steps_before: int) -> None:
    """Raise if a reward or observation is NaN or infinite, naming environment, key and step."""
    seen: dict[str, Tensor] = {"reward": rollout.reward, "duration": rollout.duration}
    seen |= {f"observation {name!r}": group for name, group in rollout.obs.items()}
    for name, group in (rollout.final_obs or {}).items():
        ended = rollout.done.reshape(*rollout.done.shape, *[1] * (group.ndim - 2))
        seen[f"final observation {name!r}"] = torch.where(ended, group, torch.zeros_like(group))
    bad = {key: ~torch.isfinite(values) for key, values in seen.items() if values.is_floating_point()}
    if not torch.stack([flags.any() for flags in bad.values()]).any():
        return
    key = next(key for key, flags in bad.items() if flags.any())
    t, env, *component = (int(i) for i in bad[key].nonzero()[0])
    where = f" component {component}" if component else ""
    raise NonFiniteObservation(
        f"environment {env} gave {key}{where} = {float(seen[key][t, env][tuple(component)])} "
        f"at its step {steps_before + t}; training stopped, no parameter was changed by it"
    )

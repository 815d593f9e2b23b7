"""The player: a policy acts in N parallel environments and learns nothing.

Evaluation, videos, viewers and export all play through this module.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from canter.core.registry import Registry, UserError
from canter.core.specs import ACTION_MASK, Continuous, Discrete, Env, EnvSpec, Step
from canter.core.struct import Obs, State
from canter.envs.directory import directory_of
from canter.envs.failures import attributed, watched
from canter.nn.actor_critic import Policy
from canter.nn.distributions import DiagGaussian, TanhGaussian


class ActingPolicy(Protocol):
    """The part of a policy that a player needs; `canter.Policy` has it, a hand-written rule may."""

    def initial_state(self, num_envs: int) -> State:
        """Return the recurrent state at the start of an episode, `()` for a feed-forward policy."""
        ...

    def act(
        self, obs: Obs, state: State, reset: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, State]:
        """Return actions `[N, ...]` for the environment, and the next recurrent state."""
        ...


@dataclass(frozen=True)
class PlayStep:
    """One step of N environments. The policy sees `step.obs`, `state` and `reset` next.

    The environment may overwrite the tensors of `step` in its next step: copy what must last.
    """

    action: Tensor
    """Actions `[N, ...]`, as the environment received them."""
    step: Step
    """Result of these actions."""
    state: State
    """Recurrent state of the policy after acting."""
    reset: Tensor
    """`[N]` bool: `step.obs` begins a new episode, or belongs to none."""


@dataclass(frozen=True)
class Episode:
    """One episode, or the part of it that was played."""

    env: int
    """Index of the environment."""
    return_: float
    """Sum of the raw rewards."""
    length: int
    """Number of transitions, without reset steps."""


@dataclass(frozen=True)
class PlayResult:
    """Episodes that were played, sorted by environment, and by time within each."""

    finished: list[Episode]
    """Episodes that ended."""
    unfinished: list[Episode]
    """Requested episodes that were still running when the steps were used up."""

    @property
    def reward_per_step(self) -> float:
        """Mean reward of all transitions, those of unfinished episodes included."""
        episodes = self.finished + self.unfinished
        return sum(episode.return_ for episode in episodes) / max(1, sum(episode.length for episode in episodes))


@dataclass
class Player:
    """A policy acting in N environments, deterministically or with its exploration noise.

    Normalizer statistics are not updated, action masks are part of the observations, and a
    recurrent policy receives the starts of episodes. Equal seeds play equal episodes.
    """

    policy: ActingPolicy
    env: Env
    deterministic: bool = field(default=True, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    @torch.no_grad()
    def steps(self) -> Iterator[PlayStep]:
        """Reset every environment, then yield steps without end; episodes follow each other."""
        spec = self.env.spec
        generator = torch.Generator(spec.device).manual_seed(self.seed)
        reset = torch.ones(spec.num_envs, dtype=torch.bool, device=spec.device)
        directory = directory_of(self.env)
        with watched() as watchdog:
            with attributed("reset"), directory.during("reset()"):
                obs = self.env.reset(self.seed)
            state = self.policy.initial_state(spec.num_envs)
            for number in count():
                action, state = self.policy.act(
                    obs, state, reset, deterministic=self.deterministic, generator=generator
                )
                watchdog.begin()
                with attributed("step", number), directory.during("step()"):
                    step = self.env.step(action)
                watchdog.end()
                obs = step.obs
                reset = step.restarts(spec.final_obs)
                yield PlayStep(action, step, state, reset)

    def play(
        self,
        num_games: int | None = None,
        max_steps: int | None = None,
        on_step: Callable[[PlayStep], Any] | None = None,
    ) -> PlayResult:
        """Play `num_games` episodes or `max_steps` steps of every environment, the shorter of both.

        Every environment contributes its first `num_games / N` episodes (one more in the first
        environments if N does not divide them). The first `num_games` to finish anywhere would be
        the short ones. Without `num_games` all episodes that finish count. `on_step` is called
        after every step.
        """
        if num_games is None and max_steps is None:
            raise UserError("num_games and max_steps are both None: set one of them")
        for name, value in (("num_games", num_games), ("max_steps", max_steps)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        counter = EpisodeCounter(self.env, num_games)
        for number, played in enumerate(self.steps(), start=1):
            counter.add(played.step)
            if on_step is not None:
                on_step(played)
            if counter.complete or number == max_steps:
                break
        return counter.result()


players: Registry[Callable[..., Player]] = Registry("player")
"""Players of `canter play` and `canter eval` by their name for --player; called as `Player`."""

players.register("standard")(Player)


class EpisodeCounter:
    """Returns and lengths of episodes; each of N environments counts its share of `num_games`."""

    def __init__(self, env: Env, num_games: int | None) -> None:
        num_envs = env.spec.num_envs
        total = sys.maxsize if num_games is None else num_games
        self.share = [total // num_envs + (i < total % num_envs) for i in range(num_envs)]
        self.finished: list[list[Episode]] = [[] for _ in range(num_envs)]
        self.return_ = torch.zeros(num_envs, dtype=torch.float64, device=env.spec.device)
        self.length = torch.zeros(num_envs, dtype=torch.int64, device=env.spec.device)

    @property
    def complete(self) -> bool:
        """Every environment has finished its share of episodes."""
        return all(len(episodes) >= share for episodes, share in zip(self.finished, self.share, strict=True))

    def add(self, step: Step) -> None:
        """Count a step; an environment whose step is not valid adds nothing."""
        self.return_ += torch.where(step.valid, step.reward, 0.0)
        self.length += step.valid
        done = step.terminated | step.truncated
        ended = [i for i, env_done in enumerate(done.tolist()) if env_done]
        for i in ended:
            self.finished[i].append(self._running(i))
        if ended:
            self.discard(done)

    def discard(self, envs: Tensor) -> None:
        """Set the running episodes of these environments (`[N]` bool) back to zero."""
        self.return_.masked_fill_(envs, 0.0)
        self.length.masked_fill_(envs, 0)

    def result(self) -> PlayResult:
        """Return the episodes played so far."""
        finished: list[Episode] = []
        unfinished: list[Episode] = []
        for i, (episodes, share) in enumerate(zip(self.finished, self.share, strict=True)):
            finished += episodes[:share]
            if len(episodes) < share:
                unfinished.append(self._running(i))
        return PlayResult(finished, [episode for episode in unfinished if episode.length])

    def _running(self, env: int) -> Episode:
        return Episode(env, float(self.return_[env]), int(self.length[env]))


class FixedStd(Policy):
    """A Gaussian policy with a fixed standard deviation, in the units of the raw sample."""

    def __init__(self, policy: Policy, std: float) -> None:
        if not isinstance(policy.distribution, DiagGaussian | TanhGaussian):
            raise UserError(f"a standard deviation cannot be set: {type(policy.distribution).__name__} has none")
        if not 0 < std < math.inf:
            raise UserError(f"std={std} must be positive and finite")
        super().__init__(policy.actor, policy.distribution, policy.config, policy.spec)
        self.log_std = math.log(std)

    def params(self, obs: Obs, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return distribution parameters `[N, 2A]`, and the next recurrent state."""
        params, state = super().params(obs, state, reset)
        mean = params.chunk(2, -1)[0]
        return torch.cat([mean, torch.full_like(mean, self.log_std)], -1), state


# Agents without a network, to look at an environment before anything is trained


class Agent:
    """Acts without a network: by a function of the specification, observations and a generator."""

    def __init__(self, choose: Callable[[EnvSpec, Obs, torch.Generator], Tensor], spec: EnvSpec, seed: int) -> None:
        self.choose = choose
        self.spec = spec
        self.generator = torch.Generator().manual_seed(seed)

    def initial_state(self, num_envs: int) -> State:
        """Return `()`: there is no recurrent state."""
        return ()

    def act(
        self, obs: Obs, state: State, reset: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, State]:
        """Return an action of every environment `[N, ...]`, the same ones if `deterministic`."""
        return self.choose(self.spec, obs, self.generator).to(self.spec.device), state


def random_actions(spec: EnvSpec, obs: Obs, generator: torch.Generator) -> Tensor:
    """Return random actions for observations `[N, ...]`.

    Continuous actions are uniform within finite bounds and normal without; discrete actions are
    uniform among the allowed ones.
    """
    action = spec.action
    num_envs = spec.num_envs
    if isinstance(action, Continuous):
        low = torch.tensor(action.low)
        high = torch.tensor(action.high)
        uniform = torch.rand((num_envs, action.dim), generator=generator)
        normal = torch.randn((num_envs, action.dim), generator=generator).clamp(low, high)
        bounded = low.isfinite() & high.isfinite()
        return torch.where(bounded, torch.lerp(low.nan_to_num(), high.nan_to_num(), uniform), normal)
    chosen = [torch.multinomial(part, 1, generator=generator) for part in _allowed_actions(spec, obs)]
    return chosen[0].squeeze(1) if isinstance(action, Discrete) else torch.cat(chosen, dim=1)


def zero_actions(spec: EnvSpec, obs: Obs) -> Tensor:
    """Return zeros within the bounds, or the first allowed actions, for observations `[N, ...]`."""
    action = spec.action
    if isinstance(action, Continuous):
        zero = torch.zeros(action.dim).clamp(torch.tensor(action.low), torch.tensor(action.high))
        return zero.expand(spec.num_envs, -1).clone()
    chosen = [part.argmax(1, keepdim=True) for part in _allowed_actions(spec, obs)]
    return chosen[0].squeeze(1) if isinstance(action, Discrete) else torch.cat(chosen, dim=1)


AGENTS: dict[str, Callable[[EnvSpec, int], Agent]] = {
    "zero": partial(Agent, lambda spec, obs, generator: zero_actions(spec, obs)),
    "random": partial(Agent, random_actions),
}
"""Agents by the name that `canter play --agent` takes."""


def _allowed_actions(spec: EnvSpec, obs: Obs) -> tuple[Tensor, ...]:
    """Return 1.0 for allowed options and 0.0 for others, `[N, n]` for each discrete action."""
    assert not isinstance(spec.action, Continuous)
    nvec = spec.action.nvec
    allowed = obs.get(ACTION_MASK, torch.ones((spec.num_envs, sum(nvec)))).to("cpu", torch.float32)
    return allowed.split(nvec, dim=1)

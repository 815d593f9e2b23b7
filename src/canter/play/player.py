"""Lets a policy act in an environment without learning: the one place where that happens.

N is the number of parallel environments.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from canter.core.registry import Registry, UserError
from canter.core.specs import Env, Step
from canter.core.struct import Obs, State
from canter.envs.failures import attributed, watched
from canter.nn.actor_critic import Policy
from canter.nn.distributions import DiagGaussian, TanhGaussian


class Acts(Protocol):
    """What a player needs of a policy; `canter.Policy` has it, and so may a rule written by hand."""

    def initial_state(self, num_envs: int) -> State:
        """State at the start of an episode, `()` without memory."""
        ...

    def act(
        self, obs: Obs, state: State, reset: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, State]:
        """Actions `[N, ...]` as the environment receives them, and the next state."""
        ...


@dataclass(frozen=True)
class Turn:
    """One step of N environments. `step.obs`, `state` and `reset` are what the policy sees next.

    The environment may overwrite the tensors of `step` in the next turn: copy what must last.
    """

    action: Tensor
    """`[N, ...]`, as the environment received it."""
    step: Step
    """What it led to."""
    state: State
    """The policy's memory after acting."""
    reset: Tensor
    """`[N]` bool: rows whose `step.obs` begins a new episode, or belongs to none."""


@dataclass(frozen=True)
class Episode:
    """One episode, or the part of it that was played."""

    env: int
    """Row of the environment."""
    return_: float
    """Sum of the raw rewards."""
    length: int
    """Transitions; reset rows are not counted."""


@dataclass(frozen=True)
class Games:
    """What was played. Both lists are sorted by environment, and by time within each."""

    finished: list[Episode]
    unfinished: list[Episode]
    """Episodes that were still running, and still wanted, when the steps were used up."""

    @property
    def reward_per_step(self) -> float:
        """Mean reward of all transitions, those of unfinished episodes included; for tasks that never end."""
        episodes = self.finished + self.unfinished
        return sum(episode.return_ for episode in episodes) / max(1, sum(episode.length for episode in episodes))


def check_positive(**numbers: int | None) -> None:
    """Refuse what is below 1, by name; None is no number."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1")


class Player:
    """A policy in N environments, with or without the noise that it explores with.

    Normalisers stand still, masks are part of the observations, and a policy with memory is told where episodes begin.
    The same `seed` plays the same games.
    """

    def __init__(self, policy: Acts, env: Env, *, deterministic: bool = True, seed: int = 0) -> None:
        self.policy, self.env, self.deterministic, self.seed = policy, env, deterministic, seed

    @torch.no_grad()
    def turns(self) -> Iterator[Turn]:
        """Start every environment anew and play without end; finished episodes are followed by new ones."""
        spec = self.env.spec
        generator = torch.Generator(spec.device).manual_seed(self.seed)
        reset = torch.ones(spec.num_envs, dtype=torch.bool, device=spec.device)
        with watched() as watchdog:
            with attributed("reset"):
                obs = self.env.reset(self.seed)
            state, act = self.policy.initial_state(spec.num_envs), self.policy.act
            for number in count():
                action, state = act(obs, state, reset, deterministic=self.deterministic, generator=generator)
                watchdog.begin()
                with attributed("step", number):
                    step = self.env.step(action)
                watchdog.end()
                obs, reset = step.obs, step.restarts(spec.final_obs)
                yield Turn(action, step, state, reset)

    def play(
        self,
        num_games: int | None = None,
        max_steps: int | None = None,
        on_turn: Callable[[Turn], Any] = lambda turn: None,
    ) -> Games:
        """Play `num_games` episodes, or `max_steps` steps of every environment, whichever comes first.

        Every environment contributes its first `num_games / N` episodes (one more in the first environments where N
        does not divide them). The first `num_games` to finish anywhere would be the short ones. Without `num_games`
        all that finish count. `on_turn` is called after every step.
        """
        if num_games is None and max_steps is None:
            raise UserError("num_games and max_steps are both None: say how long to play")
        check_positive(num_games=num_games, max_steps=max_steps)
        account = Account(self.env, num_games)
        for steps, turn in enumerate(self.turns(), start=1):
            account.add(turn.step)
            on_turn(turn)
            if account.complete or steps == max_steps:
                break
        return account.games()


players: Registry[Callable[..., Player]] = Registry("player")
"""What `canter play` and `canter eval` let play, by the name that --player takes; called as `Player` is."""

players.register("standard")(Player)


class Account:
    """Returns and lengths of the episodes of N environments, until each has its share of `num_games`."""

    def __init__(self, env: Env, num_games: int | None) -> None:
        num_envs, device = env.spec.num_envs, env.spec.device
        total = sys.maxsize if num_games is None else num_games
        self.share = [total // num_envs + (i < total % num_envs) for i in range(num_envs)]
        self.finished: list[list[Episode]] = [[] for _ in range(num_envs)]
        self.return_ = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.length = torch.zeros(num_envs, dtype=torch.int64, device=device)

    @property
    def complete(self) -> bool:
        """Whether every environment has played its share."""
        return all(len(ended) >= wanted for ended, wanted in zip(self.finished, self.share, strict=True))

    def add(self, step: Step) -> None:
        """Count a step; a row that is not valid adds nothing."""
        self.return_ += torch.where(step.valid, step.reward, 0.0)
        self.length += step.valid
        done = step.terminated | step.truncated
        ended = [i for i, over in enumerate(done.tolist()) if over]
        for i in ended:
            self.finished[i].append(self._running(i))
        if ended:
            self.forget(done)

    def forget(self, rows: Tensor) -> None:
        """Take back what was counted of the running episodes of these environments, `[N]` bool."""
        self.return_.masked_fill_(rows, 0.0)
        self.length.masked_fill_(rows, 0)

    def games(self) -> Games:
        """What was played so far."""
        columns = list(zip(self.finished, self.share, strict=True))
        finished = [episode for ended, wanted in columns for episode in ended[:wanted]]
        running = [self._running(i) for i, (ended, wanted) in enumerate(columns) if len(ended) < wanted]
        return Games(finished, [episode for episode in running if episode.length])

    def _running(self, env: int) -> Episode:
        return Episode(env, float(self.return_[env]), int(self.length[env]))


class FixedStd(Policy):
    """A Gaussian policy whose noise has the given standard deviation, in the units of the raw sample."""

    def __init__(self, policy: Policy, std: float) -> None:
        if not isinstance(policy.distribution, DiagGaussian | TanhGaussian):
            raise UserError(f"a standard deviation cannot be set: {type(policy.distribution).__name__} has none")
        if not 0 < std < math.inf:
            raise UserError(f"std={std} must be positive and finite")
        super().__init__(policy.actor, policy.distribution, policy.config, policy.spec)
        self.log_std = math.log(std)

    def params(self, obs: Obs, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Distribution parameters `[N, 2A]`, and the next state."""
        params, state = super().params(obs, state, reset)
        mean = params.chunk(2, -1)[0]
        return torch.cat([mean, torch.full_like(mean, self.log_std)], -1), state

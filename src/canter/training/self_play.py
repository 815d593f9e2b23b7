"""Self-play: learn a two-player game against frozen past policies.

E games of two players each, K opponents that play at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.base import Metrics
from canter.core import distributed
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.seeding import derive_seed
from canter.core.specs import Capturable, Env, EnvSpec, Stateful, Step, resumes_exactly, seeds_by_row
from canter.core.struct import Obs, State, tree_copy_, tree_map
from canter.nn.actor_critic import Policy

FIRST_RATING = 1000.0
"""Rating of the first policy; only differences matter."""
RATING_SCALE = 400.0
"""Rating difference that predicts a score of 10 to 1."""
RATING_STEP = 16.0
"""Largest change of a rating by one series of games."""


class OpponentPool:
    """A uniform sample of at most `size` of all policies that ever joined, with their Elo ratings.

    The expected score against a rating higher by d is 1 / (1 + 10^(d / 400)). A whole series of
    games counts as one game, by its mean score. A policy joins with the learner's rating at that
    time.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: list[dict[str, Tensor]] = []
        self.ratings: list[float] = []
        self.joined = 0
        """Number of policies that ever joined."""
        self.elo = FIRST_RATING
        """The learner's rating."""

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, policy: Policy) -> None:
        """Add a copy of the policy; a full pool replaces one or rejects it (reservoir sampling).

        Member numbers change, so draw again.
        """
        self.joined += 1
        if len(self) == self.size:
            # Algorithm R (Vitter, 1985): each policy that ever joined is a member with equal
            # probability.
            place = self._below(self.joined)
            if place >= self.size:
                return
            del self.weights[place]
            del self.ratings[place]
        self.weights.append(tree_map(torch.clone, policy.actor.state_dict()))
        self.ratings.append(self.elo)

    def draw(self, count: int) -> list[int]:
        """Draw `count` member numbers, each member equally likely.

        They are spread evenly over the pool (systematic sampling): the pool is in joining order,
        and neighbours are similar, so these few represent the pool better than independent draws.
        """
        start = float(torch.rand((), generator=self.generator))
        return [int((start + place) * len(self) / count) for place in range(count)]

    def load(self, member: int, into: Policy) -> None:
        """Load the weights of a member into a policy."""
        into.actor.load_state_dict(self.weights[member])

    def rate(self, member: int, score: float) -> None:
        """Update both ratings by the learner's mean score, 0 to 1, in games against a member."""
        expected = 1.0 / (1.0 + 10.0 ** ((self.ratings[member] - self.elo) / RATING_SCALE))
        change = RATING_STEP * (score - expected)
        self.elo += change
        self.ratings[member] -= change

    def new_seed(self) -> int:
        """Draw a seed for another random stream."""
        return self._below(1 << 62)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; weights never change, so they are not copied."""
        return {
            "weights": list(self.weights),
            "ratings": list(self.ratings),
            "joined": self.joined,
            "elo": self.elo,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.weights = list(state["weights"])
        self.ratings = list(state["ratings"])
        self.joined = state["joined"]
        self.elo = state["elo"]
        self.generator.set_state(state["generator"].cpu())

    def _below(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator))


@dataclass(frozen=True, kw_only=True)
class SelfPlayConfig:
    """Opponents of a policy that learns a two-player game: a pool of the policy's past versions."""

    snapshot_every: int = 10
    """Iterations between copies of the policy joining the pool; new opponents are drawn at the same
    time."""
    pool_size: int = 100
    """Policies in the pool; a full pool stays a uniform sample of all that ever joined."""
    num_opponents: int = 8
    """Opponents that play at a time, each in equally many games; must divide `env.num_envs`."""

    def __post_init__(self) -> None:
        """Raise an error for values outside their range."""
        check_range(self, "must be at least 1", "snapshot_every", "pool_size", "num_opponents")

    def check(self, spec: EnvSpec, games: int) -> None:
        """Raise an error unless there are two players and all opponents get equally many games."""
        if spec.num_agents != 2:
            raise UserError(f"self_play needs a two-player game, and {spec.env_id} has num_agents={spec.num_agents}")
        if games % self.num_opponents:
            fits = max(n for n in range(1, self.num_opponents) if games % n == 0)
            raise UserError(
                f"self_play.num_opponents={self.num_opponents} does not divide num_envs={games}; "
                f"use num_opponents={fits}"
            )


class SelfPlayEnv:
    """Turns E two-player games into environments for one player; past policies play the other.

    The learner is the first player in even games and the second in odd ones. `adapt` must be called
    with the learning policy before the first step and after every iteration. The player with the
    higher return when the learner's episode ends wins; games interrupted by a change of opponents
    are not rated.
    """

    def __init__(self, env: Env, config: SelfPlayConfig, seed: int) -> None:
        spec = env.spec
        games = spec.num_envs // 2
        config.check(spec, games)
        self.env = env
        self.config = config
        self.pool = OpponentPool(config.pool_size, derive_seed(seed, "opponents"))
        self.spec = replace(spec, num_envs=games, num_agents=1)
        """Spec of the learner: one environment per game."""
        index = torch.arange(games, device=spec.device)
        self._own = 2 * index + index % 2
        self._theirs = 2 * index + 1 - index % 2
        # Index of each player's action in the concatenation of the learner's and the opponents'
        # actions.
        self._seating = torch.cat((self._own, self._theirs)).argsort()
        self._seats: list[Policy] = []
        self._members: list[int] = []
        self._iterations = 0
        self._score = 0.5
        """The learner's mean score in the last rated games: 1 for a win, 1/2 for a draw."""
        self._generator = torch.Generator(spec.device).manual_seed(self.pool.new_seed())
        self._result = _Result(games, config.num_opponents, spec.device)
        self._obs: Obs = {}
        self._reset = torch.ones(games, dtype=torch.bool, device=spec.device)
        self._memory: State = ()
        self.resumes = "exact" if isinstance(env, Stateful) and resumes_exactly(env) else "partial"
        """"partial" if the games cannot be saved: they restart, and the opponents stay."""
        self.seeds_by_row = seeds_by_row(env)
        if isinstance(env, Capturable):  # having this method declares that a step may be captured
            self.generators = lambda: [self._generator, *env.generators()]

    def reset(self, seed: int | None = None) -> Obs:
        """Restart every game; the pool stays."""
        obs = self.env.reset(seed)
        self._result.begin()
        self._reset.fill_(True)
        self._remember(tree_map(lambda x: x.index_select(0, self._theirs), obs))
        return tree_map(lambda x: x.index_select(0, self._own), obs)

    @torch.no_grad()
    def step(self, action: Tensor) -> Step:
        """Apply the learner's actions `[E, ...]` and the opponents'."""
        if not self._seats:
            raise RuntimeError("there are no opponents yet; call adapt(policy) before step()")
        both = torch.cat((action, self._replies())).index_select(0, self._seating)
        step = self.env.step(both)
        batch = replace(step, metrics={})  # metrics are of all games, not per player
        own, theirs = (
            batch.map(lambda x, seats=seats: x.index_select(0, seats)) for seats in (self._own, self._theirs)
        )
        self._remember(theirs.obs)
        self._reset.copy_(theirs.restarts(self.spec.final_obs))
        self._result.add(own, theirs)
        return replace(own, metrics=step.metrics)

    def adapt(self, policy: Policy) -> Metrics:
        """Rate the games since the last call, add the policy if it is due; return metrics."""
        if self._seats:
            self._iterations += 1
            self._rate()
            due = self._iterations % self.config.snapshot_every == 0
        else:
            self._prepare(policy)
            due = len(self.pool) == 0
        if due:
            self.pool.add(policy)
            self._change_opponents()
        values = {"elo": self.pool.elo, "pool_size": len(self.pool), "score": self._score}
        return {f"self_play/{name}": torch.tensor(float(x), device=self.spec.device) for name, x in values.items()}

    def close(self) -> None:
        """Close the games."""
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the games, the pool and the current opponents."""
        saved = tree_map(torch.clone, {"reset": self._reset, "obs": self._obs, "memory": self._memory})
        return saved | {
            "games": self.env.state_dict() if isinstance(self.env, Stateful) else None,
            "pool": self.pool.state_dict(),
            "members": self._members,
            "iterations": self._iterations,
            "score": self._score,
            "generator": self._generator.get_state(),
            "result": self._result.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; before or after the first `adapt`."""
        if isinstance(self.env, Stateful):
            self.env.load_state_dict(state["games"])
        self.pool.load_state_dict(state["pool"])
        self._members = state["members"]
        self._iterations = state["iterations"]
        self._score = state["score"]
        self._generator.set_state(state["generator"].cpu())
        self._result.load_state_dict(state["result"])
        self._remember(state["obs"])
        self._reset.copy_(state["reset"])
        self._memory = tree_map(lambda x: x.to(self.spec.device), state["memory"])
        self._fill_seats()

    def _prepare(self, policy: Policy) -> None:
        """Allocate the opponents; a loaded state has already chosen them."""
        self._seats = [policy.frozen_copy() for _ in range(self.config.num_opponents)]
        if not self._members:
            self._memory = policy.initial_state(self.spec.num_envs)
        self._fill_seats()

    def _replies(self) -> Tensor:
        """Sample the opponents' actions `[E, ...]`."""
        batch = tree_map(lambda x: x.unflatten(0, (len(self._seats), -1)), (self._obs, self._memory, self._reset))
        seated = [seat.params(*tree_map(lambda x, k=k: x[k], batch)) for k, seat in enumerate(self._seats)]
        params, memory = tree_map(lambda *parts: torch.cat(parts), *seated)
        tree_copy_(self._memory, memory)
        distribution = self._seats[0].distribution
        return distribution.to_env(distribution.sample(params, self._generator))

    def _remember(self, obs: Obs) -> None:
        """Keep the opponents' observations, at fixed addresses."""
        if not self._obs:
            self._obs = tree_map(torch.empty_like, obs)
        tree_copy_(self._obs, obs)

    def _rate(self) -> None:
        played, points = self._result.read()
        for member, number, won in zip(self._members, played, points, strict=True):
            if number:
                self.pool.rate(member, won / number)
        if any(played):
            self._score = sum(points) / sum(played)

    def _change_opponents(self) -> None:
        self._members = self.pool.draw(self.config.num_opponents)
        self._fill_seats()
        self._result.interrupt()
        self._reset.fill_(True)

    def _fill_seats(self) -> None:
        for seat, member in zip(self._seats, self._members, strict=False):
            self.pool.load(member, seat)


class _Result:
    """Results of the running and finished games against each opponent, on the device."""

    def __init__(self, games: int, opponents: int, device: torch.device) -> None:
        self.lead = torch.zeros(games, device=device)
        """The learner's return minus the opponent's."""
        self.rated = torch.ones(games, dtype=torch.bool, device=device)
        """The same two have played since the game started."""
        self.between = self.rated.clone()
        """The learner's next step is the first of a game."""
        self.played = torch.zeros(opponents, device=device)
        self.points = torch.zeros(opponents, device=device)

    def add(self, own: Step, theirs: Step) -> None:
        """Count a step of both players; steps after the learner's episode end belong to no game."""
        reply = torch.where(theirs.valid, theirs.reward, 0.0)
        self.lead += torch.where(own.valid, own.reward - reply, 0.0)
        done = own.terminated | own.truncated
        counted = (done & self.rated).view(len(self.played), -1)
        score = 0.5 * (self.lead.sign() + 1.0).view_as(counted)
        self.played += counted.sum(1)
        self.points += torch.where(counted, score, 0.0).sum(1)
        self.lead.masked_fill_(done, 0.0)
        self.rated |= done
        self.between.copy_(done | (self.between & ~own.valid))

    def begin(self) -> None:
        """Restart all games."""
        self.lead.zero_()
        self.rated.fill_(True)
        self.between.fill_(True)

    def interrupt(self) -> None:
        """Exclude the running games from the rating: the opponents change."""
        self.rated.copy_(self.between)

    def read(self) -> tuple[list[float], list[float]]:
        """Return rated games and the learner's points per opponent since the last call."""
        played, points = distributed.sum_(torch.stack((self.played, self.points))).tolist()
        self.played.zero_()
        self.points.zero_()
        return played, points

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all tensors."""
        return {name: tensor.clone() for name, tensor in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state."""
        tree_copy_(vars(self), state)


def seat_opponents(env: Env, config: SelfPlayConfig | None, seed: int) -> tuple[Env, Callable[[Policy], Metrics]]:
    """Return the learner's environment, and a function to call with its policy at each update."""
    if config is not None:
        env = SelfPlayEnv(env, config, seed)
    if isinstance(env, SelfPlayEnv):
        return env, env.adapt
    return env, lambda policy: {}

"""Values, advantages and returns of a rollout.

T steps, N environments, L sequence length.

The critic does not act: values are computed after collection, in one batched pass over the rollout with the weights
that collected it. That is the same numbers for a fraction of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.ppo.objectives import Objective
from canter.data.rollout import Rollout
from canter.engines.base import Engine
from canter.functional.returns import gae, successor_values
from canter.nn.actor_critic import ActorCritic
from canter.plain import check_range
from canter.struct import State, TensorStruct, tree_copy_, tree_map


@dataclass(frozen=True, kw_only=True)
class BonusValueConfig:
    """A second value head, for the bonuses of an extension such as `rnd`, with a discount of its own."""

    gamma: float = 0.99
    """Discount of the bonuses, of a step."""
    gae_lambda: float = 0.95
    """As that of the reward."""
    episodic: bool = False
    """Whether only bonuses of the same episode count. Otherwise they count beyond its end, so that none is forgone by
    ending it early."""
    advantage_coef: float = 1.0
    """Weight of the bonuses' advantage, beside that of the reward."""
    value_coef: float = 1.0
    """Weight of this head's loss."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        check_range(self, "must lie in 0..1", "gamma", "gae_lambda")
        check_range(self, "must be above 0", "advantage_coef", "value_coef")
        if not (self.gamma < 1 or self.episodic):
            raise ValueError(f"gamma={self.gamma} must be below 1, or episodic=true: the bonuses never end")


@dataclass
class Judgement(TensorStruct):
    """Values, advantages and returns `[T, N]` in the units of the reward."""

    value: Tensor
    advantage: Tensor
    return_: Tensor
    state: State
    """`[T / L, N, ...]` the critic's memory before rows 0, L, 2L, ...; `()` without memory."""
    last_state: State
    """`[N, ...]` the critic's memory after the last step."""
    bonus_value: Tensor | None = None
    """`[T, N]` values of the bonuses in their own units; None without a second head."""
    bonus_return: Tensor | None = None


class Judge:
    """Values every step of a rollout, and keeps the critic's memory from one rollout to the next."""

    engine: Engine
    """Computes the values."""

    def __init__(
        self,
        model: ActorCritic,
        objective: Objective,
        num_envs: int,
        sequence_length: int,
        bootstrap: bool = True,
        bonus: BonusValueConfig | None = None,
    ) -> None:
        self.model, self.objective, self.sequence_length, self.bonus = model, objective, sequence_length, bonus
        self.bootstrap = bootstrap
        """Whether truncated episodes are valued as going on."""
        self.state = model.critic.network.initial_state(num_envs)

    @torch.no_grad()
    def __call__(self, rollout: Rollout[Any], *, new: bool = False) -> Judgement:
        """Judge by the critic as it is now; the same rollout may be judged several times.

        `new` says that it is the first time: the objective's estimates then move to include this rollout.
        """
        if not self.bootstrap:
            cut = torch.zeros_like(rollout.truncated)
            rollout = replace(rollout, terminated=rollout.done, truncated=cut, final_obs=None)
        start = tree_map(lambda x: x[0], rollout.state) if self.model.shared_trunk else self.state
        values, after = self.engine.values(rollout.obs, start, rollout.reset)
        value, final_value = values[:-1], _final_values(rollout, after, self.engine.values)
        next_value = successor_values(values, rollout.done, rollout.reset, final_value)
        if new:
            self.objective.observe(rollout, value, next_value)
        advantage, return_ = self.objective.advantages(rollout, value, next_value)
        length, last = self.sequence_length, rollout.horizon - 1
        judged = Judgement(
            value,
            advantage,
            return_,
            # The memory before row t is the memory after row t - 1.
            state=tree_map(lambda x, rows: torch.cat([x.unsqueeze(0), rows[length - 1 : last : length]]), start, after),
            last_state=tree_map(lambda rows: rows[last], after),
        )
        return judged if self.bonus is None else self._with_bonus(self.bonus, rollout, judged, start, after)

    def advance(self, judged: Judgement) -> None:
        """Carry the critic's memory after the last step over to the next rollout."""
        tree_copy_(self.state, judged.last_state)

    def _with_bonus(
        self, config: BonusValueConfig, rollout: Rollout[Any], judged: Judgement, start: State, after: State
    ) -> Judgement:
        """The same with values of the bonuses, and with their advantage added to that of the reward."""
        assert rollout.bonus is not None
        values = self.model.bonus_values(rollout.obs, start, rollout.reset)
        next_value, terminated, done = values[1:], rollout.terminated, rollout.done
        if config.episodic:
            final = _final_values(rollout, after, lambda *args: (self.model.bonus_values(*args[:3]), ()))
            next_value = successor_values(values, done, rollout.reset, final)
        else:
            terminated = done = torch.zeros_like(done)
        advantage, return_ = gae(
            rollout.bonus, values[:-1], next_value, terminated, done, config.gamma, config.gae_lambda
        )
        total = judged.advantage + config.advantage_coef * advantage
        return replace(judged, advantage=total, bonus_value=values[:-1], bonus_return=return_)


def _final_values(rollout: Rollout[Any], after: State, values: Callable[..., tuple[Tensor, State]]) -> Tensor | None:
    """Values `[T, N]` of true final observations, each read with the memory of the episode that it ended."""
    if rollout.final_obs is None:
        return None
    # Every row is a sequence of its own.
    obs, needed = tree_map(lambda x: x.flatten(0, 1).unsqueeze(0), (rollout.final_obs, rollout.done))
    states = tree_map(lambda x: x[:-1].flatten(0, 1), after)
    return values(obs, states, None, needed)[0].view_as(rollout.reward)

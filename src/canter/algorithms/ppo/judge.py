"""Values, advantages and returns of a rollout.

T steps, N environments, L sequence length.

The critic does not act: values are computed after collection, in one batched pass over the rollout with the weights
that collected it. That is the same numbers for a fraction of the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.ppo.objectives import Objective
from canter.data.rollout import Rollout
from canter.engines.base import Engine
from canter.functional.returns import successor_values
from canter.nn.actor_critic import ActorCritic
from canter.struct import State, TensorStruct, tree_copy_, tree_map


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


class Judge:
    """Values every step of a rollout, and keeps the critic's memory from one rollout to the next."""

    engine: Engine
    """Computes the values."""

    def __init__(self, model: ActorCritic, objective: Objective, num_envs: int, sequence_length: int) -> None:
        self.shares_trunk, self.objective, self.sequence_length = model.shared_trunk, objective, sequence_length
        self.state = model.critic.network.initial_state(num_envs)

    @torch.no_grad()
    def __call__(self, rollout: Rollout[Any], *, new: bool = False) -> Judgement:
        """Judge by the critic as it is now; the same rollout may be judged several times.

        `new` says that it is the first time: the objective's estimates then move to include this rollout.
        """
        start = tree_map(lambda x: x[0], rollout.state) if self.shares_trunk else self.state
        values, after = self.engine.values(rollout.obs, start, rollout.reset)
        value, final_value = values[:-1], self._final_values(rollout, after)
        next_value = successor_values(values, rollout.done, rollout.reset, final_value)
        if new:
            self.objective.observe(rollout, value, next_value)
        advantage, return_ = self.objective.advantages(rollout, value, next_value)
        length, last = self.sequence_length, rollout.horizon - 1
        return Judgement(
            value,
            advantage,
            return_,
            # The memory before row t is the memory after row t - 1.
            state=tree_map(lambda x, rows: torch.cat([x.unsqueeze(0), rows[length - 1 : last : length]]), start, after),
            last_state=tree_map(lambda rows: rows[last], after),
        )

    def advance(self, judged: Judgement) -> None:
        """Carry the critic's memory after the last step over to the next rollout."""
        tree_copy_(self.state, judged.last_state)

    def _final_values(self, rollout: Rollout[Any], after: State) -> Tensor | None:
        """Values `[T, N]` of true final observations, each read with the memory of the episode that it ended."""
        if rollout.final_obs is None:
            return None
        # Every row is a sequence of its own.
        obs, needed = tree_map(lambda x: x.flatten(0, 1).unsqueeze(0), (rollout.final_obs, rollout.done))
        states = tree_map(lambda x: x[:-1].flatten(0, 1), after)
        return self.engine.values(obs, states, None, needed)[0].view_as(rollout.reward)

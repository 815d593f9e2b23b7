"""What the critic makes of a rollout.

T steps, N environments, L sequence length.

The critic does not act: values are computed after collection, in one batched pass over the rollout with the weights
that collected it. That is the same numbers for a fraction of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.algorithms.objectives import Objective
from canter.algorithms.on_device import OnDevice
from canter.data.rollout import Rollout
from canter.functional.returns import successor_values
from canter.nn.actor_critic import ActorCritic
from canter.struct import Obs, State, TensorStruct, tree_copy_, tree_map


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

    def __init__(
        self,
        model: ActorCritic,
        objective: Objective,
        num_envs: int,
        sequence_length: int,
        *,
        find_kernels: Callable[[], OnDevice | None],
    ) -> None:
        self.model, self.objective, self.sequence_length = model, objective, sequence_length
        self.state = model.critic.network.initial_state(num_envs)
        self.find_kernels = find_kernels
        """Gives another form of a critic without memory, where there is one."""

    @torch.no_grad()
    def __call__(self, rollout: Rollout[Any], *, new: bool = False) -> Judgement:
        """Judge by the critic as it is now; the same rollout may be judged several times.

        A `new` one is judged for the first time: what the objective estimates moves to include it.
        """
        start = tree_map(lambda x: x[0], rollout.state) if self.model.shared_trunk else self.state
        kernels = self.find_kernels()
        if kernels is None:
            values, after = self.model.critic.unroll(rollout.obs, start, rollout.reset)
        else:
            values, after = kernels.values(rollout.obs), ()
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
        """Carry the critic's memory over to the next rollout; the look at the observation after it leaves no trace."""
        tree_copy_(self.state, judged.last_state)

    def _final_values(self, rollout: Rollout[Any], after: State) -> Tensor | None:
        """Values `[T, N]` of true final observations, each read with the memory of the episode that it ended."""
        if rollout.final_obs is None:
            return None
        kernels = self.find_kernels()
        if kernels is not None:
            return kernels.values(rollout.final_obs, rollout.done)
        obs, states = tree_map(lambda x: x.flatten(0, 1), (rollout.final_obs, tree_map(lambda x: x[:-1], after)))
        if not rollout.reward.is_cpu:
            return self._values(obs, states).view_as(rollout.reward)
        # Where looking costs nothing: only of rows that ended, for the others are never read.
        ended = torch.from_numpy(np.flatnonzero(rollout.done.numpy()))
        values = torch.zeros_like(rollout.reward)
        if len(ended):
            values.view(-1)[ended] = self._values(*tree_map(lambda x: x[ended], (obs, states)))
        return values

    def _values(self, obs: Obs, states: State) -> Tensor:
        """Values of single rows `[M]`."""
        return self.model.critic.unroll(tree_map(lambda x: x.unsqueeze(0), obs), states, None)[0].squeeze(0)

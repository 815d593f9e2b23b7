"""Agents that must meet, though each sees only the next one: a task for a team.

E worlds, A agents in each.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from canter.envs.agents import ALIVE, REWARD
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv
from canter.specs import Continuous, TensorSpec
from canter.struct import Obs

SPEED = 0.1
"""Way per step at full speed; the arena reaches from -1 to 1 in both directions."""
RESPONSE = 0.5
"""Share of the way to the commanded velocity that one step makes up for."""
START = 0.9
"""Agents start no further out than this, at rest."""


@final
class Rendezvous(TensorEnv):
    """A team must meet, though each of its agents sees only the next one.

    A point masses in a square arena are paid for being together; the whole team is one row with a joint action, until
    `folded` makes every agent a row of its own.

    Every step pays each agent the same: the mean over the team of `max(0, 1 - distance to the centre of the living)`,
    in which the dead count 0. An agent that leaves the arena dies, and a world without living agents terminates;
    otherwise it is truncated after `max_episode_steps`. The joint action is `[E, 2A]`, a velocity per agent, within
    +-1.

    "policy" `[E, A, 4]`: where the next living agent is, seen from this one (agents stand in a ring; 0 for the last of
    its team), and the own velocity. Nobody sees the walls, so a team that wanders dies, and one that comes together is
    safe. "critic" `[E, A, 6A]`: position, velocity and life of all agents, and which of them this is.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        num_agents: int = 3,
        max_episode_steps: int | None = 50,
        random_start: bool = False,
    ) -> None:
        if num_agents < 2:
            raise ValueError(f"num_agents={num_agents} must be at least 2: one alone has nobody to meet")
        obs = {"policy": TensorSpec((num_agents, 4)), "critic": TensorSpec((num_agents, 6 * num_agents))}
        action = Continuous(low=(-1.0,) * (2 * num_agents), high=(1.0,) * (2 * num_agents))
        super().__init__("tensor:rendezvous", num_envs, device, obs, action, max_episode_steps, random_start)
        self.num_agents = num_agents
        self._identity = torch.eye(num_agents, device=self.device).expand(num_envs, -1, -1)

    def _sample_state(self) -> EnvState:
        position = self._uniform(-START, START, self.num_agents, 2)
        alive = torch.ones(self.num_envs, self.num_agents, dtype=torch.bool, device=self.device)
        return {"position": position, "velocity": torch.zeros_like(position), "alive": alive}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        command = action.unflatten(1, (self.num_agents, 2)).clamp(-1.0, 1.0) * state["alive"].unsqueeze(-1)
        velocity = torch.lerp(state["velocity"], SPEED * command, RESPONSE) * state["alive"].unsqueeze(-1)
        position = state["position"] + velocity
        alive = state["alive"] & (position.abs().amax(-1) <= 1.0)
        weight = alive.unsqueeze(-1).to(position.dtype)
        centre = (position * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1.0)
        closeness = (1.0 - torch.linalg.vector_norm(position - centre, dim=-1)).clamp(min=0.0) * alive
        reward = closeness.mean(1)
        return Outcome(
            {"position": position, "velocity": velocity, "alive": alive},
            reward,
            terminated=~alive.any(1),
            info={REWARD: reward.unsqueeze(1).expand(-1, self.num_agents), ALIVE: alive},
        )

    def _observe(self, state: EnvState) -> Obs:
        position, alive = state["position"], state["alive"]
        offset = torch.zeros_like(position)
        for ahead in range(self.num_agents - 1, 0, -1):  # the nearest in the ring is looked at last, and wins
            there = alive.roll(-ahead, 1).unsqueeze(-1)
            offset = torch.where(there, position.roll(-ahead, 1) - position, offset)
        joint = torch.cat((position, state["velocity"], alive.unsqueeze(-1)), -1).flatten(1)
        whole = joint.unsqueeze(1).expand(-1, self.num_agents, -1)
        return {
            "policy": torch.cat((offset, state["velocity"]), -1),
            "critic": torch.cat((whole, self._identity), -1),
        }

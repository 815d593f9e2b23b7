"""Worlds of several agents, as rows that one policy learns from.

E worlds, A agents in each, N = E x A rows: row `world * A + agent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, final

import torch
from torch import Tensor

from canter.envs.tensor.base import TensorEnv
from canter.specs import ActionSpec, Continuous, Discrete, MultiDiscrete, Step, TensorSpec
from canter.struct import Obs, tree_map

P = ParamSpec("P")
REWARD, ALIVE = "agent_reward", "agent_alive"
"""What a world tells of its agents in `Step.info`: float `[E, A]`, and bool `[E, A]` after the step."""


@final
class FoldAgents:
    """The agents of E worlds as N rows, each with its own observation, action, reward and end.

    `worlds` is an environment whose rows are whole worlds: observation groups `[E, A, ...]`, one joint action (the
    agents' actions side by side) and `REWARD` and `ALIVE` in the `info` of every step. All agents live when a world
    begins. One that dies terminates; until its world ends its rows are not valid, and whatever they show, nothing
    learns from it. The end of a world ends the episodes of those that still live.

    A group "critic" with the joint state gives each agent's critic the whole world (MAPPO); a critic that reads
    "policy" sees what its agent sees (IPPO).
    """

    def __init__(self, worlds: TensorEnv, num_agents: int) -> None:
        spec = worlds.spec
        self.worlds, self.num_agents = worlds, num_agents
        self.resumes = getattr(worlds, "resumes", "exact")
        self.seeds_by_row = worlds.seeds_by_row
        self.generators, self.close = worlds.generators, worlds.close
        self._alive = torch.ones((spec.num_envs, num_agents), dtype=torch.bool, device=spec.device)
        self.spec = replace(
            spec,
            obs={name: _agent_obs(name, group, num_agents) for name, group in spec.obs.items()},
            action=agent_action(spec.action, num_agents),
            num_envs=spec.num_envs * num_agents,
            num_agents=num_agents,
        )
        """Shapes, dtypes, bounds and conventions of one agent."""

    def reset(self, seed: int | None = None) -> Obs:
        """Start every world anew; observations `[N, ...]`."""
        self._alive.fill_(True)
        return _fold(self.worlds.reset(seed))

    def step(self, action: Tensor) -> Step:
        """Apply one action per agent; those of dead agents are passed on and have no effect."""
        if len(action) != self.spec.num_envs:
            raise ValueError(f"action has {len(action)} rows, {self.spec.env_id} has {self.spec.num_envs} agents")
        step = self.worlds.step(action.reshape(self.worlds.num_envs, -1))
        info = dict(step.info)
        reward, alive = info.pop(REWARD), info.pop(ALIVE)
        was_alive, ended = self._alive.clone(), (step.terminated | step.truncated).unsqueeze(1)
        terminated = was_alive & (step.terminated.unsqueeze(1) | ~alive)
        truncated = was_alive & step.truncated.unsqueeze(1) & ~terminated
        self._alive.copy_(ended | alive)
        return Step(
            obs=_fold(step.obs),
            reward=torch.where(was_alive, reward, 0.0).to(torch.float32).flatten(),
            terminated=terminated.flatten(),
            truncated=truncated.flatten(),
            valid=was_alive.flatten(),
            final_obs=_fold(step.final_obs),
            info=tree_map(lambda x: x.unsqueeze(1).expand(-1, self.num_agents, *x.shape[1:]).flatten(0, 1), info),
            metrics=step.metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the worlds, and who lives."""
        return {"worlds": self.worlds.state_dict(), "alive": self._alive.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        self.worlds.load_state_dict(state["worlds"])
        self._alive.copy_(state["alive"])


def folded(make_worlds: Callable[P, Any]) -> Callable[P, FoldAgents]:
    """As what makes worlds that know their `num_agents`, with every agent a row of its own."""

    @wraps(make_worlds, updated=())
    def make(*args: P.args, **kwargs: P.kwargs) -> FoldAgents:
        worlds = make_worlds(*args, **kwargs)
        return FoldAgents(worlds, worlds.num_agents)

    return make


def agent_action(joint: ActionSpec, num_agents: int) -> ActionSpec:
    """What one of the agents decides of a joint action; all must decide the same."""
    match joint:
        case Continuous(low, high):
            bounds = _share(tuple(zip(low, high, strict=True)), num_agents, joint)
            return Continuous(*(tuple(bound) for bound in zip(*bounds, strict=True)))
        case MultiDiscrete(nvec):
            heads = _share(nvec, num_agents, joint)
            return Discrete(heads[0]) if len(heads) == 1 else MultiDiscrete(heads)
        case Discrete():
            raise ValueError(
                f"the joint action {joint} must be a MultiDiscrete, with one entry even for a single agent"
            )


def _share(parts: tuple[Any, ...], num_agents: int, joint: ActionSpec) -> tuple[Any, ...]:
    share = parts[: len(parts) // num_agents]
    if not share or share * num_agents != parts:
        raise ValueError(f"the joint action {joint} is not {num_agents} equal actions, one per agent, side by side")
    return share


def _agent_obs(name: str, group: TensorSpec, num_agents: int) -> TensorSpec:
    if len(group.shape) < 2 or group.shape[0] != num_agents:
        raise ValueError(f"observation {name!r} of a world has shape {group.shape}, not ({num_agents} agents, ...)")
    return TensorSpec(group.shape[1:], group.dtype)


def _fold(obs: Any) -> Any:
    """Groups `[E, A, ...]` as `[N, ...]`; None stays."""
    return tree_map(lambda x: x.flatten(0, 1), obs)

"""Environments of several agents, and `FoldAgents`, which turns every agent into a row.

E worlds, A agents in each, N = E x A rows: row `world * A + agent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, final

import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.specs import (
    ActionSpec,
    Continuous,
    Discrete,
    MultiDiscrete,
    Step,
    TensorSpec,
    resumes_exactly,
    seeds_by_row,
)
from canter.core.struct import Obs, tree_map
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv

P = ParamSpec("P")
REWARD = "agent_reward"
"""Key of `Step.info` for the rewards of the agents of each world, float `[E, A]`."""
ALIVE = "agent_alive"
"""Key of `Step.info` for the agents that are alive after the step, bool `[E, A]`."""


@final
class FoldAgents:
    """The agents of E worlds as N rows, each with its own reward and episode ends.

    `worlds` is an environment whose rows are whole worlds: observation groups `[E, A, ...]`, one
    joint action (the agents' actions side by side) and `REWARD` and `ALIVE` in the `info` of every
    step. All agents are alive when a world begins. The episode of an agent that dies terminates;
    until its world ends its samples are not valid, and nothing learns from them. The end of a world
    ends the episodes of the agents that are still alive.

    With a group "critic" that contains the joint state each agent's critic sees the whole world
    (MAPPO); a critic that reads "policy" sees what its agent sees (IPPO).
    """

    def __init__(self, worlds: TensorEnv, num_agents: int) -> None:
        spec = worlds.spec
        self.worlds = worlds
        self.num_agents = num_agents
        self.resumes = "exact" if resumes_exactly(worlds) else "partial"
        self.seeds_by_row = seeds_by_row(worlds)
        self.generators = worlds.generators
        self.close = worlds.close
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
        """Restart every world; return observations `[N, ...]`."""
        self._alive.fill_(True)
        return _fold(self.worlds.reset(seed))

    def step(self, action: Tensor) -> Step:
        """Apply one action per agent; the worlds ignore those of dead agents."""
        if len(action) != self.spec.num_envs:
            raise UserError(f"action has {len(action)} rows, {self.spec.env_id} has {self.spec.num_envs} agents")
        step = self.worlds.step(action.reshape(self.worlds.num_envs, -1))
        info = dict(step.info)
        reward = info.pop(REWARD)
        alive = info.pop(ALIVE)
        was_alive = self._alive.clone()
        ended = (step.terminated | step.truncated).unsqueeze(1)
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
        """Return the state of the worlds and the agents that are alive."""
        return {"worlds": self.worlds.state_dict(), "alive": self._alive.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; continuing is exact."""
        self.worlds.load_state_dict(state["worlds"])
        self._alive.copy_(state["alive"])


def folded(make_worlds: Callable[P, Any]) -> Callable[P, FoldAgents]:
    """Return a factory of environments in which every agent of the worlds is a row."""

    @wraps(make_worlds, updated=())
    def make(*args: P.args, **kwargs: P.kwargs) -> FoldAgents:
        worlds = make_worlds(*args, **kwargs)
        return FoldAgents(worlds, worlds.num_agents)

    return make


def agent_action(joint: ActionSpec, num_agents: int) -> ActionSpec:
    """Return the action of one agent, given the joint action; all agents must have the same."""
    match joint:
        case Continuous(low, high):
            bounds = _split(tuple(zip(low, high, strict=True)), num_agents, joint)
            return Continuous(*(tuple(bound) for bound in zip(*bounds, strict=True)))
        case MultiDiscrete(nvec):
            heads = _split(nvec, num_agents, joint)
            return Discrete(heads[0]) if len(heads) == 1 else MultiDiscrete(heads)
        case Discrete():
            raise UserError(f"the joint action {joint} must be a MultiDiscrete, with one entry even for a single agent")


def _split(entries: tuple[Any, ...], num_agents: int, joint: ActionSpec) -> tuple[Any, ...]:
    share = entries[: len(entries) // num_agents]
    if not share or share * num_agents != entries:
        raise UserError(f"the joint action {joint} is not {num_agents} equal actions, one per agent, side by side")
    return share


def _agent_obs(name: str, group: TensorSpec, num_agents: int) -> TensorSpec:
    if len(group.shape) < 2 or group.shape[0] != num_agents:
        raise UserError(f"observation {name!r} of a world has shape {group.shape}, not ({num_agents} agents, ...)")
    return TensorSpec(group.shape[1:], group.dtype)


def _fold(obs: Any) -> Any:
    """Reshape groups `[E, A, ...]` to `[N, ...]`; None stays None."""
    return tree_map(lambda x: x.flatten(0, 1), obs)


SPEED = 0.1
"""Distance per step at full speed; the arena reaches from -1 to 1 in both directions."""
RESPONSE = 0.5
"""Fraction of the difference to the commanded velocity that one step makes up for."""
START = 0.9
"""Greatest distance of a start from the centre along each axis; agents start at rest."""


@final
class Rendezvous(TensorEnv):
    """A team of agents that must meet, though each sees only the next one.

    A point masses in a square arena are rewarded for being together. The whole team is one row with
    a joint action, until `folded` turns every agent into a row.

    Every agent receives the same reward: the mean over the team of
    `max(0, 1 - distance to the centre of the living)`, in which dead agents count 0. An agent that
    leaves the arena dies, and a world without living agents terminates; otherwise it is truncated
    after `max_episode_steps`. The joint action is `[E, 2A]`, a velocity per agent, within +-1.

    "policy" `[E, A, 4]`: the position of the next living agent relative to this one (agents form a
    ring; 0 for the last of its team), and the agent's own velocity. No agent sees the walls, so a
    team that drifts dies and one that meets is safe. "critic" `[E, A, 6A]`: position, velocity and
    life of all agents, and the index of this one, one-hot.
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
            raise UserError(f"num_agents={num_agents} must be at least 2: a single agent has nobody to meet")
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
        position = state["position"]
        alive = state["alive"]
        offset = torch.zeros_like(position)
        for ahead in range(self.num_agents - 1, 0, -1):  # the nearest in the ring comes last and overwrites the others
            is_alive = alive.roll(-ahead, 1).unsqueeze(-1)
            offset = torch.where(is_alive, position.roll(-ahead, 1) - position, offset)
        joint = torch.cat((position, state["velocity"], alive.unsqueeze(-1)), -1).flatten(1)
        whole = joint.unsqueeze(1).expand(-1, self.num_agents, -1)
        return {
            "policy": torch.cat((offset, state["velocity"]), -1),
            "critic": torch.cat((whole, self._identity), -1),
        }


NO_MOVE = 3
"""Observed instead of the last move before the first."""


@final
class RockPaperScissors(TensorEnv):
    """Rock, paper, scissors for two: a game with a known equilibrium, for self-play.

    Both players move at once: 0 rock, 1 paper, 2 scissors. The loser pays the stake to the winner.

    `stakes` are the values of a win with rock, paper and scissors. With stakes `(r, p, s)` the only
    equilibrium plays them with probabilities in the proportion `s : r : p`, and its value is 0. A
    game terminates after `rounds`. The joint action is `[E, 2]`; "policy" `[E, 2, 4]` is the
    opponent's last move, one-hot, with the fourth entry for none.
    """

    num_agents = 2

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        rounds: int = 1,
        stakes: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        if rounds < 1:
            raise UserError(f"rounds={rounds} must be at least 1")
        if len(stakes) != 3 or min(stakes) <= 0:
            raise UserError(f"stakes={tuple(stakes)} must be three positive numbers: for rock, paper and scissors")
        obs = {"policy": TensorSpec((2, NO_MOVE + 1))}
        super().__init__("tensor:rps", num_envs, device, obs=obs, action=MultiDiscrete((3, 3)))
        self.rounds = rounds
        rock, paper, scissors = stakes
        table = ((0.0, -paper, rock), (paper, 0.0, -scissors), (-rock, scissors, 0.0))
        self._payoff = torch.tensor(table, device=self.device).flatten()
        self._one_hot = torch.eye(NO_MOVE + 1, device=self.device)

    def _sample_state(self) -> EnvState:
        none = torch.full((self.num_envs, 2), NO_MOVE, device=self.device)
        return {"last_moves": none, "round": torch.zeros_like(none[:, 0])}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        reward = self._payoff.index_select(0, 3 * action[:, 0] + action[:, 1])
        after = {"last_moves": action, "round": state["round"] + 1}
        info = {REWARD: torch.stack((reward, -reward), 1), ALIVE: torch.ones_like(action, dtype=torch.bool)}
        return Outcome(after, reward, after["round"] >= self.rounds, info=info)

    def _observe(self, state: EnvState) -> Obs:
        opponent = state["last_moves"].flip(1)
        return {"policy": self._one_hot.index_select(0, opponent.flatten()).unflatten(0, opponent.shape)}

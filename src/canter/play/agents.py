"""Agents without a network, to look at an environment before anything is trained: zero and random actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from canter.core.specs import ACTION_MASK, Continuous, Discrete, EnvSpec
from canter.core.struct import Obs, State


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

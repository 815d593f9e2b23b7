"""Modules of the user's, written for a source library, as networks of Canter.

L steps, B sequences, F features. Such a module has its own last layers; it is trained by the engine
autograd.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from canter.compat.settings.importing import Imported
from canter.core.struct import Obs, State, tree_map
from canter.nn.heads import WithHeads
from canter.nn.mlp import Init

_log = logging.getLogger(__name__)


class OwnModuleConfig:
    """Base of the settings of such a network."""

    init: ClassVar[Init] = "default"
    """Torch's own initial weights: no layer follows."""


class OwnModule(WithHeads):
    """A module of the user's, called for one step after another if it is recurrent."""

    groups: tuple[str, ...]
    is_recurrent = False
    reset_on_end = True
    """Reset the recurrent state at the start of an episode."""

    def call(self, obs: Obs, state: State) -> tuple[Tensor, State]:
        """Return the features `[B, F]` of `obs` `[B, ...]`, and the next state."""
        raise NotImplementedError

    def default_state(self) -> Any:
        """Return a recurrent state of any number of environments, as the source library has it."""
        raise NotImplementedError

    def prepare(self, obs: Obs) -> Obs:
        """Return the observations that the module reads."""
        return {name: obs[name] for name in self.groups}

    def forward(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return the features `[L, B, F]` of `obs` `[L, B, ...]`, and the last state."""
        features, states = self.unroll(obs, state, reset)
        return features, tree_map(lambda steps: steps[-1], states)

    def unroll(self, obs: Obs, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return the same features, and the states after each step, `[L, B, ...]`."""
        obs = self.prepare(obs)
        shape = obs[self.groups[0]].shape[:2]
        if not self.is_recurrent:
            features, _ = self.call({name: group.flatten(0, 1) for name, group in obs.items()}, ())
            return features.unflatten(0, shape), ()
        outputs: list[Tensor] = []
        states: list[State] = []
        for t in range(shape[0]):
            if reset is not None and self.reset_on_end:
                before = reset[t].unsqueeze(-1)
                state = tree_map(lambda part, ended=before: part.masked_fill(ended, 0.0), state)
            features, state = self.call({name: group[t] for name, group in obs.items()}, state)
            outputs.append(features)
            states.append(state)
        return torch.stack(outputs), tree_map(lambda *steps: torch.stack(steps), *states)

    def initial_state(self, num_envs: int) -> State:
        """Return zeros of the shapes of the default state; `()` for feed-forward modules."""
        if not self.is_recurrent:
            return ()
        device = next(self.parameters()).device
        parts = as_parts(self.default_state())
        return by_layer([torch.zeros(len(part), num_envs, part.shape[-1], device=device) for part in parts])


def as_parts(states: Any) -> tuple[Tensor, ...]:
    """Return the parts of a recurrent state, each `[layers, B, H]`: two of an LSTM, one of a GRU."""
    return tuple(states) if isinstance(states, list | tuple) else (states,)


def stacked(state: State) -> tuple[Tensor, ...]:
    """Return `[layers, B, H]` for each part, from a tuple of parts `[B, H]` for each layer."""
    return tuple(torch.stack([layer[k] for layer in state]) for k in range(len(state[0])))


def by_layer(states: Any) -> State:
    """Return a tuple of parts `[B, H]` for each layer, from `[layers, B, H]` for each part."""
    parts = as_parts(states)
    return tuple(tuple(part[k] for part in parts) for k in range(len(parts[0])))


def announce(imported: Imported, key: str, name: str, to: str, what: str) -> None:
    """Report a module of the user's, and log one line about its training."""
    why = f"{what}; its gradients are those of the engine autograd"
    _log.warning("%s=%s: %s", key, name, why)
    imported.report.add(key, name, "mapped", to, why)

"""Recurrent layers whose state is reset at the start of episodes.

L sequence length, B sequences, F features, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from canter.core.plain import check_range
from canter.core.struct import State, tree_map
from canter.nn.mlp import Init


@dataclass(frozen=True, kw_only=True)
class RNNConfig:
    """Recurrent layers of one network."""

    cell: Literal["lstm", "gru"] = "lstm"
    """Kind of recurrent cell."""
    hidden: int = 64
    """Units of each layer."""
    layers: int = 1
    """Recurrent layers, one on top of the other."""
    position: Literal["before_mlp", "after_mlp"] = "before_mlp"
    """Place of the recurrent layers: before or after the hidden layers."""
    layer_norm: bool = False
    """Layer norm on the output of the recurrent layers."""
    concat_input: bool = False
    """Concatenate the encoded observation to the input of the second of recurrent and hidden
    layers."""
    reset_on_end: bool = True
    """Reset the state at the start of an episode. False keeps it, e.g. to identify a randomised
    robot."""

    def __post_init__(self) -> None:
        """Raise UserError if there are no units or no layers."""
        check_range(self, "must be at least 1", "hidden", "layers")


class RNN(nn.Module):
    """Recurrent layers over `[L, B, F]`; their state is one tuple of `[B, H]` tensors per layer."""

    def __init__(self, config: RNNConfig, features: int, init: Init) -> None:
        super().__init__()
        self.reset_on_end = config.reset_on_end
        self.hidden = config.hidden
        self.is_lstm = config.cell == "lstm"
        cell = nn.LSTMCell if self.is_lstm else nn.GRUCell
        widths = [features, *[config.hidden] * (config.layers - 1)]
        self.cells = nn.ModuleList([cell(width, config.hidden) for width in widths])
        self.norm = nn.LayerNorm(config.hidden) if config.layer_norm else nn.Identity()
        if init == "orthogonal":
            for name, parameter in self.cells.named_parameters():
                nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def forward(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return outputs `[L, B, H]`, and the states after each step as tensors `[L, B, H]`.

        `reset` `[L, B]` marks steps that start a new episode: the state before them is set to zero.
        The loop over L computes the same numbers for a whole sequence and step by step, has static
        shapes and never waits for the host; a fused sequence kernel would have to be split at every
        reset.
        """
        outputs: list[Tensor] = []
        states: list[State] = []
        for t, features in enumerate(x.unbind()):
            if reset is not None and self.reset_on_end:
                state = self._reset(state, reset[t])
            output, state = self._step(features, state)
            outputs.append(output)
            states.append(state)
        return self.norm(torch.stack(outputs)), tree_map(lambda *steps: torch.stack(steps), *states)

    def initial_state(self, num_envs: int) -> State:
        """Return zeros: per layer a tuple of `[num_envs, H]` tensors (hidden, LSTM also cell)."""
        zero = next(self.parameters()).new_zeros(num_envs, self.hidden)
        return tuple((zero.clone(), zero.clone()) if self.is_lstm else (zero.clone(),) for _ in self.cells)

    def _reset(self, state: State, reset: Tensor) -> State:
        # Filled, not multiplied, so that a NaN does not reach the next episode.
        return tree_map(lambda part: part.masked_fill(reset.unsqueeze(-1), 0.0), state)

    def _step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        following: list[tuple[Tensor, ...]] = []
        for cell, layer in zip(self.cells, state, strict=True):
            after = cell(x, layer) if self.is_lstm else (cell(x, layer[0]),)
            following.append(after)
            x = cast(Tensor, after[0])
        return x, tuple(following)


class IdentityRNN(nn.Module):
    """Pass-through in place of recurrent layers, for feed-forward networks."""

    def forward(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return `x` and no states."""
        return x, ()

    def initial_state(self, num_envs: int) -> State:
        """Return the empty state `()`."""
        return ()


AnyRNN = RNN | IdentityRNN

"""Recurrent layers whose state is reset at the start of episodes.

L sequence length, B sequences, F features, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from canter.core.plain import check_range
from canter.core.struct import State
from canter.functional.layers import recurrent_layer
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
        A whole sequence has the same numbers as its steps one by one.
        """
        reset = reset if self.reset_on_end else None
        states: list[tuple[Tensor, ...]] = []
        for cell, before in zip(self.cells, state, strict=True):
            states.append(recurrent_layer(x, cell, before, reset))
            x = states[-1][0]
        return self.norm(x), tuple(states)

    def initial_state(self, num_envs: int) -> State:
        """Return zeros: per layer a tuple of `[num_envs, H]` tensors (hidden, LSTM also cell)."""
        zero = next(self.parameters()).new_zeros(num_envs, self.hidden)
        return tuple((zero.clone(), zero.clone()) if self.is_lstm else (zero.clone(),) for _ in self.cells)


class IdentityRNN(nn.Module):
    """Pass-through in place of recurrent layers, for feed-forward networks."""

    def forward(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return `x` and no states."""
        return x, ()

    def initial_state(self, num_envs: int) -> State:
        """Return the empty state `()`."""
        return ()


AnyRNN = RNN | IdentityRNN

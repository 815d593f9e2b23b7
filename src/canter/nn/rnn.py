"""Memory: recurrent layers that are told where episodes begin.

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
    """Whether the memory reads encoded observations or what the hidden layers make of them."""
    layer_norm: bool = False
    """Layer norm on the memory's output."""
    concat_input: bool = False
    """Let the second of memory and hidden layers read the encoded observation beside the output of the first."""
    reset_on_end: bool = True
    """Forget at the end of an episode. False keeps the memory, for instance to identify a randomised robot."""

    def __post_init__(self) -> None:
        """Refuse layers that do not exist."""
        check_range(self, "must be at least 1", "hidden", "layers")


class Memory(nn.Module):
    """Recurrent layers over `[L, B, F]`; their state is one tuple of `[B, H]` tensors per layer."""

    def __init__(self, config: RNNConfig, features: int, init: Init) -> None:
        super().__init__()
        self.reset_on_end, self.hidden, self.is_lstm = config.reset_on_end, config.hidden, config.cell == "lstm"
        cell = nn.LSTMCell if self.is_lstm else nn.GRUCell
        widths = [features, *[config.hidden] * (config.layers - 1)]
        self.cells = nn.ModuleList([cell(width, config.hidden) for width in widths])
        self.norm = nn.LayerNorm(config.hidden) if config.layer_norm else nn.Identity()
        if init == "orthogonal":
            for name, parameter in self.cells.named_parameters():
                nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def forward(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Outputs `[L, B, H]`, and the states after each row as tensors `[L, B, H]`.

        `reset` `[L, B]` marks rows that begin a new episode: the state before them is zero, whatever it was. The loop
        over L gives the same numbers whether a sequence comes at once or row by row, has static shapes and asks the
        host nothing; a fused sequence kernel would have to be cut at every reset.
        """
        outputs: list[Tensor] = []
        states: list[State] = []
        for t, row in enumerate(x.unbind()):
            if reset is not None and self.reset_on_end:
                state = self._forget(state, reset[t])
            row, state = self._step(row, state)
            outputs.append(row)
            states.append(state)
        return self.norm(torch.stack(outputs)), tree_map(lambda *rows: torch.stack(rows), *states)

    def initial_state(self, num_envs: int) -> State:
        """Zeros: a tuple per layer of `[num_envs, H]` tensors (hidden and cell state, or only hidden)."""
        zero = next(self.parameters()).new_zeros(num_envs, self.hidden)
        return tuple((zero.clone(), zero.clone()) if self.is_lstm else (zero.clone(),) for _ in self.cells)

    def _forget(self, state: State, reset: Tensor) -> State:
        # Filled, not multiplied, so that a NaN does not reach the next episode.
        return tree_map(lambda part: part.masked_fill(reset.unsqueeze(-1), 0.0), state)

    def _step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        following: list[tuple[Tensor, ...]] = []
        for cell, layer in zip(self.cells, state, strict=True):
            after = cell(x, layer) if self.is_lstm else (cell(x, layer[0]),)
            following.append(after)
            x = cast(Tensor, after[0])
        return x, tuple(following)


class NoMemory(nn.Module):
    """What networks without memory have instead: everything passes through."""

    def forward(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """`x` and no states."""
        return x, ()

    def initial_state(self, num_envs: int) -> State:
        """No state."""
        return ()


AnyMemory = Memory | NoMemory

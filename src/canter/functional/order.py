"""The order in which sequences are learned from.

L sequence length, S sequences, B sequences in a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import torch
from torch import Tensor

from canter.dispatch import has_kernels
from canter.struct import tree_map

Tree = TypeVar("Tree")
Shuffle = Literal["epoch", "rollout", "none"]
"""When a new random order is drawn: for every epoch, once for a rollout, or never."""


@has_kernels
def permutation(count: int, generator: torch.Generator) -> Tensor:
    """A random permutation `[count]`, int64 on the generator's device."""
    return torch.randperm(count, generator=generator, device=generator.device)


def epoch_orders(shuffle: Shuffle, sequences: int, num_envs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The order `[S]` of each epoch, without end; "none" goes environment by environment, each in the order of time.

    Sequence number `c * N + n` is chunk c of environment n (`canter.data.rollout.as_sequences`).
    """
    if shuffle == "none":
        order = torch.arange(sequences, device=generator.device).view(-1, num_envs).t().reshape(-1)
    else:
        order = permutation(sequences, generator)
    while True:
        yield order
        if shuffle == "epoch":
            order = permutation(sequences, generator)


@has_kernels
def take_sequences(tree: Tree, index: Tensor) -> Tree:
    """Sequences `index` `[B]` of every tensor `[L, S, ...]` of a tree: `[L, B, ...]`; their L may differ."""
    return tree_map(lambda x: x.index_select(1, index), tree)

"""The order in which sequences are learned from.

L sequence length, S sequences, B sequences in a minibatch.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from canter.dispatch import has_kernels
from canter.struct import tree_map

Tree = TypeVar("Tree")


@has_kernels
def permutation(count: int, generator: torch.Generator) -> Tensor:
    """A random permutation `[count]`, int64 on the generator's device."""
    return torch.randperm(count, generator=generator, device=generator.device)


@has_kernels
def take_sequences(tree: Tree, index: Tensor) -> Tree:
    """Sequences `index` `[B]` of every tensor `[L, S, ...]` of a tree: `[L, B, ...]`; their L may differ."""
    return tree_map(lambda x: x.index_select(1, index), tree)

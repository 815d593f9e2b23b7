"""Minibatches: the order of sequences in each epoch.

L sequence length, S sequences, B sequences in a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import torch
from torch import Tensor

from canter.core import distributed
from canter.core.dispatch import has_kernels
from canter.core.struct import tree_map

Tree = TypeVar("Tree")
Shuffle = Literal["epoch", "rollout", "none"]
"""How often a new random order is drawn: for every epoch, once per rollout, or never."""


@has_kernels
def permutation(count: int, generator: torch.Generator) -> Tensor:
    """Return a random permutation `[count]`, int64 on the generator's device."""
    return torch.randperm(count, generator=generator, device=generator.device)


def epoch_orders(
    shuffle: Shuffle,
    sequences: int,
    num_envs: int,
    generator: torch.Generator,
    num_minibatches: int = 1,
    blocks: int | None = None,
) -> Iterator[Tensor]:
    """Yield the order `[S]` of each epoch, endlessly.

    "none" goes environment by environment, each in chronological order. Sequence number `c * N + n`
    is chunk c of environment n (`canter.core.data.rollout.as_sequences`). The environments of all
    ranks are split into `blocks` (None: one per rank) that are shuffled separately, and each
    minibatch takes equally many sequences of each block. If a rank has several blocks, the
    sequences that do not fill the minibatches are dropped.
    """
    ranks = distributed.world_size()
    blocks = blocks or ranks
    blocks_here = blocks // ranks
    size = sequences // blocks_here

    def draw() -> Tensor:
        if shuffle == "none":
            each = torch.arange(size, device=generator.device).view(-1, num_envs // blocks_here).t().reshape(-1)
            orders = [each] * blocks_here
        else:  # every rank draws for all, so that the stream is the same on each
            orders = [permutation(size, generator) for _ in range(blocks)][distributed.rank_slice(blocks_here)]
        return orders[0] if blocks_here == 1 else _interleaved(torch.stack(orders), num_envs, num_minibatches)

    order = draw()
    while True:
        yield order
        if shuffle == "epoch":
            order = draw()


def _interleaved(orders: Tensor, num_envs: int, num_minibatches: int) -> Tensor:
    """Merge the orders `[K, S / K]` of K blocks; minibatches hold equal parts of each."""
    blocks = len(orders)
    each = num_envs // blocks
    begin = torch.arange(blocks, device=orders.device).unsqueeze(1) * each
    sequence = orders // each * num_envs + begin + orders % each
    part = orders.shape[1] // num_minibatches
    return sequence[:, : part * num_minibatches].unflatten(1, (num_minibatches, part)).transpose(0, 1).reshape(-1)


@has_kernels
def take_sequences(tree: Tree, index: Tensor) -> Tree:
    """Return the sequences `index` `[B]` of every tensor `[L, S, ...]` of a tree; L may differ."""
    return tree_map(lambda x: x.index_select(1, index), tree)

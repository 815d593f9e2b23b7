"""The order in which sequences are learned from.

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
"""When a new random order is drawn: for every epoch, once for a rollout, or never."""


@has_kernels
def permutation(count: int, generator: torch.Generator) -> Tensor:
    """A random permutation `[count]`, int64 on the generator's device."""
    return torch.randperm(count, generator=generator, device=generator.device)


def epoch_orders(
    shuffle: Shuffle,
    sequences: int,
    num_envs: int,
    generator: torch.Generator,
    num_minibatches: int = 1,
    blocks: int | None = None,
) -> Iterator[Tensor]:
    """The order `[S]` of each epoch, without end; "none" goes environment by environment, each in the order of time.

    Sequence number `c * N + n` is chunk c of environment n (`canter.core.data.rollout.as_sequences`). The environments
    of all ranks fall into `blocks`, one for each rank if None, that are shuffled apart, and each minibatch takes as
    many sequences of each. What does not fill minibatches is left out where a rank has several blocks.
    """
    ranks = distributed.world_size()
    blocks = blocks or ranks
    own = blocks // ranks
    size = sequences // own

    def draw() -> Tensor:
        if shuffle == "none":
            each = torch.arange(size, device=generator.device).view(-1, num_envs // own).t().reshape(-1)
            orders = [each] * own
        else:  # every rank draws for all, so that the stream is the same on each
            orders = [permutation(size, generator) for _ in range(blocks)][distributed.own_rows(own)]
        return orders[0] if own == 1 else _interleaved(torch.stack(orders), num_envs, num_minibatches)

    order = draw()
    while True:
        yield order
        if shuffle == "epoch":
            order = draw()


def _interleaved(orders: Tensor, num_envs: int, num_minibatches: int) -> Tensor:
    """One order from those `[K, S / K]` within K blocks of environments, each minibatch made of equal parts."""
    blocks, each = len(orders), num_envs // len(orders)
    begin = torch.arange(blocks, device=orders.device).unsqueeze(1) * each
    sequence = orders // each * num_envs + begin + orders % each
    part = orders.shape[1] // num_minibatches
    return sequence[:, : part * num_minibatches].unflatten(1, (num_minibatches, part)).transpose(0, 1).reshape(-1)


@has_kernels
def take_sequences(tree: Tree, index: Tensor) -> Tree:
    """Sequences `index` `[B]` of every tensor `[L, S, ...]` of a tree: `[L, B, ...]`; their L may differ."""
    return tree_map(lambda x: x.index_select(1, index), tree)

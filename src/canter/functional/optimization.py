"""One update's optimisation: the order of sequences in each epoch, and Adam over flat vectors.

L sequence length, S sequences, B sequences in a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from canter.core import distributed
from canter.core.dispatch import has_kernels
from canter.core.seeding import MemberStreams
from canter.core.struct import tree_map

Tree = TypeVar("Tree")
Shuffle = Literal["epoch", "rollout", "none"]
"""How often a new random order is drawn: for every epoch, once per rollout, or never."""


@has_kernels
def permutation(count: int, generator: torch.Generator | MemberStreams) -> Tensor:
    """Return a random permutation `[count]`, or one for each member `[P, count]`, int64 on the generator's device."""
    if isinstance(generator, MemberStreams):
        return torch.stack([permutation(count, own) for own in generator.generators])
    return torch.randperm(count, generator=generator, device=generator.device)


def epoch_orders(
    shuffle: Shuffle,
    sequences: int,
    num_envs: int,
    generator: torch.Generator | MemberStreams,
    num_minibatches: int = 1,
    blocks: int | None = None,
) -> Iterator[Tensor]:
    """Yield the order `[S]` of each epoch, or random ones `[P, S]` of the members of a population, endlessly.

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


@dataclass(frozen=True)
class AdamGroup:
    """P parameters with one learning rate, and the state of Adam; tensors are updated in place."""

    flat: Tensor
    """`[P]` parameters."""
    gradient: Tensor
    """`[P]`; its scale after a step is undefined, clipping may be applied in place."""
    exp_avg: Tensor
    """`[P]` running mean of the gradient."""
    exp_avg_sq: Tensor
    """`[P]` running mean of its square."""
    step: Tensor
    """0-d: number of steps so far."""
    learning_rate: Tensor
    """0-d step size."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    """Gradients are clipped to this norm."""
    coupled: bool = False
    """Add weight decay to the gradient (Adam's L2) instead of decaying the parameters (AdamW)."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays of the CPU tensors, in field order; cached: as slow as a small step."""
        tensors = (self.flat, self.gradient, self.exp_avg, self.exp_avg_sq, self.step, self.learning_rate)
        return tuple(tensor.numpy() for tensor in tensors)


@has_kernels
def adam_step_(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Step all groups, unless the 0-d bool `skip` is True or a gradient has NaN or infinity.

    Returns 0-d tensors: the norm of all gradients together, and 1 if it is NaN or infinity, else 0.
    `joint` clips by that norm, otherwise each group is clipped by its own. Nothing waits for the
    host.
    """
    squares = [torch.dot(group.gradient, group.gradient) for group in groups]
    norm = torch.stack(squares).sum().sqrt()
    blocked = ~(norm < math.inf)  # true of NaN too
    skipped = (skip | blocked).to(norm.dtype)
    for group, square in zip(groups, squares, strict=True):
        clipped_norm = norm if joint else square.sqrt()
        group.step.add_(1.0 - skipped)
        # Private, but torch's own optimiser spends more time around this call than in it. It
        # divides by `grad_scale` and checks `found_inf` inside its kernel, so clipping and skipping
        # are free.
        fused = torch._fused_adam_ if group.coupled else torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]
        fused(
            [group.flat],
            [group.gradient],
            [group.exp_avg],
            [group.exp_avg_sq],
            [],
            [group.step],
            lr=group.learning_rate,
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay,
            eps=group.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=(clipped_norm / group.max_norm).clamp_(min=1.0),
            found_inf=skipped,
        )
    return norm, blocked.to(norm.dtype)


@has_kernels
def adam_rows_(group: AdamGroup, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Step P members side by side as `adam_step_` steps one, each with its own clipping and rate.

    `flat`, `gradient` and the running means are `[P, n]`, `step` and `learning_rate` `[P]`. Returns
    the norms of the gradients `[P]`, and 1 for each that is NaN or infinity, else 0. A member with
    such a gradient, or with `skip` `[P]`, does not change.
    """
    norm = torch.linalg.vector_norm(group.gradient, dim=1)
    blocked = ~(norm < math.inf)
    taken = ~(skip | blocked).unsqueeze(1)
    step = group.step.unsqueeze(1) + 1.0
    rate = group.learning_rate.unsqueeze(1)
    gradient = group.gradient / (norm / group.max_norm).clamp(min=1.0).unsqueeze(1)
    flat = group.flat
    if group.coupled:
        gradient = gradient + group.weight_decay * flat
    else:
        flat = flat * (1.0 - rate * group.weight_decay)
    beta1, beta2 = group.betas
    mean = torch.lerp(group.exp_avg, gradient, 1.0 - beta1)
    square = group.exp_avg_sq * beta2 + (1.0 - beta2) * gradient.square()
    root = square.sqrt() / (1.0 - beta2**step).sqrt() + group.eps
    flat = flat - rate / (1.0 - beta1**step) * (mean / root)
    for old, new in ((group.exp_avg, mean), (group.exp_avg_sq, square), (group.flat, flat)):
        torch.where(taken, new, old, out=old)
    group.step.add_(taken.squeeze(1).to(group.step.dtype))
    return norm, blocked.to(norm.dtype)

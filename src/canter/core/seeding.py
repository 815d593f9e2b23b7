"""One seed, many independent streams, the same on any number of ranks.

An environment's draws depend on its index among the environments of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from canter.core import distributed
from canter.core.registry import UserError

Purpose = Literal["init", "policy", "shuffle", "env", "eval", "opponents", "extensions"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def derive_seed(seed: int, purpose: Purpose) -> int:
    """Return a 63-bit seed for one purpose; streams of different purposes never overlap."""
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), 0))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


class MemberStreams:
    """Random streams of the members of a population, to be drawn from like one generator.

    Of a tensor `[P * N, ...]`, the block `[N, ...]` of a member is drawn from its own stream, so it
    depends neither on the other members nor on their number.
    """

    def __init__(self, device: torch.device, seeds: Sequence[int], origin: int = 0) -> None:
        self.device = device
        self.distances = [seed - origin for seed in seeds]
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.ahead = 1
        """Draws of one kind that are made together."""
        self.blocks: dict[Any, Iterator[Tensor]] = {}
        """Draws that were made ahead, by kind."""

    def draw_ahead(self, count: int) -> None:
        """Make `count` draws of one kind together from now on; drop those that are left.

        A draw on a GPU is a launch for each member, which takes as long as the draw of all steps.
        """
        self.ahead = count
        self.blocks = {}

    def manual_seed(self, seed: int) -> None:
        """Restart the streams: with their own seeds if `seed` is the origin, else equally far from those."""
        self.draw_ahead(1)
        for generator, distance in zip(self.generators, self.distances, strict=True):
            generator.manual_seed((seed + distance) % 2**63)

    def draw(self, draw: Callable[..., Tensor], shape: tuple[int, ...], **how: Any) -> Tensor:
        """Return `draw(shape, **how)` with a block from each stream."""
        kind = (getattr(draw, "func", draw), getattr(draw, "args", ()), shape, *how.items())
        drawn = next(self.blocks.get(kind, iter(())), None)
        if drawn is None:
            count, *rest = shape
            size = (self.ahead, count // len(self.generators), *rest)
            blocks = torch.cat([draw(size, generator=generator, **how) for generator in self.generators], 1)
            drawn, *later = blocks.unbind()
            self.blocks[kind] = iter(later)
        return drawn

    def get_state(self) -> Tensor:
        """Return the states of all streams, `[P, ...]` uint8; draws that were made ahead are not part of them."""
        return torch.stack([generator.get_state() for generator in self.generators])

    def set_state(self, state: Tensor) -> None:
        """Restore the states of all streams."""
        self.draw_ahead(1)
        for generator, own in zip(self.generators, state.cpu().unbind(), strict=True):
            generator.set_state(own.clone())  # it reads the storage, from its beginning


def draw_for_rank(draw: Callable[..., Tensor], shape: tuple[int, ...], *, generator: Any, **how: Any) -> Tensor:
    """Return the part `[N, ...]` of this rank of `draw(shape, **how)`, such as `torch.rand`.

    Every rank draws for all ranks and keeps its part, as one process with all environments would.
    `generator` is a `torch.Generator`, None for torch's own, or the `MemberStreams` of one process.
    """
    if isinstance(generator, MemberStreams):
        return generator.draw(draw, shape, **how)
    how["generator"] = generator
    if distributed.world_size() == 1:
        return draw(shape, **how)
    count, *rest = shape
    return draw((count * distributed.world_size(), *rest), **how)[distributed.rank_slice(count)]

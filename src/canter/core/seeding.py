"""One seed, many independent streams, alike on every rank: a row's draws do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from canter.core import distributed

Purpose = Literal["init", "policy", "shuffle", "env", "eval", "opponents", "extensions"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def derive_seed(seed: int, purpose: Purpose) -> int:
    """A 63-bit seed for one purpose; streams of different purposes never overlap."""
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), 0))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def draw_rows(draw: Callable[..., Tensor], shape: tuple[int, ...], **how: Any) -> Tensor:
    """`draw(shape, **how)`, such as `torch.rand`, for the rows `[N, ...]` of this rank.

    Every rank draws for the rows of all and takes its own: what one process with all of them would draw there.
    """
    if distributed.world_size() == 1:
        return draw(shape, **how)
    rows, *rest = shape
    return draw((rows * distributed.world_size(), *rest), **how)[distributed.own_rows(rows)]

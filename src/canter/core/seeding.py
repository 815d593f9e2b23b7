"""One seed, many independent streams, the same on any number of ranks.

An environment's draws depend on its index among the environments of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
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


def draw_for_rank(draw: Callable[..., Tensor], shape: tuple[int, ...], **how: Any) -> Tensor:
    """Return the part `[N, ...]` of this rank of `draw(shape, **how)`, such as `torch.rand`.

    Every rank draws for all ranks and keeps its part, as one process with all environments would.
    """
    if distributed.world_size() == 1:
        return draw(shape, **how)
    count, *rest = shape
    return draw((count * distributed.world_size(), *rest), **how)[distributed.rank_slice(count)]

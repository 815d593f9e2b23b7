"""One seed, many independent streams: every purpose and rank draws from its own."""

from __future__ import annotations

from typing import Literal

import numpy as np

from canter import distributed

Purpose = Literal["init", "policy", "shuffle", "env", "eval", "opponents", "extensions"]
PURPOSES: tuple[Purpose, ...] = ("init", "policy", "shuffle", "env", "eval", "opponents", "extensions")


def derive_seed(seed: int, purpose: Purpose) -> int:
    """A 63-bit seed for one purpose on this rank; streams of different purposes or ranks never overlap.

    Weights start alike on every rank, so "init" ignores the rank.
    """
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    rank = 0 if purpose == "init" else distributed.rank()
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), rank))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

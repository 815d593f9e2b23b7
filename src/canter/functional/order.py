"""The order in which sequences are learned from.

L sequence length, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter.dispatch import has_kernels


@has_kernels
def permutation(count: int, generator: torch.Generator) -> Tensor:
    """A random permutation `[count]`, int64 on the generator's device."""
    return torch.randperm(count, generator=generator, device=generator.device)


@has_kernels
def take_sequences(x: Tensor, index: Tensor) -> Tensor:
    """Sequences `index` `[B]` of `x` `[L, S, ...]`: `[L, B, ...]`."""
    return x.index_select(1, index)

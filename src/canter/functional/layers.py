"""Linear layers, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from canter.dispatch import has_kernels


@has_kernels
def linear_layers(x: Tensor, activation: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`[..., K]` through layers of `weight [N, K], bias [N]` pairs, each followed by the activation."""
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = activation(F.linear(x, weight, bias))
    return x

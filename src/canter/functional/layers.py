"""Linear layers, one after the other, and norms by the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.core.dispatch import has_kernels


@has_kernels
def linear_layers(x: Tensor, activation: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`[..., K]` through layers of `weight [N, K], bias [N]` pairs, each followed by the activation."""
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = activation(F.linear(x, weight, bias))
    return x


@has_kernels
def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`[E, B, D]` without the mean and with the variance 1 over B, times `weight` plus `bias` `[E, 1, D]`.

    With it the mean and the variance `[E, 1, D]`, which carry no gradient.
    """
    exact = x.to(weight.dtype)
    var, mean = torch.var_mean(exact, 1, correction=0, keepdim=True)
    y = torch.addcmul(bias, exact - mean, weight * torch.rsqrt(var + eps)).to(x.dtype)
    return y, mean.detach(), var.detach()

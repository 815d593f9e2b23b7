"""Linear layers in sequence, recurrent layers over sequences, and batch norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.core.dispatch import has_kernels


@has_kernels
def linear_layers(x: Tensor, activation: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Apply layers of `weight [N, K], bias [N]` pairs to `[..., K]`, each with the activation."""
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = activation(F.linear(x, weight, bias))
    return x


@has_kernels
def recurrent_layer(
    x: Tensor, cell: Callable[..., Any], state: tuple[Tensor, ...], reset: Tensor | None
) -> tuple[Tensor, ...]:
    """Run a cell over `x` `[L, B, F]`; return the states after each step, tensors `[L, B, H]`.

    `state` are the tensors `[B, H]` before the first step, one or for an LSTM two. `reset` `[L, B]`
    marks steps before which they are set to zero.
    """
    steps: list[tuple[Tensor, ...]] = []
    for t, features in enumerate(x.unbind()):
        if reset is not None:
            # Filled, not multiplied, so that a NaN does not reach the next episode.
            state = tuple([part.masked_fill(reset[t].unsqueeze(-1), 0.0) for part in state])
        after = cell(features, state[0] if len(state) == 1 else state)
        state = after if isinstance(after, tuple) else (after,)
        steps.append(state)
    return tuple([torch.stack(parts) for parts in zip(*steps, strict=True)])


@has_kernels
def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` `[E, B, D]` normalised over B, and the mean and the variance `[E, 1, D]`.

    The normalised `x` is multiplied by `weight` and shifted by `bias` `[E, 1, D]`. Mean and
    variance carry no gradient.
    """
    exact = x.to(weight.dtype)
    var, mean = torch.var_mean(exact, 1, correction=0, keepdim=True)
    y = torch.addcmul(bias, exact - mean, weight * torch.rsqrt(var + eps)).to(x.dtype)
    return y, mean.detach(), var.detach()

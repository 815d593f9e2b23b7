"""Linear layers with their activation on a CPU, forward and backward, without autograd.

M rows, K inputs, N outputs. Whatever can be done in place is: new memory costs more than arithmetic, for the system
hands it out page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def _elu_(x: Tensor) -> Tensor:
    # `exp(x) - 1` is several times as quick as `expm1`, and as exact once it stands beside numbers near 1.
    below = torch.exp(x).clamp_(max=1.0).sub_(1.0)
    return torch.maximum(x, below, out=x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh_, "relu": torch.relu_, "elu": _elu_}
"""Activations in place."""

SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda d, y: aten.tanh_backward.grad_input(d, y, grad_input=d),
    "relu": lambda d, y: aten.threshold_backward.grad_input(d, y, 0.0, grad_input=d),
    "elu": lambda d, y: aten.elu_backward.grad_input(d, 1.0, 1.0, 1.0, True, y, grad_input=d),
}
"""The gradient before an activation from that after it, in place, and the activation's value."""


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x` `[M, K]` through one layer: `[M, N]`."""
    return torch.mm(x, weight.t()).add_(bias)


def run_layers(x: Tensor, activation: str, weights: Sequence[Tensor]) -> list[Tensor]:
    """`x` `[M, K]` and what each of the layers `weight [N, K], bias [N], ...` makes of it."""
    activate, outputs = ACTIVATIONS[activation], [x]
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        outputs.append(activate(linear(outputs[-1], weight, bias)))
    return outputs


def layer_gradients(
    outputs: Sequence[Tensor], activation: str, weights: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    """Gradients of `weights` from that of the last output, which is overwritten; `outputs` as from `run_layers`."""
    slope, results = SLOPES[activation], []
    for layer in range(len(outputs) - 2, -1, -1):
        delta = slope(gradient, outputs[layer + 1])
        results[:0] = [torch.mm(delta.t(), outputs[layer]), delta.sum(0)]
        if layer > 0:
            gradient = torch.mm(delta, weights[2 * layer])
    return results

"""Linear layers with their activation on a CPU, forward and backward, without autograd.

M rows, K inputs, N outputs. In NumPy, for on small arrays a call of it costs a third of one of torch, and its products
with a transposed matrix several times less on some processors. Whatever can be done in place is: new memory costs more
than arithmetic, for the system hands it out page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

Array = np.ndarray
aten, tensor = torch.ops.aten, torch.from_numpy
LARGE = 2**21
"""Multiplications from which a matrix product is one of torch, which may use several threads."""
LARGE_SUM = 2**16
"""Numbers from which the same holds for a sum."""


def _relu_(x: Array) -> Array:
    torch.relu_(tensor(x))
    return x


def _elu_(x: Array) -> Array:
    # torch's exponential is the quicker one; `exp(x) - 1` is several times as quick as `expm1`, and as exact once it
    # stands beside numbers near 1.
    both = tensor(x)
    torch.maximum(both, torch.exp(both).clamp_(max=1.0).sub_(1.0), out=both)
    return x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": lambda x: np.tanh(x, out=x), "relu": _relu_, "elu": _elu_}
"""Activations in place."""


def _tanh_slope_(d: Array, y: Array) -> None:
    y *= y
    np.subtract(1.0, y, out=y)
    d *= y


def _relu_slope_(d: Array, y: Array) -> None:
    aten.threshold_backward.grad_input(tensor(d), tensor(y), 0.0, grad_input=tensor(d))


def _elu_slope_(d: Array, y: Array) -> None:
    aten.elu_backward.grad_input(tensor(d), 1.0, 1.0, 1.0, True, tensor(y), grad_input=tensor(d))


SLOPES: dict[str, Callable[[Array, Array], None]] = {"tanh": _tanh_slope_, "relu": _relu_slope_, "elu": _elu_slope_}
"""The gradient before an activation from that after it, in place, and the activation's value, which may be lost."""


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """`a` `[M, K]` times `b` `[K, N]`."""
    if a.size * b.shape[1] < LARGE:
        return np.matmul(a, b, out=out)
    return torch.mm(tensor(a), tensor(b), out=None if out is None else tensor(out)).numpy()


def linear(x: Array, weight: Array, bias: Array) -> Array:
    """`x` `[M, K]` through one layer: `[M, N]`."""
    y = product(x, weight.T)
    if y.size < LARGE_SUM:
        y += bias
    else:
        tensor(y).add_(tensor(bias))
    return y


def linear_gradients(x: Array, gradient: Array, weight: Array, bias: Array) -> None:
    """Write gradients `[N, K]` and `[N]` of a layer from that of its output `[M, N]`; `x` `[M, K]` went in."""
    product(gradient.T, x, out=weight)
    np.add.reduce(gradient, 0, out=bias)


def input_gradient(gradient: Array, weight: Array) -> Array:
    """The gradient of what went into a layer `[M, K]`, from that of its output `[M, N]`."""
    # An outer product is no work for a matrix product.
    return gradient * weight if len(weight) == 1 else product(gradient, weight)


def run_layers(x: Array, activation: str, weights: Sequence[Array]) -> list[Array]:
    """`x` `[M, K]` and what each of the layers `weight [N, K], bias [N], ...` makes of it."""
    activate, outputs = ACTIVATIONS[activation], [x]
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        outputs.append(activate(linear(outputs[-1], weight, bias)))
    return outputs


def layer_gradients(
    outputs: Sequence[Array], activation: str, weights: Sequence[Array], gradient: Array, into: Sequence[Array]
) -> None:
    """Write gradients of `weights` `into` arrays, from that of the last output.

    That and `outputs`, which are from `run_layers`, are overwritten.
    """
    slope = SLOPES[activation]
    for layer in range(len(outputs) - 2, -1, -1):
        slope(gradient, outputs[layer + 1])
        linear_gradients(outputs[layer], gradient, *into[2 * layer : 2 * layer + 2])
        if layer > 0:
            gradient = input_gradient(gradient, weights[2 * layer])

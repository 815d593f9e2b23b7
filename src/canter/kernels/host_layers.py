"""Linear layers with their activation on a CPU, forward and backward, without autograd.

M rows, K inputs, N outputs. In NumPy, for on small arrays a call of it costs a third of one of torch, and its products
with a transposed matrix several times less on some processors. Whatever can be done in place is: new memory costs more
than arithmetic, for the system hands it out page by page.

What comes before and after a product is here twice: in NumPy, which is the definition, and for float32 in C
(`_host.c`), which is not there on a machine that had no compiler when Canter was installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from canter.kernels.host_threads import parts, share

try:
    from canter.kernels import _host
except ImportError:
    _host = None

Array = np.ndarray
COMPILED = _host is not None
"""Whether the form in C is there."""
KINDS = {"identity": 0, "elu": 1, "relu": 2, "tanh": 3}
"""Activations by the numbers that they have in C."""


def _elu_(x: Array) -> None:
    # Several times as quick as `expm1`, and as exact once it stands beside numbers near 1.
    below = np.exp(np.minimum(x, 0.0))
    below -= 1.0
    np.maximum(x, below, out=x)


def _elu_slope_(d: Array, y: Array) -> None:
    np.minimum(y, 0.0, out=y)
    y += 1.0
    d *= y


def _tanh_slope_(d: Array, y: Array) -> None:
    y *= y
    np.subtract(1.0, y, out=y)
    d *= y


IN_PLACE: dict[str, Callable[[Array], object]] = {
    "identity": lambda x: None,
    "elu": _elu_,
    "relu": lambda x: np.maximum(x, 0.0, out=x),
    "tanh": lambda x: np.tanh(x, out=x),
}
"""Activations."""
SLOPES: dict[str, Callable[[Array, Array], object]] = {
    "identity": lambda d, y: None,
    "elu": _elu_slope_,
    "relu": lambda d, y: np.multiply(d, y > 0.0, out=d),
    "tanh": _tanh_slope_,
}
"""The gradient before an activation from that after it, in place, and the activation's value, which may be lost."""


def activate_(y: Array, bias: Array, activation: str) -> None:
    """Add the bias `[N]` to what a product gave, `y` `[M, N]`, and activate; in place."""
    if _host is not None and y.dtype == np.float32:
        return _host.activate(y, bias, KINDS[activation])
    y += bias
    IN_PLACE[activation](y)


def descend_(gradient: Array, y: Array, bias: Array, activation: str) -> None:
    """From the gradient of an activation's value `y` `[M, N]` to that before it, in place, and its column sums `bias`.

    `y` may be lost.
    """
    if _host is not None and y.dtype == np.float32:
        return _host.descend(gradient, y, bias, KINDS[activation])
    SLOPES[activation](gradient, y)
    np.add.reduce(gradient, 0, out=bias)


def layer(x: Array, weight: Array, bias: Array, activation: str) -> Array:
    """`x` `[M, K]` through one layer: `[M, N]`."""
    y = x @ weight.T
    activate_(y, bias, activation)
    return y


def input_gradient(gradient: Array, weight: Array) -> Array:
    """The gradient of what went into a layer `[M, K]`, from that of what its product gave `[M, N]`."""
    # An outer product is no work for a matrix product.
    return gradient * weight if len(weight) == 1 else gradient @ weight


def run_layers(x: Array, activations: Sequence[str], weights: Sequence[Array]) -> list[Array]:
    """`x` `[M, K]` and what each of the layers `weight [N, K], bias [N], ...` makes of it."""
    outputs = [x]
    for weight, bias, activation in zip(weights[::2], weights[1::2], activations, strict=True):
        outputs.append(layer(outputs[-1], weight, bias, activation))
    return outputs


def last_output(x: Array, activations: Sequence[str], weights: Sequence[Array]) -> Array:
    """What the last of the layers makes of `x` `[M, K]`; threads share the rows."""

    def run(_: int, rows: slice) -> Array:
        with np.errstate(all="ignore"):  # what is not finite shows where it comes out
            return run_layers(x[rows], activations, weights)[-1]

    outputs = share(run, parts(len(x), max(weight.size for weight in weights)))
    return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)


def layer_gradients(
    outputs: Sequence[Array],
    activations: Sequence[str],
    weights: Sequence[Array],
    gradient: Array,
    into: Sequence[Array],
) -> None:
    """Write gradients of `weights` `into` arrays, from that of the last output.

    That and `outputs`, which are from `run_layers`, are overwritten.
    """
    for number in range(len(activations) - 1, -1, -1):
        weight, bias = into[2 * number : 2 * number + 2]
        descend_(gradient, outputs[number + 1], bias, activations[number])
        np.matmul(gradient.T, outputs[number], out=weight)
        if number > 0:
            gradient = input_gradient(gradient, weights[2 * number])

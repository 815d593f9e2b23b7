"""Fully connected layers, activations and weight initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from canter.core.registry import Registry
from canter.functional.layers import linear_layers

activations: Registry[Callable[[], nn.Module]] = Registry("activation")
"""Builders of activations (modules without parameters) by name."""
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "mish": nn.Mish,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}
for _name, _module in ACTIVATIONS.items():
    activations.register(_name)(_module)
Activation = Annotated[str, activations]
Init = Literal["orthogonal", "default", "default_zero_bias", "glorot_normal", "glorot_uniform", "variance_scaling"]
Layer = TypeVar("Layer", bound=nn.Linear | nn.Conv1d | nn.Conv2d)


def _scale(weight: Tensor, gain: float) -> None:
    weight.data.mul_(gain / math.sqrt(2))


def _variance_scaling(weight: Tensor, gain: float) -> None:
    std = gain / math.sqrt(weight[0].numel())
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


INITIALIZERS: dict[str, Callable[[Tensor, float], Any]] = {
    "orthogonal": nn.init.orthogonal_,
    "default": _scale,
    "default_zero_bias": _scale,
    "glorot_normal": nn.init.xavier_normal_,
    "glorot_uniform": nn.init.xavier_uniform_,
    "variance_scaling": _variance_scaling,
}
"""Functions `(weight, gain)` that initialise a weight in place; it starts with torch's default."""


def init_layer(layer: Layer, init: Init, gain: float = math.sqrt(2)) -> Layer:
    """Initialise a layer with weights of the given gain and zero biases, and return it.

    For "default", torch's own initialisation, weights and biases are scaled by `gain / sqrt(2)`. So
    a small output gain means the same (a policy that starts near uniform) for every initialisation.
    """
    INITIALIZERS[init](layer.weight, gain)
    if layer.bias is not None:
        _scale(layer.bias, gain) if init == "default" else nn.init.zeros_(layer.bias)
    return layer


IDENTITY = nn.Identity()


class Linear(nn.Linear):
    """Linear layer by the same function as hidden layers, so that it uses the same kernels."""

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return linear_layers(input, IDENTITY, [self.weight, self.bias])


NormPosition = Literal["before_activation", "after_activation"]


class MLP(nn.Sequential):
    """Linear layers, each with the activation and an optional layer norm."""

    def __init__(
        self,
        input_dim: int,
        hidden: tuple[int, ...],
        activation: Activation,
        init: Init,
        gain: float,
        layer_norm: NormPosition | None = None,
        first_norm_only: bool = False,
    ) -> None:
        layers: list[nn.Module] = []
        for i, width in enumerate(hidden):
            norm = None if first_norm_only and i else layer_norm
            layers.append(init_layer(nn.Linear(input_dim, width), init, gain))
            if norm == "before_activation":
                layers.append(nn.LayerNorm(width))
            layers.append(activations[activation]())
            if norm == "after_activation":
                layers.append(nn.LayerNorm(width))
            input_dim = width
        super().__init__(*layers)
        self.plain = layer_norm is None and len(hidden) > 0
        """True if there are only linear layers and activations."""

    @property
    def weights(self) -> list[Tensor]:
        """Weight and bias of each layer; looked up each time, as loading may replace them."""
        return [parameter for layer in self for parameter in layer._parameters.values() if parameter is not None]

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., input_dim]` to `[..., hidden[-1]]`."""
        return linear_layers(input, self[-1], self.weights) if self.plain else super().forward(input)


class D2RL(nn.ModuleList):
    """Like `MLP`, but every layer after the first also reads the input (Sinha et al., 2020)."""

    def __init__(self, input_dim: int, hidden: tuple[int, ...], *settings: Any) -> None:
        inputs = [input_dim, *(width + input_dim for width in hidden[:-1])]
        super().__init__(MLP(size, (width,), *settings) for size, width in zip(inputs, hidden, strict=False))

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., input_dim]` to `[..., hidden[-1]]`."""
        x = input
        for i, layer in enumerate(self):
            x = layer(x if i == 0 else torch.cat([x, input], dim=-1))
        return x

"""Fully connected layers and how weights begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from torch import Tensor, nn

from canter.functional.layers import linear_layers
from canter.registry import Registry

activations: Registry[Callable[[], nn.Module]] = Registry("activation")
"""What makes each non-linearity, a module without parameters, by its name."""
for _name, _module in {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
}.items():
    activations.register(_name)(_module)
Activation = Annotated[str, activations]
Init = Literal["orthogonal", "default"]


def init_layer(layer: nn.Linear | nn.Conv2d, init: Init, gain: float = math.sqrt(2)) -> nn.Linear | nn.Conv2d:
    """Orthogonal weights of the given gain and zero bias, or torch's own default scaled by `gain / sqrt(2)`.

    The scaling keeps the meaning of a small output gain (a policy that starts near uniform) under either choice.
    """
    if init == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    else:
        factor = gain / math.sqrt(2)
        layer.weight.data.mul_(factor)
        if layer.bias is not None:
            layer.bias.data.mul_(factor)
    return layer


IDENTITY = nn.Identity()


class Linear(nn.Linear):
    """A linear layer by the same function as hidden ones, so that it has the same kernels."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return linear_layers(input, IDENTITY, [self.weight, self.bias])


class MLP(nn.Sequential):
    """Linear layers, each with an optional layer norm and the activation: `[..., input_dim]` to `[..., hidden[-1]]`."""

    def __init__(
        self, input_dim: int, hidden: tuple[int, ...], activation: Activation, init: Init, gain: float, layer_norm: bool
    ) -> None:
        layers: list[nn.Module] = []
        for width in hidden:
            layers.append(init_layer(nn.Linear(input_dim, width), init, gain))
            if layer_norm:
                layers.append(nn.LayerNorm(width))
            layers.append(activations[activation]())
            input_dim = width
        super().__init__(*layers)
        self.plain = not layer_norm and len(hidden) > 0
        """Whether there is nothing but linear layers and activations."""

    @property
    def weights(self) -> list[Tensor]:
        """Weight and bias of each layer. Looked up each time: loading a file may put new ones in their place."""
        return [parameter for layer in self for parameter in layer._parameters.values() if parameter is not None]

    def forward(self, input: Tensor) -> Tensor:
        """`[..., input_dim]` to `[..., hidden[-1]]`."""
        return linear_layers(input, self[-1], self.weights) if self.plain else super().forward(input)

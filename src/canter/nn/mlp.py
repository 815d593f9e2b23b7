"""Fully connected layers and how weights begin."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from canter.kernels import on_host, usable
from canter.kernels.host_layers import last_output

Activation = Literal["tanh", "relu", "elu", "silu", "gelu", "leaky_relu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
}
FUSED = ("tanh", "relu", "elu")
"""Those that fused layers know."""
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


class Linear(nn.Linear):
    """A linear layer; on a GPU its bias gradient takes no pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        if not usable(input):
            return super().forward(input)
        from canter.kernels.linear import hidden_layers

        return hidden_layers(input, "identity", [self.weight, self.bias])


def mlp(
    input_dim: int, hidden: tuple[int, ...], activation: Activation, init: Init, gain: float, layer_norm: bool = False
) -> MLP:
    """Linear layers, each with an optional layer norm and the activation: `[..., input_dim]` to `[..., hidden[-1]]`."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(init_layer(nn.Linear(input_dim, width), init, gain))
        if layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(ACTIVATIONS[activation]())
        input_dim = width
    return MLP(layers, activation if activation in FUSED and hidden and not layer_norm else None)


class MLP(nn.Sequential):
    """Layers one after the other; linear ones with a known `activation` run as fused layers."""

    def __init__(self, layers: list[nn.Module], activation: str | None) -> None:
        super().__init__(*layers)
        self.activation = activation

    @property
    def weights(self) -> list[Tensor]:
        """Weight and bias of each layer. Looked up each time: loading a file may put new ones in their place."""
        return [parameter for layer in self for parameter in layer._parameters.values() if parameter is not None]

    def forward(self, input: Tensor) -> Tensor:
        """`[..., input_dim]` to `[..., hidden[-1]]`."""
        if self.activation and on_host(input) and not torch.is_grad_enabled():
            rows, weights = input.reshape(-1, input.shape[-1]), [weight.detach().numpy() for weight in self.weights]
            output = last_output(rows.detach().numpy(), [self.activation] * (len(weights) // 2), weights)
            return torch.from_numpy(output).view(*input.shape[:-1], -1)
        if not self.activation or not usable(input):
            return super().forward(input)
        from canter.kernels.linear import hidden_layers

        return hidden_layers(input, self.activation, self.weights)

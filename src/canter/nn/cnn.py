"""Convolutional encoder for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from canter.nn.mlp import Activation, Init, activations, init_layer


@dataclass(frozen=True, kw_only=True)
class CNNConfig:
    """How images become features."""

    layers: tuple[tuple[int, int, int], ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    """(channels, kernel, stride) of each convolution."""
    features: int = 256
    """Width of the linear layer behind the convolutions."""
    layout: Literal["auto", "channels_first", "channels_last"] = "auto"
    """Where the channel axis is; "auto" takes the last axis when it is 1, 3 or 4 long and the first is not."""

    def __post_init__(self) -> None:
        """Refuse layers without width, kernel or stride."""
        if any(len(layer) != 3 or min(layer) < 1 for layer in self.layers):
            raise ValueError(f"layers={self.layers} must be (channels, kernel, stride), each at least 1")
        if self.features < 1:
            raise ValueError(f"features={self.features} must be at least 1")

    def build(self, shape: tuple[int, ...], activation: Activation, init: Init, gain: float) -> CNN:
        """An encoder for images of `shape`, three axes."""
        return CNN(self, shape, activation, init, gain)


class CNN(nn.Module):
    """Images `[..., *shape]`, uint8 in 0..255 or float in 0..1, to features `[..., features]`."""

    def __init__(
        self, config: CNNConfig, shape: tuple[int, ...], activation: Activation, init: Init, gain: float
    ) -> None:
        super().__init__()
        channels_last = config.layout == "channels_last" or (
            config.layout == "auto" and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)
        )
        self.shape, self.channels_last = shape, channels_last
        channels, *size = (shape[2], shape[0], shape[1]) if channels_last else shape
        layers: list[nn.Module] = []
        for width, kernel, stride in config.layers:
            if min(size) < kernel:
                raise ValueError(
                    f"an image of {tuple(shape)} is too small for cnn.layers={config.layers}: "
                    f"{size[0]}x{size[1]} is left before a kernel of {kernel}; use fewer or smaller kernels"
                )
            layers += [init_layer(nn.Conv2d(channels, width, kernel, stride), init, gain), activations[activation]()]
            channels, size = width, [(extent - kernel) // stride + 1 for extent in size]
        flat = channels * size[0] * size[1]
        linear = init_layer(nn.Linear(flat, config.features), init, gain)
        self.layers = nn.Sequential(*layers, nn.Flatten(), linear, activations[activation]())

    def forward(self, image: Tensor) -> Tensor:
        """Features of images with any leading axes."""
        leading = image.shape[: -len(self.shape)]
        x = image.reshape(-1, *self.shape)
        x = x.to(torch.float32) / 255 if image.dtype == torch.uint8 else x
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        return self.layers(x).reshape(*leading, -1)

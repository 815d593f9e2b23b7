"""Convolutional encoders for images and for sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.nn.mlp import Activation, Init, activations, init_layer

DEFAULT_LAYERS: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (36, ((32, 8, 4), (64, 4, 2), (64, 3, 1))),
    (10, ((32, 4, 2), (64, 3, 1))),
    (3, ((32, 3, 1, 1), (64, 3, 1))),
    (0, ((32, 1, 1),)),
)
"""Minimum length of the shorter side in pixels, and the layers for it; the first match is used."""


@dataclass(frozen=True, kw_only=True)
class CNNConfig:
    """Convolutional encoder of images."""

    kind: Literal["convolutions", "impala"] = "convolutions"
    """Plain convolutions, or IMPALA's stages: each a convolution, a pooling that halves the image,
    and two residual blocks."""
    layers: tuple[tuple[int, ...], ...] | None = None
    """(channels, kernel, stride) of each convolution; an optional fourth number is the padding on
    each side. Null selects layers by size: those of Mnih et al. (2015) from 36 pixels on, fewer and
    smaller kernels below."""
    depths: tuple[int, ...] = (16, 32, 32)
    """Channels of each stage of `kind="impala"`."""
    features: int | None = 256
    """Width of the linear layer after the convolutions; null for none."""
    activation: Activation | None = None
    """Activation of the encoder; null uses that of the network."""
    layout: Literal["auto", "channels_first", "channels_last"] = "auto"
    """Position of the channel axis; "auto" takes the last if only that has length 1, 3 or 4."""
    sequences: bool = False
    """Encode groups of two axes, `[channels, length]`, by 1-d convolutions instead of flattening
    them."""

    def __post_init__(self) -> None:
        """Raise UserError for layers without width, kernel or stride."""
        layers = self.layers or ()
        if any(len(layer) not in (3, 4) or min(layer[:3]) < 1 or min(layer) < 0 for layer in layers):
            raise UserError(
                f"layers={self.layers} must be (channels, kernel, stride), each at least 1, with an optional padding"
            )
        check_range(self, "must be at least 1", "features")
        check_range(self, "must be widths of at least 1", "depths")
        if self.kind == "impala" and self.sequences:
            raise UserError("kind=impala reads images: set sequences=false or kind=convolutions")

    def layers_for(self, size: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the convolutions for images, or sequences, of this size."""
        if self.layers is not None:
            return self.layers
        return next(layers for least, layers in DEFAULT_LAYERS if min(size) >= least)

    def build(self, shape: tuple[int, ...], activation: Activation, init: Init, gain: float) -> CNN:
        """Build an encoder for images of `shape` (three axes) or for sequences (two axes)."""
        return CNN(self, shape, self.activation or activation, init, gain)


class CNN(nn.Module):
    """Encoder of images or sequences `[..., *shape]`, uint8 in 0..255 or float in 0..1."""

    def __init__(
        self, config: CNNConfig, shape: tuple[int, ...], activation: Activation, init: Init, gain: float
    ) -> None:
        super().__init__()
        guessed = config.layout == "auto" and len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)
        self.shape = shape
        self.channels_last = config.layout == "channels_last" or guessed
        channels = shape[-1] if self.channels_last else shape[0]
        size = list(shape[:-1] if self.channels_last else shape[1:])
        if config.kind == "impala":
            layers, channels, size = _impala(config.depths, channels, size, init, gain)
            layers.append(activations[activation]())
        else:
            layers, channels, size = _convolutions(config, shape, channels, size, activation, init, gain)
        self.features = channels * math.prod(size)
        layers.append(nn.Flatten())
        if config.features is not None:
            layers += [init_layer(nn.Linear(self.features, config.features), init, gain), activations[activation]()]
            self.features = config.features
        self.layers = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        """Return features of images with any leading axes."""
        leading = image.shape[: -len(self.shape)]
        x = image.reshape(-1, *self.shape)
        x = x.to(torch.float32) / 255 if image.dtype == torch.uint8 else x
        if self.channels_last:
            x = x.movedim(-1, 1)
        return self.layers(x).reshape(*leading, -1)


Built = tuple[list[nn.Module], int, list[int]]
"""Layers, and the channels and the size of their output."""


def _convolutions(
    config: CNNConfig, shape: tuple[int, ...], channels: int, size: list[int], activation: Activation, init: Init,
    gain: float,
) -> Built:  # fmt: skip
    layers: list[nn.Module] = []
    kind = nn.Conv2d if len(size) == 2 else nn.Conv1d
    convolutions = config.layers_for(size)
    for width, kernel, stride, *rest in convolutions:
        padding = rest[0] if rest else 0
        if min(size) + 2 * padding < kernel:
            remaining = "x".join(map(str, size))
            raise UserError(
                f"an image of {tuple(shape)} is too small for cnn.layers={convolutions}: "
                f"{remaining} is left before a kernel of {kernel}; use fewer or smaller kernels"
            )
        layers += [init_layer(kind(channels, width, kernel, stride, padding), init, gain), activations[activation]()]
        channels = width
        size = [(extent + 2 * padding - kernel) // stride + 1 for extent in size]
    return layers, channels, size


def _impala(depths: tuple[int, ...], channels: int, size: list[int], init: Init, gain: float) -> Built:
    layers: list[nn.Module] = []
    for width in depths:
        layers += [init_layer(nn.Conv2d(channels, width, 3, padding=1), init, gain), nn.MaxPool2d(3, 2, padding=1)]
        layers += [Residual(width, init, gain), Residual(width, init, gain)]
        channels = width
        size = [(extent - 1) // 2 + 1 for extent in size]
    return layers, channels, size


class Residual(nn.Module):
    """Residual block of two convolutions (Espeholt et al., 2018)."""

    def __init__(self, channels: int, init: Init, gain: float) -> None:
        super().__init__()
        first = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init, gain)
        second = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init, gain)
        self.layers = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of `x` `[B, channels, ...]` and its convolutions."""
        return x + self.layers(x)

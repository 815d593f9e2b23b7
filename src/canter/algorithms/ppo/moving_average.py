"""Exponential moving average."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MovingAverage(nn.Module):
    """Exponentially weighted mean of what it was shown, in float64; moved only by an explicit `update`.

    Weights add up to one from the first update on, so it starts at the first value instead of being biased towards 0.
    """

    value: Tensor
    weight: Tensor

    def __init__(self, step: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("value", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, count: Tensor) -> None:
        """Move towards `x`, the mean of `count` samples; NaN, infinity and a count of 0 move nothing."""
        weight = self.weight + self.step * (1.0 - self.weight)
        value = self.value + self.step / weight * (x - self.value)
        usable = torch.isfinite(value).all() & (count > 0)
        self.value.copy_(torch.where(usable, value, self.value))
        self.weight.copy_(torch.where(usable, weight, self.weight))

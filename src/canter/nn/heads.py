"""Last layers: features to distribution parameters, features to values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from canter.distributions import DiagGaussian, Distribution, TanhGaussian, mask_logits
from canter.functional.densities import bounded, bounded_gaussian_params
from canter.nn.mlp import Init, Linear, init_layer
from canter.nn.normalizer import IdentityNormalizer, Normalizer


@dataclass(frozen=True, kw_only=True)
class StdConfig:
    """Standard deviation of a Gaussian policy."""

    kind: Literal["parameter", "network"] = "parameter"
    """One learned number per action component, or an output of the network (state-dependent)."""
    initial: float = 1.0
    """Standard deviation at the start."""
    minimum: float = 0.01
    """Lower bound, approached but never reached."""
    maximum: float = 10.0
    """Upper bound, approached but never reached."""

    def __post_init__(self) -> None:
        """Refuse bounds that do not hold the initial value between them."""
        if not 0 < self.minimum < self.initial < self.maximum:
            raise ValueError(
                f"std: 0 < minimum < initial < maximum must hold, "
                f"not minimum={self.minimum}, initial={self.initial}, maximum={self.maximum}"
            )


class BoundedLogStd(nn.Module):
    """Maps an unbounded number to a log-std inside bounds.

    `mid + half * x / sqrt(1 + x^2)` with `x = raw / half` has slope one in the middle and falls off only like `x^-3`,
    so a std that was driven to a bound still has a gradient to come back by; a clamp has none, a bare std crosses zero.
    """

    def __init__(self, config: StdConfig) -> None:
        super().__init__()
        low, high = math.log(config.minimum), math.log(config.maximum)
        self.mid, self.half_range = (low + high) / 2, (high - low) / 2
        fraction = (math.log(config.initial) - self.mid) / self.half_range
        self.initial = self.half_range * fraction / math.sqrt(1 - fraction**2)

    def forward(self, raw: Tensor) -> Tensor:
        """Log-std of the same shape as `raw`."""
        return bounded(raw, self.mid, self.half_range)

    def params(self, mean: Tensor, raw: Tensor) -> Tensor:
        """Mean `[..., A]` and log-std side by side, `[..., 2A]`; `raw` is `[A]` or of the mean's shape."""
        return bounded_gaussian_params(mean, raw, self.mid, self.half_range)


class GaussianHead(nn.Module):
    """Features `[..., F]` to mean and log-std `[..., 2A]`."""

    def __init__(self, features: int, dim: int, std: StdConfig, init: Init, gain: float) -> None:
        super().__init__()
        self.mean = init_layer(Linear(features, dim), init, gain)
        self.bound = BoundedLogStd(std)
        self.raw_std: nn.Parameter | nn.Module
        if std.kind == "parameter":
            self.raw_std = nn.Parameter(torch.full((dim,), self.bound.initial))
        else:
            self.raw_std = init_layer(Linear(features, dim), init, gain)
            nn.init.constant_(cast(nn.Linear, self.raw_std).bias, self.bound.initial)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Distribution parameters; continuous actions have no mask."""
        raw = self.raw_std if isinstance(self.raw_std, nn.Parameter) else self.raw_std(features)
        return self.bound.params(self.mean(features), raw)


class LinearHead(nn.Module):
    """Features `[..., F]` to logits or raw parameters `[..., P]`; forbidden choices get no probability."""

    def __init__(self, features: int, dim: int, init: Init, gain: float) -> None:
        super().__init__()
        self.linear = init_layer(Linear(features, dim), init, gain)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Distribution parameters, with `mask` `[..., P]` applied where there is one."""
        params = self.linear(features)
        return params if mask is None else mask_logits(params, mask)


def policy_head(distribution: Distribution, features: int, std: StdConfig, init: Init, gain: float) -> nn.Module:
    """The last layer that `distribution` needs."""
    match distribution:
        case DiagGaussian() | TanhGaussian():
            return GaussianHead(features, distribution.param_dim // 2, std, init, gain)
        case _:
            return LinearHead(features, distribution.param_dim, init, gain)


class ValueHead(nn.Module):
    """Features `[..., F]` to normalised values `[...]`, with the statistics that give them back their units."""

    def __init__(self, features: int, init: Init, gain: float, normalize: bool) -> None:
        super().__init__()
        self.linear = init_layer(Linear(features, 1), init, gain)
        self.normalizer = Normalizer() if normalize else IdentityNormalizer()

    def forward(self, features: Tensor) -> Tensor:
        """Value in normalised units, as the loss sees it."""
        return self.linear(features).squeeze(-1)

    @torch.no_grad()
    def update_statistics(self, return_: Tensor, valid: Tensor) -> None:
        """Move the statistics to include these returns and rescale the layer so that no prediction moves (PopArt)."""
        if isinstance(self.normalizer, IdentityNormalizer):
            return
        old_scale, old_shift = self.normalizer.scale.clone(), self.normalizer.shift.clone()
        self.normalizer.update(return_, valid)
        scale, shift = self.normalizer.scale, self.normalizer.shift
        weight, bias = self.linear.weight, cast(Tensor, self.linear.bias)
        weight.mul_(old_scale / scale)
        bias.copy_((bias * old_scale + old_shift - shift) / scale)

    @torch.no_grad()
    def shift_(self, amount: Tensor) -> None:
        """Move every value by a 0-d `amount` in the units of the reward."""
        normalised = self.normalizer(amount) - self.normalizer(torch.zeros_like(amount))
        cast(Tensor, self.linear.bias).add_(normalised)

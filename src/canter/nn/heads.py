"""Last layers: features to distribution parameters, features to values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from canter.core.registry import UserError
from canter.functional.densities import StdForm, gaussian_params, log_std_of
from canter.nn.distributions import DiagGaussian, Distribution, TanhGaussian, mask_logits
from canter.nn.mlp import Init, Linear, init_layer
from canter.nn.normalizer import IdentityNormalizer, NormalizerConfig

BOUNDED: tuple[StdForm, ...] = ("bounded", "tanh")
"""Forms of the standard deviation that have bounds."""


@dataclass(frozen=True, kw_only=True)
class StdConfig:
    """Standard deviation of a Gaussian policy."""

    kind: Literal["parameter", "network"] = "parameter"
    """One learned number per action component, or an output of the network (state-dependent)."""
    form: StdForm = "bounded"
    """What the learned number is: a logarithm kept within bounds, the same by a tanh, as rl_games' SAC has it, the
    logarithm, the standard deviation itself (not below 1e-6), that before a softplus, or, with a `floor`, itself where
    it is well above that, as rl_games' linear form."""
    initial: float = 1.0
    """Standard deviation at the start."""
    minimum: float = 0.01
    """For the first two forms: lower bound, approached but never reached."""
    maximum: float = 10.0
    """For the first two forms: upper bound, approached but never reached."""
    floor: float = 0.0
    """Added to what the learned number means; it is in `initial`."""
    learn: bool = True
    """Off: for `kind="parameter"`, it stays at `initial`."""

    def __post_init__(self) -> None:
        """Refuse bounds and a floor that do not hold the initial value, and a network that does not learn."""
        if not 0 <= self.floor < self.initial:
            raise UserError(f"std: 0 <= floor < initial must hold, not floor={self.floor}, initial={self.initial}")
        if self.form in BOUNDED and not 0 < self.minimum < self.initial - self.floor < self.maximum:
            raise UserError(
                f"std: 0 < minimum < initial (without the floor) < maximum must hold, not minimum={self.minimum}, "
                f"initial={self.initial}, floor={self.floor}, maximum={self.maximum}"
            )
        if self.form == "linear" and not self.floor:
            raise UserError("std: form=linear needs a floor above 0, which is smoothly approached")
        if self.kind == "network" and not self.learn:
            raise UserError("std: learn=false is for kind=parameter; an output of the network always learns")


class LogStd(nn.Module):
    """Maps a learned number to a log-std.

    The bounded form, `mid + half * x / sqrt(1 + x^2)` with `x = raw / half`, has slope one in the middle and falls off
    only like `x^-3`, so a std that was driven to a bound still has a gradient to come back by; a clamp has none, a bare
    std crosses zero.
    """

    floor = 0.0
    """What is added to the standard deviation."""

    def __init__(self, config: StdConfig) -> None:
        super().__init__()
        self.form: StdForm = config.form
        low, high = math.log(config.minimum), math.log(config.maximum)
        self.mid, self.half_range = (low + high) / 2, (high - low) / 2
        self.initial = self._inverse(config.initial)

    def _inverse(self, std: float) -> float:
        """The learned number that means this standard deviation."""
        match self.form:
            case "bounded" | "tanh":
                fraction = (math.log(std) - self.mid) / self.half_range
                bounded = self.half_range * fraction / math.sqrt(1 - fraction**2)
                return bounded if self.form == "bounded" else math.atanh(fraction)
            case "log":
                return math.log(std)
            case "scalar":
                return std
            case "softplus" | "linear":
                return std + math.log(-math.expm1(-std))

    def forward(self, raw: Tensor) -> Tensor:
        """Log-std of the same shape as `raw`."""
        return log_std_of(raw, self.mid, self.half_range, self.form)

    def params(self, mean: Tensor, raw: Tensor) -> Tensor:
        """Mean `[..., A]` and log-std side by side, `[..., 2A]`; `raw` is `[A]` or of the mean's shape."""
        return gaussian_params(mean, raw, self.mid, self.half_range, self.form)


class FlooredLogStd(LogStd):
    """The same with a constant added to the standard deviation. No other engine knows it: they look at the type."""

    def __init__(self, config: StdConfig) -> None:
        form = "softplus" if config.form == "linear" else config.form
        super().__init__(replace(config, form=form, initial=config.initial - config.floor, floor=0.0))
        self.form, self.floor = config.form, config.floor
        self.shift = config.floor if config.form == "linear" else 0.0
        self.initial += self.shift

    def forward(self, raw: Tensor) -> Tensor:
        """Log-std of the same shape as `raw`."""
        return torch.log(super().forward(raw - self.shift).exp() + self.floor)

    def params(self, mean: Tensor, raw: Tensor) -> Tensor:
        """Mean `[..., A]` and log-std side by side, `[..., 2A]`."""
        return torch.cat([mean, self(raw).expand_as(mean)], dim=-1)


class GaussianHead(nn.Module):
    """Features `[..., F]` to mean and log-std `[..., 2A]`."""

    raw_std: Tensor | nn.Module
    """A parameter, a buffer where it does not learn, or a layer where it depends on the observation."""

    def __init__(self, features: int, dim: int, std: StdConfig, init: Init, gain: float) -> None:
        super().__init__()
        self.mean = init_layer(Linear(features, dim), init, gain)
        self.log_std = FlooredLogStd(std) if std.floor else LogStd(std)
        if std.kind == "network":
            self.raw_std = layer = init_layer(Linear(features, dim), init, gain)
            nn.init.constant_(layer.bias, self.log_std.initial)
        elif std.learn:
            self.raw_std = nn.Parameter(torch.full((dim,), self.log_std.initial))
        else:
            self.register_buffer("raw_std", torch.full((dim,), self.log_std.initial))

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Distribution parameters; continuous actions have no mask."""
        raw = self.raw_std if isinstance(self.raw_std, Tensor) else self.raw_std(features)
        return self.log_std.params(self.mean(features), raw)


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
    if isinstance(distribution, DiagGaussian | TanhGaussian):
        return GaussianHead(features, distribution.param_dim // 2, std, init, gain)
    return LinearHead(features, distribution.param_dim, init, gain)


@dataclass(frozen=True, kw_only=True)
class ValueNormalizerConfig(NormalizerConfig):
    """How values are kept in units of the returns' running mean and standard deviation."""

    clip: float | None = None
    """Without `rescale`: normalised values further from 0 than this are cut off; null for none."""
    rescale: bool = True
    """Rescale the critic's last layer whenever the statistics move, so that no prediction moves with them (PopArt)."""
    of: Literal["returns", "values_and_returns"] = "returns"
    """What the statistics are of. With the second, as in rl_games, the critic's values are counted first and
    normalised, then the returns, each by the statistics of that moment."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, and a clip that rescaling would move."""
        super().__post_init__()
        if self.rescale and self.clip is not None:
            raise UserError(f"value_normalizer: clip={self.clip} cuts values off that rescale=true is to keep; use one")


class ValueHead(nn.Module):
    """Features `[..., F]` to normalised values `[...]`, with the statistics that give them back their units."""

    def __init__(self, features: int, init: Init, gain: float, normalizer: ValueNormalizerConfig | None) -> None:
        super().__init__()
        self.linear = init_layer(Linear(features, 1), init, gain)
        self.normalizer = IdentityNormalizer() if normalizer is None else normalizer.build()
        self.rescales = normalizer is not None and normalizer.rescale
        self.counts_values = normalizer is not None and normalizer.of == "values_and_returns"

    def forward(self, features: Tensor) -> Tensor:
        """Value in normalised units, as the loss sees it."""
        return self.linear(features).squeeze(-1)

    @torch.no_grad()
    def update_and_normalize(self, value: Tensor, return_: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Move the statistics to include a rollout; gives its values and returns `[T, N]` in normalised units."""
        if self.counts_values:
            self.update_statistics(value, valid)
            value = self.normalizer(value)
            self.update_statistics(return_, valid)
            return value, self.normalizer(return_)
        self.update_statistics(return_, valid)
        return self.normalizer(value), self.normalizer(return_)

    @torch.no_grad()
    def update_statistics(self, x: Tensor, valid: Tensor) -> None:
        """Move the statistics to include these numbers; if wanted, rescale the layer so that no prediction moves."""
        if isinstance(self.normalizer, IdentityNormalizer) or not self.rescales:
            return self.normalizer.update(x, valid)
        old_scale, old_shift = self.normalizer.scale.clone(), self.normalizer.shift.clone()
        self.normalizer.update(x, valid)
        scale, shift = self.normalizer.scale, self.normalizer.shift
        weight, bias = self.linear.weight, cast(Tensor, self.linear.bias)
        weight.mul_(old_scale / scale)
        bias.copy_((bias * old_scale + old_shift - shift) / scale)

    @torch.no_grad()
    def shift_(self, amount: Tensor) -> None:
        """Move every value by a 0-d `amount` in the units of the reward."""
        scale = 1.0 if isinstance(self.normalizer, IdentityNormalizer) else self.normalizer.scale
        cast(Tensor, self.linear.bias).add_(amount / scale)

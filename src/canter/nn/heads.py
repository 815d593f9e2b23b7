"""Output layers (heads): features to distribution parameters, features to values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from canter.core.registry import UserError
from canter.functional.densities import StdForm, gaussian_params, to_log_std
from canter.nn.distributions import DiagGaussian, Distribution, TanhGaussian, mask_logits
from canter.nn.mlp import Init, Linear, init_layer
from canter.nn.normalizer import IdentityNormalizer, NormalizerConfig

BOUNDED: tuple[StdForm, ...] = ("bounded", "tanh")
"""Parameterisations with bounds."""


@dataclass(frozen=True, kw_only=True)
class StdConfig:
    """Standard deviation of a Gaussian policy."""

    kind: Literal["parameter", "network"] = "parameter"
    """One learned parameter per action component, or an output of the network (state-dependent)."""
    form: StdForm = "bounded"
    """Parameterisation. bounded: log-std between `minimum` and `maximum`; tanh: the same by a tanh,
    as in rl_games' SAC; log: log-std; scalar: the standard deviation itself (at least 1e-6);
    softplus: its value before a softplus; linear: with a `floor`, the standard deviation itself
    where it is well above the floor, as in rl_games."""
    initial: float = 1.0
    """Standard deviation at the start."""
    minimum: float = 0.01
    """Lower bound of bounded and tanh, approached but never reached."""
    maximum: float = 10.0
    """Upper bound of bounded and tanh, approached but never reached."""
    floor: float = 0.0
    """Constant added to the standard deviation; `initial` includes it."""
    learn: bool = True
    """Train the standard deviation; false (only with `kind="parameter"`) keeps it at `initial`."""

    def __post_init__(self) -> None:
        """Raise UserError for bounds or a floor that exclude `initial`, or an untrained network."""
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
    """Maps a raw parameter to a log-std.

    The bounded form, `mid + half * x / sqrt(1 + x^2)` with `x = raw / half`, has slope one in the
    middle and its slope falls off only like `x^-3`, so a std near a bound still has a gradient to
    return; a clamp has none, an unbounded std crosses zero.
    """

    floor = 0.0
    """Constant added to the standard deviation."""

    def __init__(self, config: StdConfig) -> None:
        super().__init__()
        self.form: StdForm = config.form
        low = math.log(config.minimum)
        high = math.log(config.maximum)
        self.mid = (low + high) / 2
        self.half_range = (high - low) / 2
        self.initial = self.inverse(torch.tensor(config.initial, dtype=torch.float64, device="cpu")).item()

    def inverse(self, std: Tensor) -> Tensor:
        """Return the raw parameter of a standard deviation, of the same shape."""
        match self.form:
            case "log":
                return std.log()
            case "scalar":
                return std.clone()
            case "softplus" | "linear":
                return std + torch.log(-torch.expm1(-std))
        fraction = (std.log() - self.mid) / self.half_range
        if not bool((fraction.abs() < 1).all()):
            low, high = math.exp(self.mid - self.half_range), math.exp(self.mid + self.half_range)
            raise UserError(f"std.minimum, std.maximum = {low:g}, {high:g} do not hold {std.tolist()}")
        return torch.atanh(fraction) if self.form == "tanh" else self.half_range * fraction / (1 - fraction**2).sqrt()

    def forward(self, raw: Tensor) -> Tensor:
        """Return the log-std, of the same shape as `raw`."""
        return to_log_std(raw, self.mid, self.half_range, self.form)

    def params(self, mean: Tensor, raw: Tensor) -> Tensor:
        """Return cat(mean, log_std) `[..., 2A]`; `raw` is `[A]` or of the mean's shape."""
        return gaussian_params(mean, raw, self.mid, self.half_range, self.form)


class FlooredLogStd(LogStd):
    """`LogStd` plus a constant floor; a separate type, which engines without support refuse."""

    shift = 0.0

    def __init__(self, config: StdConfig) -> None:
        form = "softplus" if config.form == "linear" else config.form
        super().__init__(replace(config, form=form, initial=config.initial - config.floor, floor=0.0))
        self.form = config.form
        self.floor = config.floor
        self.shift = config.floor if config.form == "linear" else 0.0
        self.initial += self.shift

    def inverse(self, std: Tensor) -> Tensor:
        """Return the raw parameter of a standard deviation above the floor."""
        return super().inverse(std - self.floor) + self.shift

    def forward(self, raw: Tensor) -> Tensor:
        """Return the log-std, of the same shape as `raw`."""
        return torch.log(super().forward(raw - self.shift).exp() + self.floor)

    def params(self, mean: Tensor, raw: Tensor) -> Tensor:
        """Return cat(mean, log_std) `[..., 2A]`."""
        return torch.cat([mean, self(raw).expand_as(mean)], dim=-1)


class GaussianHead(nn.Module):
    """Maps features `[..., F]` to cat(mean, log_std) `[..., 2A]`."""

    raw_std: Tensor | nn.Module
    """A parameter, a buffer if it is not trained, or a layer if it depends on the observation."""

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
        """Return distribution parameters; continuous actions have no mask."""
        raw = self.raw_std if isinstance(self.raw_std, Tensor) else self.raw_std(features)
        return self.log_std.params(self.mean(features), raw)


class LinearHead(nn.Module):
    """Maps features `[..., F]` to logits or raw parameters `[..., P]`, and applies action masks."""

    def __init__(self, features: int, dim: int, init: Init, gain: float) -> None:
        super().__init__()
        self.linear = init_layer(Linear(features, dim), init, gain)

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return distribution parameters, with `mask` `[..., P]` applied if given."""
        params = self.linear(features)
        return params if mask is None else mask_logits(params, mask)


def policy_head(distribution: Distribution, features: int, std: StdConfig, init: Init, gain: float) -> nn.Module:
    """Build the output layer for `distribution`."""
    if isinstance(distribution, DiagGaussian | TanhGaussian):
        return GaussianHead(features, distribution.param_dim // 2, std, init, gain)
    return LinearHead(features, distribution.param_dim, init, gain)


class WithHeads(nn.Module):
    """Base class of networks that have their own last layers.

    Features are distribution parameters `[..., P]`, a value `[..., 1]`, or both in this order.
    """

    normalizers: nn.ModuleList
    """Normalisers of the observation groups."""


class OwnPolicyHead(nn.Module):
    """Takes distribution parameters `[..., P]` from the features of a network with its own heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the first P features, with `mask` `[..., P]` applied if given."""
        params = features[..., : self.dim]
        return params if mask is None else mask_logits(params, mask)


@dataclass(frozen=True, kw_only=True)
class ValueNormalizerConfig(NormalizerConfig):
    """Normalisation of values by the running mean and standard deviation of the returns."""

    clip: float | None = None
    """Without `rescale`: normalised values are clipped to -clip..clip; null for no clipping."""
    rescale: bool = True
    """Rescale the critic's last layer when the statistics change, so that its predictions do not
    (PopArt)."""
    of: Literal["returns", "values_and_returns"] = "returns"
    """Samples of the statistics. With values_and_returns, as in rl_games, the critic's values are
    added and normalised first, then the returns, each by the statistics of that moment."""

    def __post_init__(self) -> None:
        """Raise UserError for a value outside its range, and for `clip` together with `rescale`."""
        super().__post_init__()
        if self.rescale and self.clip is not None:
            raise UserError(
                f"value_normalizer: clip={self.clip} would change values that rescale=true preserves; use one"
            )


class ValueHead(nn.Module):
    """Maps features `[..., F]` to normalised values `[...]`, and holds the value statistics."""

    def __init__(self, features: int, init: Init, gain: float, normalizer: ValueNormalizerConfig | None) -> None:
        super().__init__()
        self.linear = init_layer(Linear(features, 1), init, gain)
        self.normalizer = IdentityNormalizer() if normalizer is None else normalizer.build()
        self.rescales = normalizer is not None and normalizer.rescale
        self.counts_values = normalizer is not None and normalizer.of == "values_and_returns"

    def forward(self, features: Tensor) -> Tensor:
        """Return values in normalised units, as in the loss."""
        return self.linear(features).squeeze(-1)

    @torch.no_grad()
    def update_and_normalize(self, value: Tensor, return_: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Add a rollout to the statistics; return its normalised values and returns `[T, N]`."""
        if self.counts_values:
            self.update_statistics(value, valid)
            value = self.normalizer(value)
            self.update_statistics(return_, valid)
            return value, self.normalizer(return_)
        self.update_statistics(return_, valid)
        return self.normalizer(value), self.normalizer(return_)

    @torch.no_grad()
    def update_statistics(self, x: Tensor, valid: Tensor) -> None:
        """Add `x` to the statistics; with `rescale`, adapt the layer to keep all predictions."""
        if isinstance(self.normalizer, IdentityNormalizer) or not self.rescales:
            return self.normalizer.update(x, valid)
        old_scale = self.normalizer.scale.clone()
        old_shift = self.normalizer.shift.clone()
        self.normalizer.update(x, valid)
        scale = self.normalizer.scale
        shift = self.normalizer.shift
        weight = self.linear.weight
        bias = cast(Tensor, self.linear.bias)
        weight.mul_(old_scale / scale)
        bias.copy_((bias * old_scale + old_shift - shift) / scale)

    @torch.no_grad()
    def shift_(self, amount: Tensor) -> None:
        """Add a 0-d `amount`, in the units of the reward, to every value."""
        scale = 1.0 if isinstance(self.normalizer, IdentityNormalizer) else self.normalizer.scale
        cast(Tensor, self.linear.bias).add_(amount / scale)


class OwnValueHead(ValueHead):
    """Takes the value from the last feature of a network with its own heads."""

    def __init__(self, normalizer: ValueNormalizerConfig | None) -> None:
        if normalizer is not None and normalizer.rescale:
            raise UserError("value_normalizer.rescale=true needs a last layer of Canter's; set it to false")
        super().__init__(1, "default", 1.0, normalizer)
        self.linear = nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """Return values in normalised units, as in the loss."""
        return features[..., -1]

    @torch.no_grad()
    def shift_(self, amount: Tensor) -> None:
        """Raise UserError: there is no bias to shift."""
        raise UserError("objective=average shifts a last layer of Canter's; this network has its own")

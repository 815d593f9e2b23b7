"""Normalisation by running mean and standard deviation; only `update` changes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from canter.core.plain import check_range
from canter.functional.returns import discounted_return
from canter.functional.statistics import moments, standardize, update_moments_


@dataclass(frozen=True, kw_only=True)
class NormalizerConfig:
    """Epsilon, clipping and prior of a running normaliser."""

    eps: float = 1e-8
    """Added to avoid division by zero."""
    eps_on: Literal["variance", "std"] = "variance"
    """Quantity that `eps` is added to: the variance (before the root) or the standard deviation."""
    clip: float | None = 10.0
    """Normalised values are clipped to -clip..clip; null for no clipping."""
    prior_count: float = 0.0
    """Number of imaginary samples of mean 0 and variance 1 that the statistics start with."""
    variance: Literal["population", "sample"] = "population"
    """Variance of each batch that is added: its squares divided by n, or by n - 1 as in rl_games up
    to 1.6.1."""

    def __post_init__(self) -> None:
        """Raise UserError for a value outside its range."""
        check_range(self, "must be finite and not negative", "eps", "prior_count")
        check_range(self, "must be above 0", "clip")

    def build(self, shape: tuple[int, ...] = ()) -> Normalizer:
        """Build a normaliser for tensors of this trailing shape."""
        return Normalizer(shape, self.clip, self.eps, self.eps_on == "std", self.prior_count, self.variance == "sample")


class Normalizer(nn.Module):
    """Normalises tensors of trailing `shape` by the moments of all samples passed to `update`.

    Moments are float64, as float32 would stop changing after some million samples. `forward` and
    `inverse` are pure; only `update` changes buffers, in place. `clip` bounds the output of
    `forward` and the input of `inverse`.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        clip: float | None = None,
        eps: float = 1e-8,
        eps_on_std: bool = False,
        prior_count: float = 0.0,
        unbiased: bool = False,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.eps = eps
        self.eps_on_std = eps_on_std
        self.unbiased = unbiased
        self.count = nn.Buffer(torch.tensor(prior_count, dtype=torch.float64))
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.m2 = nn.Buffer(torch.full(shape, prior_count, dtype=torch.float64))
        # float32 copies for the hot path.
        scale = 1.0 + eps if eps_on_std else math.sqrt(1.0 + eps)
        self.shift = nn.Buffer(torch.zeros(shape))
        self.scale = nn.Buffer(torch.full(shape, scale))
        self.inverse_scale = nn.Buffer(torch.full(shape, 1.0 / scale))

    def forward(self, x: Tensor) -> Tensor:
        """Return `(x - mean) / std`, clipped; before the first update mean and std are 0 and 1."""
        return standardize(x, self.shift, self.inverse_scale, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """Return `x * std + mean` of the clipped `x`."""
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        return x * self.scale + self.shift

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the samples of `x` `[..., *shape]` where `mask` `[...]` is True, of all ranks."""
        running = (self.count, self.mean, self.m2)
        derived = (self.shift, self.scale, self.inverse_scale)
        count, mean, m2 = moments(x, mask)
        if self.unbiased:
            m2 = m2 * count / (count - 1.0).clamp(min=1.0)
        update_moments_(running, (count, mean, m2), derived, self.eps, self.eps_on_std)


class IdentityNormalizer(nn.Module):
    """A normaliser that changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def inverse(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Do nothing."""


AnyNormalizer = Normalizer | IdentityNormalizer


def add_returns_(
    statistics: Normalizer, running: Tensor, reward: Tensor, done: Tensor, valid: Tensor, gamma: float | Tensor
) -> Tensor:
    """Add the discounted returns so far, at each step of rewards `[T, N]`, to the statistics; return them.

    `running` `[N]` are the returns before the first step, and are overwritten by those after the last.
    """
    returns, after = discounted_return(reward.double(), done, valid, running, gamma)
    running.copy_(torch.where(torch.isfinite(after), after, 0.0))
    statistics.update(returns, valid)
    return returns

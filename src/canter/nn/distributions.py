"""Action distributions: stateless functions of one flat parameter tensor.

A is the number of action components, P the number of parameters; `...` stands for any leading axes. Parameters come
from a network as `[..., P]` and are stored with the action, so that a later policy can be compared with the one that
acted. The stored action is always what was drawn; `to_env` gives what the environment receives. Log-probabilities,
entropies and divergences are sums over the action components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from canter.core.registry import UserError
from canter.functional import densities

BOUNDS = ("rescale", "clip", "none")
"""What a Gaussian sample becomes on its way to a bounded environment, see `DiagGaussian`."""


class Distribution(Protocol):
    """A family of action distributions. Nothing here asks the host, so that all of it can be captured in a graph."""

    @property
    def param_dim(self) -> int:
        """P, the number of parameters."""
        ...

    def sample(self, params: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw an action for every row of `params`."""
        ...

    def mode(self, params: Tensor) -> Tensor:
        """The action of a deterministic policy, in the form of a sample."""
        ...

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density (or log-probability) of a stored action, `[...]`."""
        ...

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy, `[...]`."""
        ...

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Exact KL(p || q) of two parameter tensors, `[...]`; exactly 0 where they are equal."""
        ...

    def to_env(self, action: Tensor) -> Tensor:
        """What the environment receives for a stored action."""
        ...

    def std(self, params: Tensor) -> Tensor | None:
        """Standard deviation of each component of the stored action `[..., A]`, for logs; None for choices."""
        ...


def _halves(params: Tensor) -> tuple[Tensor, Tensor]:
    first, second = params.chunk(2, -1)
    return first, second


Floats = tuple[float, ...]
_CONSTANTS: dict[tuple[Floats, torch.dtype, torch.device], Tensor] = {}


def _constant(values: Floats, like: Tensor) -> Tensor:
    """`values` as a tensor of the dtype and device of `like`, copied to the device only once.

    A copy from the host in every call would stall the device and could not be captured in a graph.
    """
    key = (values, like.dtype, like.device)
    if key in _CONSTANTS:
        return _CONSTANTS[key]
    if torch.compiler.is_compiling():  # a traced tensor is no value to keep
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    with torch.inference_mode(False):  # autograd would refuse an inference tensor later
        return _CONSTANTS.setdefault(key, torch.tensor(values, dtype=like.dtype, device=like.device))


@cache
def interval(low: Floats, high: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Scale, centre, minimum and maximum that map -1..1 to low..high in components with two finite bounds.

    The other components are only kept within the bound that they have, if any.
    """
    rows = [
        (0.5 * (hi - lo), 0.5 * (hi + lo), lo, hi) if math.isfinite(hi - lo) else (1.0, 0.0, lo, hi)
        for lo, hi in zip(low, high, strict=True)
    ]
    scale, centre, minimum, maximum = zip(*rows, strict=True)
    return scale, centre, minimum, maximum


def _to_interval(x: Tensor, low: Floats, high: Floats) -> Tensor:
    """Map -1..1 to low..high in components with two finite bounds, and keep all within the bounds they have."""
    scale, centre, minimum, maximum = (_constant(column, x) for column in interval(low, high))
    # Clipped last, not first: rounding must not leave the bounds, which some environments check.
    return (x * scale + centre).clamp(minimum, maximum)


def _check_intervals(kind: str, low: Floats, high: Floats) -> None:
    for index, (lo, hi) in enumerate(zip(low, high, strict=True)):
        if not (math.isfinite(hi - lo) and lo < hi):
            raise UserError(
                f"{kind} needs finite bounds low < high, but action component {index} has low={lo}, high={hi}; "
                "use kind='gaussian', or an environment with finite bounds for this component"
            )


@dataclass(frozen=True)
class DiagGaussian:
    """Independent normal components; params = cat(mean, log_std) `[..., 2A]`, action `[..., A]` unbounded.

    `bounds` says how `to_env` meets the environment's `low` and `high` (None: unbounded): "rescale" maps -1..1 to
    low..high in components with two finite bounds and clips to all bounds, "clip" only clips, "none" does nothing.
    Log-probability, entropy and divergence are always those of the raw sample.
    """

    dim: int
    low: Floats | None = None
    high: Floats | None = None
    bounds: str = "rescale"

    def __post_init__(self) -> None:
        if self.bounds not in BOUNDS:
            raise UserError(f"bounds={self.bounds!r} is unknown; use one of {', '.join(BOUNDS)}")
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and len(bound) != self.dim:
                raise UserError(f"{name} has {len(bound)} components, but dim={self.dim}; give one per component")

    @property
    def param_dim(self) -> int:
        """2A."""
        return 2 * self.dim

    def sample(self, params: Tensor, generator: Generator | None = None) -> Tensor:
        """`mean + exp(log_std) * randn`, `[..., A]`."""
        return densities.gaussian_sample(*_halves(params), generator)

    def mode(self, params: Tensor) -> Tensor:
        """The mean."""
        return params[..., : self.dim]

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density of the raw sample."""
        return densities.diag_gaussian_log_prob(params, action)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy of the raw sample."""
        return densities.gaussian_entropy(params[..., self.dim :]).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Exact KL(p || q)."""
        return densities.gaussian_kl(*_halves(p), *_halves(q)).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        """The sample, rescaled and clipped as `bounds` says."""
        scale, centre, low, high = self.interval()
        if self.bounds == "rescale":
            action = action * _constant(scale, action) + _constant(centre, action)
        return action if self.bounds == "none" else action.clamp(_constant(low, action), _constant(high, action))

    def interval(self) -> tuple[Floats, Floats, Floats, Floats]:
        """What `to_env` multiplies by, adds, and keeps within."""
        low = (-math.inf,) * self.dim if self.low is None else self.low
        high = (math.inf,) * self.dim if self.high is None else self.high
        if self.bounds == "rescale":
            return interval(low, high)
        one, zero = (1.0,) * self.dim, (0.0,) * self.dim
        if self.bounds == "clip":
            return one, zero, low, high
        return one, zero, (-math.inf,) * self.dim, (math.inf,) * self.dim

    def std(self, params: Tensor) -> Tensor:
        """Standard deviation of the raw sample."""
        return torch.exp(params[..., self.dim :])


@dataclass(frozen=True)
class TanhGaussian:
    """Normal components squashed into low..high; params = cat(mean, log_std) `[..., 2A]`.

    The stored action `[..., A]` is the value before squashing, which cannot be recovered from a saturated result;
    log-probability and entropy are those of the action that the environment receives.
    """

    low: Floats
    high: Floats

    def __post_init__(self) -> None:
        _check_intervals("tanh_gaussian", self.low, self.high)

    @property
    def param_dim(self) -> int:
        """2A."""
        return 2 * len(self.low)

    def sample(self, params: Tensor, generator: Generator | None = None) -> Tensor:
        """`mean + exp(log_std) * randn`, before squashing."""
        return densities.gaussian_sample(*_halves(params), generator)

    def mode(self, params: Tensor) -> Tensor:
        """The mean before squashing, which is the median of the environment's action."""
        return _halves(params)[0]

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density of the environment's action."""
        log_prob = densities.gaussian_log_prob(*_halves(params), action) - densities.log_squash_slope(action)
        return log_prob.sum(-1) - densities.log_volume(self.low, self.high)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy of the environment's action, by quadrature with 25 nodes: deterministic and differentiable.

        The error per component is below 2e-5 for std up to 1 and below 2e-4 up to 3, whatever the mean.
        """
        mean, log_std = _halves(params)
        u = mean.unsqueeze(-1) + torch.exp(log_std).unsqueeze(-1) * _constant(densities.NORMAL_NODES, params)
        log_slope = (densities.log_squash_slope(u) * _constant(densities.NORMAL_WEIGHTS, params)).sum(-1)
        return (densities.gaussian_entropy(log_std) + log_slope).sum(-1) + densities.log_volume(self.low, self.high)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Exact KL(p || q); squashing both alike does not change it."""
        return densities.gaussian_kl(*_halves(p), *_halves(q)).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        """`tanh(action)` mapped to low..high."""
        return _to_interval(torch.tanh(action), self.low, self.high)

    def std(self, params: Tensor) -> Tensor:
        """Standard deviation before squashing."""
        return torch.exp(_halves(params)[1])


def _concentrations(params: Tensor) -> tuple[Tensor, Tensor]:
    # float64: differences of log-gammas of large arguments have no correct digits left in float32.
    return _halves(1.0 + F.softplus(params.double()))


@dataclass(frozen=True)
class Beta:
    """Independent beta components over low..high; params = cat(raw_alpha, raw_beta) `[..., 2A]`.

    alpha = 1 + softplus(raw_alpha), and beta alike, so that the density has one peak and stays finite. The stored
    action `[..., A]` is a share in 1e-6..1-1e-6; log-probability and entropy are those of the environment's action.
    """

    low: Floats
    high: Floats

    def __post_init__(self) -> None:
        _check_intervals("beta", self.low, self.high)

    @property
    def param_dim(self) -> int:
        """2A."""
        return 2 * len(self.low)

    def sample(self, params: Tensor, generator: Generator | None = None) -> Tensor:
        """A beta variate."""
        alpha, beta = _halves(1.0 + F.softplus(params))
        return densities.beta_sample(alpha, beta, generator).clamp(1e-6, 1.0 - 1e-6)

    def mode(self, params: Tensor) -> Tensor:
        """The peak of the density, `(alpha - 1) / (alpha + beta - 2)`; the centre where the density is flat."""
        above_a, above_b = _halves(F.softplus(params))  # alpha - 1 and beta - 1
        total = above_a + above_b
        return torch.where(total > 0, above_a / torch.where(total > 0, total, 1.0), 0.5).clamp(1e-6, 1.0 - 1e-6)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-density of the environment's action."""
        log_prob = densities.beta_log_prob(*_concentrations(params), action.double()).sum(-1)
        return (log_prob - densities.log_volume(self.low, self.high)).to(params.dtype)

    def entropy(self, params: Tensor) -> Tensor:
        """Exact entropy of the environment's action."""
        entropy = densities.beta_entropy(*_concentrations(params)).sum(-1)
        return (entropy + densities.log_volume(self.low, self.high)).to(params.dtype)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Exact KL(p || q)."""
        return densities.beta_kl(*_concentrations(p), *_concentrations(q)).sum(-1).to(p.dtype)

    def to_env(self, action: Tensor) -> Tensor:
        """The share in 0..1 mapped to low..high."""
        return _to_interval(2.0 * action - 1.0, self.low, self.high)

    def std(self, params: Tensor) -> Tensor:
        """Standard deviation of the share."""
        alpha, beta = _halves(1.0 + F.softplus(params))
        return (alpha * beta / (alpha + beta + 1.0)).sqrt() / (alpha + beta)


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits of a distribution that never takes the actions where `mask` (of the same shape) is False.

    The filling is large but finite, so that 0 * log 0 is 0 and not NaN; its probability is exactly 0 and no gradient
    reaches a masked logit. Every choice needs one allowed action at least: with none, all are equally likely.
    """
    return torch.where(mask, logits, max(-1e8, 0.5 * torch.finfo(logits.dtype).min))


@dataclass(frozen=True)
class Categorical:
    """One choice among `n`; params = logits `[..., n]`, action int64 `[...]`."""

    n: int

    @property
    def param_dim(self) -> int:
        """The number of choices."""
        return self.n

    def sample(self, params: Tensor, generator: Generator | None = None) -> Tensor:
        """`argmax(logits - log(-log(u)))` with u uniform in the open interval 0..1."""
        return densities.gumbel(params, generator).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest choice."""
        return params.argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability of the choice."""
        return F.log_softmax(params, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats."""
        return densities.choice_entropy(F.log_softmax(params, -1))

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Exact KL(p || q)."""
        return densities.choice_kl(F.log_softmax(p, -1), F.log_softmax(q, -1))

    def to_env(self, action: Tensor) -> Tensor:
        """The choice itself."""
        return action

    def std(self, params: Tensor) -> None:
        """None: choices have no spread."""


@dataclass(frozen=True)
class MultiCategorical:
    """K independent choices; params = the logits of all heads `[..., sum(nvec)]`, action int64 `[..., K]`."""

    nvec: tuple[int, ...]

    @property
    def param_dim(self) -> int:
        """The number of choices of all heads."""
        return sum(self.nvec)

    def _log_softmax(self, params: Tensor) -> Tensor:
        """Log-probabilities of all heads `[..., sum(nvec)]`; sums over them are sums over heads."""
        return torch.cat([F.log_softmax(logits, -1) for logits in params.split(self.nvec, -1)], -1)

    def sample(self, params: Tensor, generator: Generator | None = None) -> Tensor:
        """`argmax(logits - log(-log(u)))` of each head, with u uniform in the open interval 0..1."""
        return self.mode(densities.gumbel(params, generator))

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest choice of each head."""
        return torch.stack([logits.argmax(-1) for logits in params.split(self.nvec, -1)], -1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability of all choices together."""
        heads = self._log_softmax(params).split(self.nvec, -1)
        chosen = [log_prob.gather(-1, action[..., k : k + 1]) for k, log_prob in enumerate(heads)]
        return torch.cat(chosen, -1).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats."""
        return densities.choice_entropy(self._log_softmax(params))

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Exact KL(p || q)."""
        return densities.choice_kl(self._log_softmax(p), self._log_softmax(q))

    def to_env(self, action: Tensor) -> Tensor:
        """The choices themselves."""
        return action

    def std(self, params: Tensor) -> None:
        """None: choices have no spread."""

"""Samples, log-densities, entropies and divergences of families, elementwise unless stated.

`canter.nn.distributions` builds action distributions from them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from canter.core import distributed
from canter.core.dispatch import has_kernels
from canter.core.seeding import draw_for_rank

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
StdForm = Literal["bounded", "tanh", "log", "scalar", "softplus", "linear"]
"""Parameterisations of a standard deviation, see `to_log_std`."""
MIN_STD = 1e-6
"""Lower bound of a standard deviation that is itself the parameter (`scalar`)."""

# Trapezoidal rule: on smooth integrands it converges faster than Gauss-Hermite, which needs more
# than twice the nodes for the expectation of `log_squash_slope` at a standard deviation of 3.
NORMAL_NODES = tuple(4.5 * (index - 12) / 12 for index in range(25))
"""Quadrature nodes of an expectation under the standard normal."""
_DENSITY = tuple(math.exp(-0.5 * node * node) for node in NORMAL_NODES)
NORMAL_WEIGHTS = tuple(density / sum(_DENSITY) for density in _DENSITY)
"""Weights of the nodes; they sum to 1."""


def log_volume(low: tuple[float, ...], high: tuple[float, ...]) -> float:
    """Return the log-volume of the box low..high: the log-Jacobian of scaling a unit cube to it."""
    return sum(math.log(hi - lo) for lo, hi in zip(low, high, strict=True))


def gaussian_sample(mean: Tensor, log_std: Tensor, generator: Generator | None) -> Tensor:
    """Return `mean + exp(log_std) * randn`."""
    noise = draw_for_rank(torch.randn, mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    return mean + torch.exp(log_std) * noise


def gaussian_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """Return the log-density of a normal distribution."""
    z = (x - mean) * torch.exp(-log_std)
    return -0.5 * z.square() - log_std - HALF_LOG_2PI


@has_kernels
def diag_gaussian_log_prob(params: Tensor, x: Tensor) -> Tensor:
    """Return the log-density `[...]` of `x` `[..., A]`; params = cat(mean, log_std) `[..., 2A]`."""
    mean, log_std = params.chunk(2, -1)
    return gaussian_log_prob(mean, log_std, x).sum(-1)


def to_log_std(raw: Tensor, mid: float, half: float, form: StdForm) -> Tensor:
    """Return the log-std of raw parameters; `mid` and `half` describe the bounds, if any."""
    match form:
        case "bounded":  # slope 1 in the middle, never reaches its bounds
            x = raw / half
            return mid + half * x * torch.rsqrt(1 + x * x)
        case "tanh":
            return mid + half * torch.tanh(raw)
        case "log":
            return raw
        case "scalar":
            return torch.log(raw.clamp(min=MIN_STD))
        case "softplus" | "linear":
            return torch.log(F.softplus(raw))


@has_kernels
def gaussian_params(mean: Tensor, raw: Tensor, mid: float, half: float, form: StdForm = "bounded") -> Tensor:
    """Return `cat(mean, log_std)` `[..., 2A]`; `raw` is `[A]` or of the mean's shape `[..., A]`."""
    return torch.cat([mean, to_log_std(raw, mid, half, form).expand_as(mean)], dim=-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Return the entropy of a normal distribution."""
    return log_std + (HALF_LOG_2PI + 0.5)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """Return KL(p || q) of two normal distributions."""
    log_ratio = log_std_p - log_std_q
    shift = (mean_p - mean_q) * torch.exp(-log_std_q)
    # expm1 keeps the second-order difference that is left when the two are close.
    return 0.5 * torch.expm1(2.0 * log_ratio) - log_ratio + 0.5 * shift.square()


def log_squash_slope(u: Tensor) -> Tensor:
    """Return the log-derivative of (tanh(u) + 1) / 2, i.e. log((1 - tanh(u)**2) / 2).

    The form is stable for large |u|.
    """
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u)) - math.log(2.0)


def beta_sample(alpha: Tensor, beta: Tensor, generator: Generator | None) -> Tensor:
    """Return a beta variate in 0..1, the ratio of one of two gamma variates to their sum."""
    # The random numbers that a variate consumes depend on its parameters. Every rank draws for all
    # ranks, so that the streams stay equal and the samples independent.
    ranks = distributed.world_size()
    concentration = torch.stack([alpha, beta]).repeat(1, ranks, *[1] * (alpha.ndim - 1))
    # Private, but the only gamma sampler that takes a generator.
    gamma = torch._standard_gamma(concentration, generator=generator)  # pyright: ignore[reportPrivateImportUsage]
    gamma = gamma[:, distributed.rank_slice(len(alpha))]
    return gamma[0] / gamma.sum(0)


def _log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
    return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)


def beta_log_prob(alpha: Tensor, beta: Tensor, x: Tensor) -> Tensor:
    """Return the log-density of a beta distribution at x in 0..1."""
    return (alpha - 1.0) * torch.log(x) + (beta - 1.0) * torch.log1p(-x) - _log_beta(alpha, beta)


def beta_entropy(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the entropy of a beta distribution."""
    log_total = torch.digamma(alpha + beta)
    from_alpha = (alpha - 1.0) * (log_total - torch.digamma(alpha))
    from_beta = (beta - 1.0) * (log_total - torch.digamma(beta))
    return _log_beta(alpha, beta) + from_alpha + from_beta


def beta_kl(alpha_p: Tensor, beta_p: Tensor, alpha_q: Tensor, beta_q: Tensor) -> Tensor:
    """Return KL(p || q) of two beta distributions."""
    log_total = torch.digamma(alpha_p + beta_p)
    from_alpha = (alpha_p - alpha_q) * (torch.digamma(alpha_p) - log_total)
    from_beta = (beta_p - beta_q) * (torch.digamma(beta_p) - log_total)
    return _log_beta(alpha_q, beta_q) - _log_beta(alpha_p, beta_p) + from_alpha + from_beta


def gumbel(logits: Tensor, generator: Generator | None) -> Tensor:
    """Return logits plus standard Gumbel noise, `logits - log(-log(u))`; the argmax is a sample."""
    uniform = draw_for_rank(torch.rand, logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
    # Into the open interval, from the smallest normal number to the largest below 1: at 1 the noise
    # would be infinite and lift even a masked action above the others, at 0 it would exclude an
    # allowed one.
    info = torch.finfo(logits.dtype)
    uniform = uniform.clamp(info.tiny, 1.0 - 0.5 * info.eps)
    return logits - torch.log(-torch.log(uniform))


def categorical_entropy(log_prob: Tensor) -> Tensor:
    """Return the entropy in nats, from log-probabilities on the last axis."""
    return -(log_prob.exp() * log_prob).sum(-1)


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) of categorical distributions, from log-probabilities on the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)

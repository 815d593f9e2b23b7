"""Terms of PPO's loss that depend on the action distribution, differentiated by hand.

M samples, A columns of the network: means of a Gaussian, squashed by tanh or not, or logits. Old
log-probabilities are computed again from the old parameters, in the same way as the new ones, so
that the first ratio is exactly 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.engines.base import PPOLoss
from canter.engines.triton.kernels.gaussian_params import _log_prob
from canter.functional.densities import NORMAL_NODES, NORMAL_WEIGHTS, log_volume
from canter.nn.distributions import Categorical, DiagGaussian, Distribution, MultiCategorical, TanhGaussian

STEP: tl.constexpr = tl.constexpr(NORMAL_NODES[-1] - NORMAL_NODES[-2])
"""Distance of the nodes at which the entropy of a squashed Gaussian is evaluated."""
PEAK: tl.constexpr = tl.constexpr(max(NORMAL_WEIGHTS))
"""Weight of the node at the mean."""
MAX_CHOICES = 32
"""Discrete actions of one step, each of which is a part of the kernel's code."""
BOUND_FORMS = ("none", "soft", "regularisation")
"""Forms of the bound loss by their numbers in kernels."""


@dataclass(frozen=True)
class Policy:
    """An action distribution as the kernels read it."""

    columns: int
    """A, the means or logits."""
    nvec: tuple[int, ...] = ()
    """Numbers of values of the discrete actions of one step; () for a Gaussian."""
    squashed: bool = False
    log_volume: float = 0.0
    """Logarithm of the volume of the box of squashed actions."""

    @property
    def constants(self) -> dict[str, Any]:
        """Return what kernels are compiled for."""
        return {"A": self.columns, "NVEC": self.nvec, "NODES": len(NORMAL_NODES) if self.squashed else 0}


def policy_of(distribution: Distribution) -> Policy:
    """Return the kernels' description of a distribution."""
    match distribution:
        case DiagGaussian(dim=dim):
            return Policy(dim)
        case TanhGaussian(low=low, high=high):
            return Policy(len(low), squashed=True, log_volume=log_volume(low, high))
        case Categorical(n=n):
            return Policy(n, (n,))
        case MultiCategorical(nvec=nvec):
            return Policy(sum(nvec), tuple(nvec))
    raise TypeError(f"no kernel knows {type(distribution).__name__}")


class Bound(NamedTuple):
    """A bound loss as the kernels read it."""

    form: int
    coef: float
    limit: float
    units: Tensor
    """`[2, A]` centre and half width of each component; any tensor without a bound loss."""


def bound_of(loss: PPOLoss, dim: int, device: torch.device) -> Bound:
    """Return the bound loss of a description; a loss without one has form 0 and coefficient 0."""
    if loss.bound is None:
        return Bound(0, 0.0, 0.0, torch.empty(0, device=device))
    config = loss.bound.config
    columns = (loss.bound.centre, loss.bound.half)
    units = torch.stack([column.to(device).expand(dim) for column in columns])
    return Bound(BOUND_FORMS.index(config.form), config.coef, config.limit, units)


@triton.jit
def _surrogate(log_prob, old_log_prob, advantage, clip_ratio):
    """Return clipped surrogate, derivative by `log_prob`, and 1 where the ratio was clipped."""
    ratio = tl.exp(log_prob - old_log_prob)
    free = -advantage * ratio
    held = -advantage * tl.minimum(tl.maximum(ratio, 1.0 - clip_ratio), 1.0 + clip_ratio)
    # The clipped branch has no gradient where it is the larger one.
    return (
        tl.maximum(free, held),
        tl.where(free >= held, free, 0.0),
        tl.where(tl.abs(ratio - 1.0) > clip_ratio, 1.0, 0.0),
    )


@triton.jit
def _bound_error(mean, both, parts, units_ptr, limit, A, BOUND: tl.constexpr):
    """Return the bound loss of means and its derivative by each.

    `units` `[2, A]` are centre and half width.
    """
    if BOUND == 0:
        return tl.sum(tl.zeros_like(mean), 1), tl.zeros_like(mean)
    else:
        centre = tl.load(units_ptr + parts, mask=parts < A, other=0.0)[None, :]
        half = tl.load(units_ptr + A + parts, mask=parts < A, other=1.0)[None, :]
        x = (mean - centre) / half
        beyond = x
        if BOUND == 1:
            beyond = tl.where(x > limit, x - limit, tl.where(x < -limit, x + limit, 0.0))
            beyond = tl.where(x != x, x, beyond)
        beyond = tl.where(both, beyond, 0.0)
        return tl.sum(beyond * beyond, 1), 2.0 * beyond / half


@triton.jit
def _gaussian_terms(mean, log_std, action, old_mean, old_log_std, both, log_volume, NODES: tl.constexpr):
    """Return new and old log-probability, entropy and KL, and derivatives by mean and log-std.

    Those of the log-probability come first, those of the entropy last. A squashed action changes
    both log-probabilities by the same number, which is left out.
    """
    precision = tl.exp(-log_std)
    z = (action - mean) * precision
    # 0.9189... is half the logarithm of two pi; a kernel sees no constants of its module.
    entropy = log_std + (0.9189385332046727 + 0.5)
    d_mean = tl.zeros_like(mean)
    d_log_std = tl.full(mean.shape, 1.0, tl.float32)
    if NODES > 0:
        std = tl.exp(log_std)
        for k in range(NODES):
            node = (k - NODES // 2) * STEP
            weight = PEAK * tl.exp(tl.zeros_like(mean) - 0.5 * node * node)
            u = mean + std * node
            tail = tl.exp(-2.0 * tl.abs(u))
            # Of log((1 - tanh(u)**2) / 2), whose derivative is -2 tanh(u).
            entropy += weight * (0.6931471805599453 - 2.0 * (tl.abs(u) + tl.log(1.0 + tail)))
            slope = weight * tl.where(u < 0, 2.0, -2.0) * (1.0 - tail) / (1.0 + tail)
            d_mean += slope
            d_log_std += slope * node * std
    shift = (old_mean - mean) * precision
    log_ratio = old_log_std - log_std
    kl = 0.5 * (tl.exp(2.0 * log_ratio) - 1.0) - log_ratio + 0.5 * shift * shift
    return (
        _log_prob(action, mean, log_std, both),
        _log_prob(action, old_mean, old_log_std, both),
        tl.sum(tl.where(both, entropy, 0.0), 1) + log_volume,
        tl.sum(tl.where(both, kl, 0.0), 1),
        z * precision,
        z * z - 1.0,
        d_mean,
        d_log_std,
    )


@triton.constexpr_function
def first_of(nvec: tuple[int, ...], k: int) -> int:
    """Return the first column of a discrete action."""
    return sum(nvec[:k])


@triton.jit
def _log_softmax(logits, mine):
    """Return the log-probabilities of the columns that are `mine`, and 0 elsewhere."""
    above = logits - tl.max(tl.where(mine, logits, float("-inf")), 1)[:, None]
    total = tl.sum(tl.where(mine, tl.exp(above), 0.0), 1)
    return tl.where(mine, above - tl.log(total)[:, None], 0.0)


@triton.jit
def _choice_terms(logits, old_logits, action_ptr, where, inside, parts, NVEC: tl.constexpr):
    """Return new and old log-probability, entropy and KL, and derivatives by the logits.

    That of the log-probability comes first, that of the entropy last.
    """
    d_log_prob = tl.zeros_like(logits)
    d_entropy = tl.zeros_like(logits)
    log_prob = tl.sum(d_log_prob, 1)
    old_log_prob = log_prob
    entropy = log_prob
    kl = log_prob
    for k in tl.static_range(len(NVEC)):
        place = parts[None, :] - first_of(NVEC, k)
        mine = (place >= 0) & (place < NVEC[k])
        new = _log_softmax(logits, mine)
        old = _log_softmax(old_logits, mine)
        p = tl.where(mine, tl.exp(new), 0.0)
        chosen = mine & (place == tl.load(action_ptr + where * len(NVEC) + k, mask=inside, other=0)[:, None])
        log_prob += tl.sum(tl.where(chosen, new, 0.0), 1)
        old_log_prob += tl.sum(tl.where(chosen, old, 0.0), 1)
        own = -tl.sum(p * new, 1)
        entropy += own
        kl += tl.sum(tl.where(mine, tl.exp(old), 0.0) * (old - new), 1)
        d_log_prob += tl.where(chosen, 1.0, 0.0) - p
        d_entropy -= p * (new + own[:, None])
    return log_prob, old_log_prob, entropy, kl, d_log_prob, d_entropy


@triton.jit
def _policy_terms(
    first, log_std, rows, where, M, action_ptr, old_ptr, advantage_ptr, entropy_coef_ptr, units_ptr,
    clip_ratio, log_volume, bound_coef, bound_limit, parts,
    A: tl.constexpr, NVEC: tl.constexpr, NODES: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Return surrogate, entropy, KL, clipped ratios and bound loss of a block of samples.

    Last are the loss's derivatives by `first` `[M, A]`, means or logits, and by `log_std`.
    """
    inside = rows < M
    both = inside[:, None] & (parts < A)[None, :]
    advantage = tl.load(advantage_ptr + where, mask=inside, other=0.0)
    entropy_coef = tl.load(entropy_coef_ptr)
    bound, d_bound = _bound_error(first, both, parts, units_ptr, bound_limit, A, BOUND)
    if len(NVEC) > 0:
        old = tl.load(old_ptr + where[:, None] * A + parts[None, :], mask=both, other=0.0)
        log_prob, old_log_prob, entropy, kl, d_log_prob, d_entropy = _choice_terms(
            first, old, action_ptr, where, inside, parts, NVEC
        )
        surrogate, slope, clipped = _surrogate(log_prob, old_log_prob, advantage, clip_ratio)
        d_first = slope[:, None] * d_log_prob - entropy_coef * d_entropy
        return surrogate, entropy, kl, clipped, bound, d_first, d_first
    else:
        action = tl.load(action_ptr + where[:, None] * A + parts[None, :], mask=both, other=0.0)
        old_mean = tl.load(old_ptr + where[:, None] * (2 * A) + parts[None, :], mask=both, other=0.0)
        old_log_std = tl.load(old_ptr + where[:, None] * (2 * A) + A + parts[None, :], mask=both, other=0.0)
        log_prob, old_log_prob, entropy, kl, by_mean, by_log_std, d_mean, d_log_std = _gaussian_terms(
            first, log_std, action, old_mean, old_log_std, both, log_volume, NODES
        )
        surrogate, slope, clipped = _surrogate(log_prob, old_log_prob, advantage, clip_ratio)
        d_first = slope[:, None] * by_mean + bound_coef * d_bound
        if NODES > 0:
            d_first -= entropy_coef * d_mean
        d_log_std = slope[:, None] * by_log_std - entropy_coef * d_log_std
        return surrogate, entropy, kl, clipped, bound, d_first, d_log_std

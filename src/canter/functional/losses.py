"""Loss terms of PPO and of soft actor-critic (SAC), and SAC's targets.

Losses are to be minimised and unreduced: the caller averages over the valid samples
(`canter.functional.statistics.masked_mean`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.core.dispatch import has_kernels
from canter.functional.densities import HALF_LOG_2PI

# PPO: all arguments have one shape


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """Return PPO's clipped surrogate: no gradient once the ratio has improved beyond the clip."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def smooth_clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """Return PPO's surrogate with a soft clip, `1 + c tanh((ratio - 1) / c)`.

    Its gradient fades out but never vanishes. The soft clip has value and slope 1 at ratio 1 and
    saturates at `1 ± clip_ratio`. It equals the sigmoid clamp
    `lo + (hi - lo) sigmoid(4 ((ratio - lo) / (hi - lo) - 1/2))` between lo and hi =
    `1 ± clip_ratio`.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = 1.0 + clip_ratio * torch.tanh((ratio - 1.0) / clip_ratio)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def vanilla_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """Return the policy gradient loss of A2C; `old_log_prob` and `clip_ratio` have no effect."""
    return -advantage * log_prob


Surrogate = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""`(log_prob, old_log_prob, advantage, clip_ratio) -> loss`."""

SURROGATES: dict[str, Surrogate] = {
    "clipped": clipped_surrogate,
    "smooth_clipped": smooth_clipped_surrogate,
    "vanilla": vanilla_surrogate,
}


def mse(value: Tensor, old_value: Tensor, return_: Tensor, value_clip: float) -> Tensor:
    """Return half the squared error; `old_value` and `value_clip` have no effect."""
    return 0.5 * (value - return_).square()


def clipped_mse(value: Tensor, old_value: Tensor, return_: Tensor, value_clip: float) -> Tensor:
    """Return half the larger squared error of the value and of the value clipped near the old one.

    The clip range is `value_clip`, in units of the values, so it is meaningful only for normalised
    values.
    """
    clipped = old_value + (value - old_value).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((value - return_).square(), (clipped - return_).square())


def huber(value: Tensor, old_value: Tensor, return_: Tensor, value_clip: float) -> Tensor:
    """Return the Huber loss with delta 1; `old_value` and `value_clip` have no effect."""
    return F.huber_loss(value, return_, reduction="none", delta=1.0)


ValueLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""`(value, old_value, return_, value_clip) -> loss`."""

VALUE_LOSSES: dict[str, ValueLoss] = {"mse": mse, "clipped": clipped_mse, "huber": huber}


def soft_bound(mean: Tensor, limit: float) -> Tensor:
    """Return squared distances of means `[..., A]` from -limit..limit, summed over A; 0 inside."""
    return ((mean - limit).clamp(min=0.0).square() + (mean + limit).clamp(max=0.0).square()).sum(-1)


def mean_square(mean: Tensor, limit: float) -> Tensor:
    """Return the squared means `[..., A]` summed over A; `limit` has no effect."""
    return mean.square().sum(-1)


BOUND_LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {"soft": soft_bound, "regularisation": mean_square}
"""`(mean, limit) -> loss`, for means in units in which the bounds of an action are -1 and 1."""


# SAC: B samples, A action components, E critics, K atoms of a categorical critic
#
# Actions lie in -1..1; entropies are those of an action in these units, for any bounds of the
# environment.


def squashed_sample(params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions `tanh(mean + std * noise)` `[..., A]` and their log-density `[...]`.

    `params` is cat(mean, log_std) `[..., 2A]`.
    """
    mean, log_std = params.chunk(2, -1)
    raw = mean + log_std.exp() * noise
    log_slope = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))  # log(1 - tanh(raw)^2), stable
    return torch.tanh(raw), (-0.5 * noise.square() - log_std - HALF_LOG_2PI - log_slope).sum(-1)


def entropy_of_std(std: float, dim: int) -> float:
    """Return the entropy of `dim` independent normal components with this standard deviation."""
    return dim * (math.log(std) + HALF_LOG_2PI + 0.5)


def soft_target(reward: Tensor, discount: Tensor, value: Tensor, temperature: Tensor, log_prob: Tensor) -> Tensor:
    """Return `reward + discount * (value - temperature * log_prob)`.

    `discount` is gamma^k for k-step returns, or 0 after a termination.
    """
    return reward + discount * (value - temperature * log_prob)


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return the loss `[B]` that raises the temperature while the entropy is below its target.

    The entropy is `-log_prob`.
    """
    return -log_temperature * (log_prob.detach() + target_entropy)


def policy_loss(temperature: Tensor, log_prob: Tensor, value: Tensor) -> Tensor:
    """Return the policy loss `[B]`, `temperature * log_prob - value`."""
    return temperature * log_prob - value


def least_mean_distribution(probs: Tensor, support: Tensor) -> Tensor:
    """Return for each sample the critic's distribution with the smallest mean: `[B, K]`.

    `probs` is `[E, B, K]` over `support` `[K]`.
    """
    least = (probs * support).sum(-1).argmin(0)
    return probs.gather(0, least[None, :, None].expand(1, -1, probs.shape[-1])).squeeze(0)


@has_kernels
def project_distribution(probs: Tensor, atoms: Tensor, low: float, high: float) -> Tensor:
    """Return a distribution projected to K evenly spaced atoms from `low` to `high` (C51).

    The distribution has `probs` `[B, K]` at `atoms` `[B, K]`. An atom beyond the ends moves to the
    end; any other is split between its two neighbours so that its mean is kept.
    """
    count = probs.shape[-1]
    place = ((atoms - low) * ((count - 1) / (high - low))).clamp(0, count - 1)
    below = place.floor().clamp(max=count - 2)
    share = place - below
    target = torch.zeros_like(probs).scatter_add_(-1, below.long(), probs * (1 - share))
    return target.scatter_add_(-1, below.long() + 1, probs * share)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return `-sum target log softmax(logits)` `[E, B]` for logits `[E, B, K]`, target `[B, K]`."""
    return -(target * F.log_softmax(logits, -1)).sum(-1)

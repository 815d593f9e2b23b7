"""Loss terms per sample: unreduced, all arguments of one shape, to be minimised.

The caller averages over the valid samples (`canter.functional.statistics.masked_mean`).

Losses and targets of soft actor-critic.

B rows, A action components, E critics, K atoms of a categorical critic. Actions lie in -1..1, and so entropies are
those of an action in these units, whatever the environment's bounds are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.core.dispatch import has_kernels
from canter.functional.densities import HALF_LOG_2PI


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """PPO's pessimistic surrogate: no gradient once the ratio has moved past the clip in the profitable direction."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def smooth_clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """PPO's surrogate with a soft clip, `1 + c tanh((ratio - 1) / c)`: the gradient fades out but never stops.

    The soft clip has value and slope 1 at ratio 1 and saturates at `1 ± clip_ratio`. It equals the sigmoid clamp
    `lo + (hi - lo) sigmoid(4 ((ratio - lo) / (hi - lo) - 1/2))` between lo and hi = `1 ± clip_ratio`.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = 1.0 + clip_ratio * torch.tanh((ratio - 1.0) / clip_ratio)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def vanilla_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """The policy gradient of A2C; `old_log_prob` and `clip_ratio` play no part."""
    return -advantage * log_prob


Surrogate = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""`(log_prob, old_log_prob, advantage, clip_ratio) -> loss`."""

SURROGATES: dict[str, Surrogate] = {
    "clipped": clipped_surrogate,
    "smooth_clipped": smooth_clipped_surrogate,
    "vanilla": vanilla_surrogate,
}


def mse(value: Tensor, old_value: Tensor, return_: Tensor, value_clip: float) -> Tensor:
    """Half the squared error; `old_value` and `value_clip` play no part."""
    return 0.5 * (value - return_).square()


def clipped_mse(value: Tensor, old_value: Tensor, return_: Tensor, value_clip: float) -> Tensor:
    """The larger of the half squared errors of the value and of the value held within `value_clip` of the old one.

    `value_clip` is in units of the values, so it means something only when these are normalised.
    """
    clipped = old_value + (value - old_value).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((value - return_).square(), (clipped - return_).square())


def huber(value: Tensor, old_value: Tensor, return_: Tensor, value_clip: float) -> Tensor:
    """Half the squared error up to an error of 1, linear beyond; `old_value` and `value_clip` play no part."""
    return F.huber_loss(value, return_, reduction="none", delta=1.0)


ValueLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""`(value, old_value, return_, value_clip) -> loss`."""

VALUE_LOSSES: dict[str, ValueLoss] = {"mse": mse, "clipped": clipped_mse, "huber": huber}


def soft_bound(mean: Tensor, limit: float) -> Tensor:
    """Squared distance of means `[..., A]` from -limit..limit, summed over A; no pull at all inside."""
    return ((mean - limit).clamp(min=0.0).square() + (mean + limit).clamp(max=0.0).square()).sum(-1)


def mean_square(mean: Tensor, limit: float) -> Tensor:
    """Squared means `[..., A]` summed over A, a pull towards 0 everywhere; `limit` plays no part."""
    return mean.square().sum(-1)


BOUND_LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {"soft": soft_bound, "regularisation": mean_square}
"""`(mean, limit) -> loss`, for means in units in which the bounds of an action are -1 and 1."""


def squashed_sample(params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions `tanh(mean + std * noise)` `[..., A]` and their log-density `[...]`; params = cat(mean, log_std)."""
    mean, log_std = params.chunk(2, -1)
    raw = mean + log_std.exp() * noise
    log_slope = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))  # log(1 - tanh(raw)^2), also for large ones
    return torch.tanh(raw), (-0.5 * noise.square() - log_std - HALF_LOG_2PI - log_slope).sum(-1)


def entropy_of_std(std: float, dim: int) -> float:
    """Entropy of `dim` independent normal components of this standard deviation."""
    return dim * (math.log(std) + HALF_LOG_2PI + 0.5)


def soft_target(reward: Tensor, discount: Tensor, value: Tensor, temperature: Tensor, log_prob: Tensor) -> Tensor:
    """`reward + discount * (value - temperature * log_prob)`, elementwise; `discount` is gamma^k, or 0 at the end."""
    return reward + discount * (value - temperature * log_prob)


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """`[B]`, its mean falls where the temperature rises while the entropy `-log_prob` is below its target."""
    return -log_temperature * (log_prob.detach() + target_entropy)


def policy_loss(temperature: Tensor, log_prob: Tensor, value: Tensor) -> Tensor:
    """`[B]`, `temperature * log_prob - value`."""
    return temperature * log_prob - value


def lowest(probs: Tensor, support: Tensor) -> Tensor:
    """Of distributions `[E, B, K]` over `support` `[K]`, for each row that with the smallest mean: `[B, K]`."""
    least = (probs * support).sum(-1).argmin(0)
    return probs.gather(0, least[None, :, None].expand(1, -1, probs.shape[-1])).squeeze(0)


@has_kernels
def project(probs: Tensor, atoms: Tensor, low: float, high: float) -> Tensor:
    """The distribution with `probs` `[B, K]` at `atoms` `[B, K]` moved to K evenly spaced atoms from `low` to `high`.

    An atom beyond the ends goes to the end; any other is shared by its two neighbours so that its mean is kept.
    """
    count = probs.shape[-1]
    place = ((atoms - low) * ((count - 1) / (high - low))).clamp(0, count - 1)
    below = place.floor().clamp(max=count - 2)
    share = place - below
    target = torch.zeros_like(probs).scatter_add_(-1, below.long(), probs * (1 - share))
    return target.scatter_add_(-1, below.long() + 1, probs * share)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """`-sum target log softmax(logits)` over the last axis: `[E, B]` for logits `[E, B, K]` and a target `[B, K]`."""
    return -(target * F.log_softmax(logits, -1)).sum(-1)

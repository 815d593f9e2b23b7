"""Loss terms per sample: unreduced, all arguments of one shape, to be minimised.

The caller averages over the valid samples (`canter.functional.stats.masked_mean`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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

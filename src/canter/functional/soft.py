"""Losses and targets of soft actor-critic.

B rows, A action components, E critics, K atoms of a categorical critic. Actions lie in -1..1, and so entropies are
those of an action in these units, whatever the environment's bounds are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from canter.dispatch import has_kernels
from canter.functional.densities import HALF_LOG_2PI


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

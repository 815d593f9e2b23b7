"""PPO's loss by one GPU kernel, where there is one for these settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Metrics
from canter.algorithms.phase import LossOutput
from canter.distributions import DiagGaussian, Distribution

if TYPE_CHECKING:
    from canter.algorithms.ppo import PPOBatch, PPOConfig

NAMES: tuple[str, ...] = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction")
"""What the kernel gives the means of, in its order."""


def fits(config: PPOConfig, distribution: Distribution) -> bool:
    """Whether the kernel computes the loss that these settings describe."""
    return (
        isinstance(distribution, DiagGaussian)
        and config.surrogate == "clipped"
        and config.value_loss in ("mse", "clipped")
        and config.advantage_normalization != "minibatch"
        and config.bound_loss is None
    )


def fused_loss(config: PPOConfig, batch: PPOBatch, params: Tensor, value: Tensor, entropy_coef: Tensor) -> LossOutput:
    """The same as the plain sum of terms, from parameters `[L, B, 2A]` and values `[L, B]`."""
    from canter.kernels.gaussian_loss import gaussian_loss

    count = distributed.mean_(batch.valid.sum(dtype=torch.float64)).clamp(min=1.0 / distributed.world_size())
    loss, means = gaussian_loss(
        params,
        value,
        action=batch.action,
        old_params=batch.dist_params,
        old_log_prob=batch.log_prob,
        advantage=batch.advantage,
        old_value=batch.value,
        return_=batch.return_,
        valid=batch.valid,
        count=count.float(),
        clip_ratio=config.clip_ratio,
        value_clip=config.value_clip if config.value_loss == "clipped" else None,
        value_coef=config.value_coef,
        entropy_coef=entropy_coef,
    )
    metrics: Metrics = dict(zip(NAMES, means.unbind(), strict=True))
    return LossOutput(loss, metrics["policy/kl"], metrics)

"""PPO's loss by one function with gradients of its own, where there is one for these settings and this device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Metrics
from canter.algorithms.phase import LossOutput
from canter.distributions import Categorical, DiagGaussian, Distribution
from canter.kernels import host_losses
from canter.nn.by_hand import HandModel

if TYPE_CHECKING:
    from canter.algorithms.ppo import PPOBatch, PPOConfig

NAMES: tuple[str, ...] = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction")
"""What the functions give the means of, in their order."""

FAMILIES = {DiagGaussian: host_losses.gaussian, Categorical: host_losses.categorical}
"""Distributions that are differentiated by hand on a CPU."""


def fits(config: PPOConfig, distribution: Distribution, device: torch.device) -> bool:
    """Whether there is a function for the loss that these settings describe."""
    return (
        type(distribution) in (FAMILIES if device.type == "cpu" else (DiagGaussian,))
        and config.surrogate == "clipped"
        and config.value_loss in ("mse", "clipped")
        and config.advantage_normalization != "minibatch"
        and config.bound_loss is None
    )


def _arguments(config: PPOConfig, batch: PPOBatch, count: Tensor, entropy_coef: Tensor) -> dict[str, Any]:
    return {
        "action": batch.action,
        "old_params": batch.dist_params,
        "old_log_prob": batch.log_prob,
        "advantage": batch.advantage,
        "old_value": batch.value,
        "return_": batch.return_,
        "valid": batch.valid,
        "count": distributed.mean_(count),
        "clip_ratio": config.clip_ratio,
        "value_clip": config.value_clip if config.value_loss == "clipped" else None,
        "value_coef": config.value_coef,
        "entropy_coef": entropy_coef,
    }


def fused_loss(config: PPOConfig, batch: PPOBatch, params: Tensor, value: Tensor, entropy_coef: Tensor) -> LossOutput:
    """The same as the plain sum of terms, from parameters `[L, B, 2A]` and values `[L, B]`, on a GPU."""
    from canter.kernels.gaussian_loss import count_true, gaussian_loss

    arguments = _arguments(config, batch, count_true(batch.valid), entropy_coef)
    loss, means = gaussian_loss(params, value, **arguments)
    metrics: Metrics = dict(zip(NAMES, means.unbind(), strict=True))
    return LossOutput(loss, metrics["policy/kl"], metrics)


@torch.inference_mode()
def loss_by_hand(
    config: PPOConfig, distribution: Distribution, batch: PPOBatch, model: HandModel, entropy_coef: Tensor
) -> LossOutput:
    """The same from the model itself, with the gradients of all its parameters, on a CPU."""
    made, rows = model(batch.obs), batch.advantage.shape
    loss, means, d_params, d_value = host_losses.ppo_loss(
        FAMILIES[type(distribution)],
        made.params.view(*rows, -1),
        made.value.view(rows),
        **_arguments(config, batch, batch.valid.sum(dtype=made.value.dtype), entropy_coef),
    )
    metrics: Metrics = dict(zip(NAMES, means.unbind(), strict=True))
    gradients = model.gradients(made, d_params.flatten(0, -2), d_value.flatten())
    return LossOutput(loss, metrics["policy/kl"], metrics, gradients)

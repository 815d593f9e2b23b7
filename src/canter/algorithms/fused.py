"""PPO's loss by one function with gradients of its own, where there is one for these settings and this device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Metrics
from canter.algorithms.phase import LossOutput
from canter.distributions import Categorical, DiagGaussian, Distribution
from canter.kernels import host_losses
from canter.nn.by_hand import ACTOR_INPUT, CRITIC_INPUT, HandModel

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


def _value_clip(config: PPOConfig) -> float | None:
    return config.value_clip if config.value_loss == "clipped" else None


def fused_loss(config: PPOConfig, batch: PPOBatch, params: Tensor, value: Tensor, entropy_coef: Tensor) -> LossOutput:
    """The same as the plain sum of terms, from parameters `[L, B, 2A]` and values `[L, B]`, on a GPU."""
    from canter.kernels.gaussian_loss import count_true, gaussian_loss

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
        count=distributed.mean_(count_true(batch.valid)),
        clip_ratio=config.clip_ratio,
        value_clip=_value_clip(config),
        value_coef=config.value_coef,
        entropy_coef=entropy_coef,
    )
    metrics: Metrics = dict(zip(NAMES, means.unbind(), strict=True))
    return LossOutput(loss, metrics["policy/kl"], metrics)


def loss_by_hand(
    config: PPOConfig, distribution: Distribution, batch: PPOBatch, model: HandModel, entropy_coef: Tensor
) -> LossOutput:
    """The same from the model itself, on a CPU; puts the gradients of all parameters where the optimiser has them.

    `batch.obs` is what `HandModel.read_rows` gives.
    """
    valid, rows, entropy_weight = batch.valid.numpy().reshape(-1), _rows, float(entropy_coef.numpy())
    count = int(np.count_nonzero(valid))
    if count < len(valid):
        # Whatever a row holds that is not valid, NaN included, must not come through.
        rows = partial(_rows, valid=valid)
    share = 1.0 / max(distributed.mean_number(count), 1e-9)  # without rows every sum is zero
    with np.errstate(all="ignore"):  # what is not finite is found by its gradient
        made, log_std = model.actor.run(rows(batch.obs[ACTOR_INPUT])), model.std() if model.std else None
        terms = FAMILIES[type(distribution)](made[-1], log_std, rows(batch.action), rows(batch.dist_params))
        old_log_prob, advantage = rows(batch.log_prob), rows(batch.advantage)
        (surrogate, entropy, kl, clipped), d_output, d_log_std = host_losses.policy_loss(
            terms, old_log_prob, advantage, share, clip_ratio=config.clip_ratio, entropy_coef=entropy_weight
        )
        model.actor.descend(made, d_output)
        if model.std is not None and d_log_std is not None:
            model.std.descend(d_log_std)
        made = model.critic.run(rows(batch.obs[CRITIC_INPUT]))
        old_value, return_, weight = rows(batch.value), rows(batch.return_), share * config.value_coef
        error, d_value = host_losses.value_loss(made[-1][:, 0], old_value, return_, weight, _value_clip(config))
        model.critic.descend(made, d_value[:, None])
    loss = surrogate + config.value_coef * error - entropy_weight * entropy
    numbers = np.array([loss, surrogate, error, entropy, kl, clipped], made[-1].dtype) * share
    loss, *means = torch.from_numpy(numbers).unbind()
    metrics: Metrics = dict(zip(NAMES, means, strict=True))
    return LossOutput(loss, metrics["policy/kl"], metrics, differentiated=True)


def _rows(x: Tensor, valid: np.ndarray | None = None) -> np.ndarray:
    """`[L, B, ...]` as `[M, ...]`, without the rows that are not valid."""
    rows = x.numpy()
    rows = rows.reshape(-1, *rows.shape[2:])
    return rows if valid is None else rows[valid]

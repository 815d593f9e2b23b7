"""PPO's loss by one function with gradients of its own, where there is one for these settings and this device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Metrics
from canter.algorithms.phase import LossOutput
from canter.distributions import Categorical, DiagGaussian, Distribution
from canter.kernels import host_losses
from canter.nn.by_hand import ACTOR_INPUT, CRITIC_INPUT, HandModel, Into

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
    minibatch, entropy_weight = _valid_rows(batch), float(entropy_coef.numpy())
    count = len(minibatch["advantage"])
    weight = 1.0 / max(distributed.mean_number(count), 1e-9)  # without rows every sum is zero
    terms_of, value_weight = FAMILIES[type(distribution)], weight * config.value_coef

    def learn(some: slice, into: Into) -> np.ndarray:
        """Sums over some of the rows of what `NAMES` says."""
        rows = {name: array[some] for name, array in minibatch.items()}
        with np.errstate(all="ignore"):  # what is not finite is found by its gradient
            made, log_std = model.actor.run(rows[ACTOR_INPUT]), model.std() if model.std else None
            (surrogate, entropy, kl, clipped), d_output, d_log_std = host_losses.policy_loss(
                terms_of(made[-1], log_std, rows["action"], rows["dist_params"]),
                rows["log_prob"],
                rows["advantage"],
                weight,
                clip_ratio=config.clip_ratio,
                entropy_coef=entropy_weight,
            )
            model.actor.descend(made, d_output, into.actor)
            if model.std is not None and d_log_std is not None:
                model.std.descend(d_log_std, into.std[0])
            made = model.critic.run(rows[CRITIC_INPUT])
            error, d_value = host_losses.value_loss(
                made[-1][:, 0], rows["value"], rows["return_"], value_weight, _value_clip(config)
            )
            model.critic.descend(made, d_value[:, None], into.critic)
        return np.array([surrogate, error, entropy, kl, clipped])

    means = torch.from_numpy((model.share(count, learn) * weight).astype(np.float32))
    metrics: Metrics = dict(zip(NAMES, means.unbind(), strict=True))
    return LossOutput(None, metrics["policy/kl"], metrics)


def _valid_rows(batch: PPOBatch) -> dict[str, np.ndarray]:
    """What the loss needs of `[L, B, ...]`, as `[M, ...]`."""
    valid = batch.valid.numpy().reshape(-1)
    fields = ("action", "dist_params", "log_prob", "advantage", "value", "return_")
    rows = {name: tensor.numpy() for name, tensor in batch.obs.items()}
    rows |= {name: getattr(batch, name).numpy() for name in fields}
    rows = {name: array.reshape(-1, *array.shape[2:]) for name, array in rows.items()}
    if not valid.all():
        # Whatever a row holds that is not valid, NaN included, must not come through.
        rows = {name: array[valid] for name, array in rows.items()}
    return rows

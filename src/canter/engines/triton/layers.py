"""A Gaussian policy and its critic on a GPU: the definition's networks, and the loss with its gradients in one launch.

The networks are the modules themselves, whose layers have kernels of their own; so this engine knows every model, on
any GPU that Triton supports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter.distributions import DiagGaussian
from canter.engines.autograd import AutogradEngine, LossOutput, rl_games_kl
from canter.engines.base import Coefs, PPOLoss, unknown_part
from canter.engines.batch import PPOBatch
from canter.engines.triton.gaussian_loss import BOUND_FORMS, bound_of, count_true, gaussian_loss
from canter.functional.stats import masked_mean
from canter.nn.actor_critic import ActorCritic
from canter.optim import Optimizer
from canter.struct import Metrics

KERNELS = {
    "surrogate": lambda name: name == "clipped",
    "clip_ratio": lambda number: True,
    "value_loss": lambda name: name in ("mse", "clipped"),
    "value_clip": lambda number: True,
    "value_coef": lambda number: True,
    "advantage": lambda name: name == "given",
    "bound": lambda bound: bound is None or bound.config.form in BOUND_FORMS,
}
"""What the kernels of the loss know."""
KNOWN = KERNELS | {"moving_kl": lambda yes: True, "moves_statistics": lambda yes: True}
"""Besides, what is done as the definition does it."""
NAMES = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction", "loss/bound")
"""What they give the means of, in their order."""


def unsupported_by_layers(loss: PPOLoss, model: ActorCritic) -> str | None:
    """Why this engine does not compute a loss; None if it does."""
    if type(model.policy.distribution) is not DiagGaussian:
        return f"it knows Gaussian policies, not {type(model.policy.distribution).__name__}"
    return unknown_part(loss, KNOWN)


def clip_of(loss: PPOLoss) -> float | None:
    """How far a value may move; None for half the squared error."""
    return loss.value_clip if loss.value_loss == "clipped" else None


def named(means: Tensor, loss: PPOLoss) -> Metrics:
    """Means `[6]` by name, without that of a bound loss where there is none."""
    names = NAMES if loss.bound is not None else NAMES[:-1]
    return dict(zip(names, means.unbind(), strict=False))


class LayersEngine(AutogradEngine):
    """Autograd through the networks, with one kernel for the loss."""

    name = "triton_layers"

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        super().__init__(loss, model, optimizer)
        self.bound = bound_of(loss, model.policy.distribution.param_dim // 2, next(model.parameters()).device)

    def evaluate(self, batch: PPOBatch, coefs: Coefs) -> LossOutput:
        """The loss of one minibatch."""
        output = self.forward(batch)
        params, value = output.dist_params, output.value
        assert isinstance(params, Tensor) and isinstance(value, Tensor)
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
            count=count_true(batch.valid),
            clip_ratio=self.loss.clip_ratio,
            value_clip=clip_of(self.loss),
            value_coef=self.loss.value_coef,
            entropy_coef=coefs.entropy,
            bound=self.bound,
        )
        metrics = named(means, self.loss)
        if self.loss.moving_kl:
            with torch.no_grad():
                metrics["policy/kl"] = masked_mean(rl_games_kl(batch.dist_params, params), batch.valid)
        return LossOutput(loss, metrics, params)

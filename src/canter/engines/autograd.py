"""The definition: PPO's loss as one reads it, differentiated by autograd.

L sequence length (1 without memory), S sequences, B sequences in a minibatch, P distribution parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.distributions import Distribution
from canter.engines.base import Acted, Coefs, PPOLoss, Valued
from canter.engines.batch import ModelOutput, PPOBatch
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.order import take_sequences
from canter.functional.stats import masked_mean, normalize
from canter.kernels.streams import beside, side_stream
from canter.nn.actor_critic import ActorCritic
from canter.optim import Optimizer
from canter.struct import Metrics, Obs, State, TensorStruct, tree_map


def policy_terms(loss: PPOLoss, distribution: Distribution, batch: PPOBatch, params: Tensor) -> Metrics:
    """Surrogate, entropy, KL, whether the ratio was clipped, how far the mean is out of bounds; each `[L, B]`."""
    assert loss.surrogate is not None
    advantage = normalize(batch.advantage, batch.valid) if loss.advantage == "minibatch" else batch.advantage
    log_prob = distribution.log_prob(params, batch.action)
    with torch.no_grad():
        kl = distribution.kl(batch.dist_params, params)
        clipped = ((torch.exp(log_prob - batch.log_prob) - 1).abs() > loss.clip_ratio).to(kl.dtype)
    terms = {
        "loss/policy": SURROGATES[loss.surrogate](log_prob, batch.log_prob, advantage, loss.clip_ratio),
        "policy/entropy": distribution.entropy(params),
        "policy/kl": kl,
        "policy/clip_fraction": clipped,
    }
    return terms if loss.bound is None else terms | {"loss/bound": loss.bound(params)}


def value_terms(loss: PPOLoss, batch: PPOBatch, value: Tensor) -> Metrics:
    """The critic's error `[L, B]`."""
    assert loss.value_loss is not None
    return {"loss/value": VALUE_LOSSES[loss.value_loss](value, batch.value, batch.return_, loss.value_clip)}


def weights(loss: PPOLoss, coefs: Coefs) -> dict[str, float | Tensor]:
    """What each term counts for in the loss; a term that is not named here is only reported."""
    bound = loss.bound.config.coef if loss.bound else 0.0
    return {"loss/policy": 1.0, "loss/value": loss.value_coef, "policy/entropy": -coefs.entropy, "loss/bound": bound}


@dataclass
class LossOutput:
    """A minibatch's loss, 0-d, and what to log. A phase's KL is the metric `policy/kl`."""

    loss: Tensor
    metrics: Metrics


class LossGradients:
    """Gradients of any loss by autograd, for a phase of an update; `loss` takes a minibatch `[L, B, ...]`."""

    def __init__(self, loss: Callable[[Any], LossOutput], optimizer: Optimizer) -> None:
        self.loss, self.optimizer = loss, optimizer

    def begin(self, batch: TensorStruct) -> TensorStruct:
        """The rows themselves."""
        return batch

    def gradients(self, rows: TensorStruct, index: Tensor, coefs: Any) -> Metrics:
        """Write the gradients of the loss of some sequences into the optimiser; gives what there is to log."""
        output = self.loss(take_sequences(rows, index))
        self.optimizer.backward(output.loss)
        return {name: value.detach() for name, value in output.metrics.items()}


class AutogradEngine:
    """Runs the modules themselves; knows every loss and every model."""

    name = "autograd"

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        self.loss, self.model, self.optimizer = loss, model, optimizer
        self.distribution = model.policy.distribution
        self.stream = side_stream(next(model.parameters()).device)

    def act(self, obs: Obs, state: State, reset: Tensor, rng: torch.Generator) -> Acted:
        """Sample; the environment gets actions within bounds, the record keeps them as drawn."""
        with torch.no_grad():
            params, state = self.model.policy.params(obs, state, reset)
            action = self.distribution.sample(params, rng)
            return self.distribution.to_env(action), action, params, state

    @torch.no_grad()
    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Values of all rows; on a CPU only of those that are needed."""
        if needed is None or not needed.is_cpu:
            return self.model.critic.unroll(obs, state, reset)
        rows, values = torch.from_numpy(np.flatnonzero(needed.numpy())), torch.zeros(needed.shape)
        if len(rows):
            some, states = tree_map(lambda x: x[:, rows], obs), tree_map(lambda x: x[rows], state)
            values[:, rows] = self.model.critic.unroll(some, states, None)[0]
        return values, ()

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Those of the distribution."""
        return self.distribution.log_prob(dist_params, action)

    def begin(self, batch: PPOBatch) -> PPOBatch:
        """The rows themselves."""
        return batch

    def gradients(self, rows: PPOBatch, index: Tensor, coefs: Coefs) -> Metrics:
        """By autograd."""
        output = self.evaluate(take_sequences(rows, index), coefs)
        self.optimizer.backward(output.loss)
        return {name: value.detach() for name, value in output.metrics.items()}

    def evaluate(self, batch: PPOBatch, coefs: Coefs) -> LossOutput:
        """The loss of one minibatch: means of all terms over the valid rows, weighed and added up."""
        loss = self.loss
        for augment in loss.augment:
            batch = augment(batch)
        output, terms = self.forward(batch), Metrics()
        if output.dist_params is not None:
            own = loss.policy_terms
            terms |= own(batch, output.dist_params) if own else self.policy_terms(batch, output.dist_params)
        if output.value is not None:
            terms |= value_terms(loss, batch, output.value)
        counted = weights(loss, coefs)
        for further in loss.terms:
            added = further(batch, output)
            twice = sorted(added.keys() & terms.keys())
            if twice:
                raise ValueError(f"extensions: loss terms called {', '.join(map(repr, twice))} are there already")
            counted |= dict.fromkeys(added, 1.0)
            terms |= added
        means = dict(zip(terms, masked_mean(torch.stack(list(terms.values())), batch.valid).unbind(), strict=True))
        total = torch.stack([means[name] * weight for name, weight in counted.items() if name in means]).sum()
        return LossOutput(total, means)

    def policy_terms(self, batch: PPOBatch, params: Tensor) -> Metrics:
        """Those of the definition."""
        return policy_terms(self.loss, self.distribution, batch, params)

    def forward(self, batch: PPOBatch) -> ModelOutput:
        """Outputs of the networks that this loss trains; on a GPU the critic runs on a stream of its own."""
        states = [tree_map(lambda x: x[0], state) for state in (batch.policy_state, batch.critic_state)]
        model, obs, reset = self.model, batch.obs, batch.reset
        if self.loss.value_loss is None:
            return ModelOutput(model.actor(obs, states[0], reset)[0], None)
        if self.loss.surrogate is None:
            return ModelOutput(None, model.critic(obs, states[1], reset)[0])
        if model.shared_trunk:
            return ModelOutput(*model(obs, *states, reset))
        with beside(self.stream) as join:
            value = model.critic(obs, states[1], reset)[0]
        params = model.actor(obs, states[0], reset)[0]
        join(value)
        return ModelOutput(params, value)

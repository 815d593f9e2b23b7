"""The definition: PPO's loss as one reads it, differentiated by autograd.

L sequence length (1 without memory), S sequences, B sequences in a minibatch, P distribution parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_map
from canter.engines.base import Acted, Coefs, ModelOutput, PPOBatch, PPOLoss, Valued
from canter.engines.streams import beside, side_stream
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.minibatches import take_sequences
from canter.functional.statistics import masked_mean, normalize
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import DiagGaussian, Distribution, TanhGaussian
from canter.nn.optimizer import Optimizer


def policy_terms(loss: PPOLoss, distribution: Distribution, batch: PPOBatch, params: Tensor) -> Metrics:
    """Surrogate, entropy, KL, whether the ratio was clipped, how far the mean is out of bounds; each `[L, B]`."""
    assert loss.surrogate is not None
    advantage = batch.advantage
    if loss.advantage != "given":
        advantage = normalize(advantage, batch.valid, unbiased=loss.advantage == "minibatch_sample")
    log_prob = distribution.log_prob(params, batch.action)
    with torch.no_grad():
        kl = distribution.kl(batch.dist_params, params)
        if loss.moving_kl and isinstance(distribution, DiagGaussian | TanhGaussian):
            kl = rl_games_kl(batch.dist_params, params)
        elif loss.moving_kl:  # of choices it has an estimate
            kl = 0.5 * (log_prob - batch.log_prob).square()
        clipped = ((torch.exp(log_prob - batch.log_prob) - 1).abs() > loss.clip_ratio).to(kl.dtype)
    terms = {
        "loss/policy": SURROGATES[loss.surrogate](log_prob, batch.log_prob, advantage, loss.clip_ratio),
        "policy/entropy": distribution.entropy(params),
        "policy/kl": kl,
        "policy/clip_fraction": clipped,
    }
    return terms if loss.bound is None else terms | {"loss/bound": loss.bound(params)}


def rl_games_kl(last_params: Tensor, params: Tensor) -> Tensor:
    """KL(new || last seen) of Gaussians, by parameters `[..., 2A]`, with constants where a std stands below."""
    (mean, log_std), (last_mean, last_log_std) = params.chunk(2, -1), last_params.chunk(2, -1)
    std, last_std = torch.exp(log_std), torch.exp(last_log_std)
    squares = std.square() + (last_mean - mean).square()
    return (torch.log(last_std / std + 1e-5) + squares / (2 * (last_std.square() + 1e-5)) - 0.5).sum(-1)


def value_terms(loss: PPOLoss, batch: PPOBatch, value: Tensor, bonus: Tensor | None) -> Metrics:
    """The critic's error `[L, B]`, and that of its second head if it has one."""
    assert loss.value_loss is not None
    error = VALUE_LOSSES[loss.value_loss]
    terms = {"loss/value": error(value, batch.value, batch.return_, loss.value_clip)}
    if bonus is None or batch.bonus_value is None or batch.bonus_return is None:
        return terms
    return terms | {"loss/bonus_value": error(bonus, batch.bonus_value, batch.bonus_return, loss.value_clip)}


def weights(loss: PPOLoss, coefs: Coefs) -> dict[str, float | Tensor]:
    """What each term counts for in the loss; a term that is not named here is only reported."""
    return {
        "loss/policy": 1.0,
        "loss/value": loss.value_coef,
        "loss/bonus_value": loss.bonus_coef or 0.0,
        "policy/entropy": -coefs.entropy,
        "loss/bound": loss.bound.config.coef if loss.bound else 0.0,
    }


OF_ORIGINALS = ("policy/entropy", "policy/kl", "policy/clip_fraction")
"""Terms that rows which an extension added have no part in."""


def means_of(terms: Metrics, batch: PPOBatch) -> Metrics:
    """The mean of each term `[L, B]` over the rows that it is of."""
    means = dict(zip(terms, masked_mean(torch.stack(list(terms.values())), batch.valid).unbind(), strict=True))
    own = [name for name in OF_ORIGINALS if name in terms]
    if batch.original is None or not own:
        return means
    counted = masked_mean(torch.stack([terms[name] for name in own]), batch.valid & batch.original)
    return means | dict(zip(own, counted.unbind(), strict=True))


@dataclass
class LossOutput:
    """A minibatch's loss, 0-d, and what to log. A phase's KL is the metric `policy/kl`."""

    loss: Tensor
    metrics: Metrics
    dist_params: Tensor | None = None
    """What the policy's network gave."""


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
        """The rows themselves; with a moving KL, copies of the parameters that it is measured from."""
        return replace(batch, dist_params=batch.dist_params.clone()) if self.loss.moving_kl else batch

    def gradients(self, rows: PPOBatch, index: Tensor, coefs: Coefs) -> Metrics:
        """By autograd."""
        batch = take_sequences(rows, index)
        if self.loss.moves_statistics:
            self._move_statistics(batch)
        output = self.evaluate(batch, coefs)
        if self.loss.moving_kl and output.dist_params is not None:
            rows.dist_params[:, index] = output.dist_params.detach()
        self.optimizer.backward(output.loss)
        return {name: value.detach() for name, value in output.metrics.items()}

    def _move_statistics(self, batch: PPOBatch) -> None:
        """Of the networks that this loss trains, each once."""
        model, trained = self.model, []
        if self.loss.surrogate is not None:
            trained.append(model.actor.network)
        if self.loss.value_loss is not None and not (trained and (model.shared_trunk or self.loss.trunk_value)):
            trained.append(model.critic.network)
        for network in trained:
            network.update_statistics(batch.obs, batch.valid)

    def evaluate(self, batch: PPOBatch, coefs: Coefs) -> LossOutput:
        """The loss of one minibatch: means of all terms over the valid rows, weighed and added up."""
        loss = self.loss
        for augment in loss.augment:
            batch = augment(batch)
        output, terms = self.forward(batch), Metrics()
        if output.dist_params is not None:
            own = loss.policy_terms or partial(policy_terms, loss, self.distribution)
            terms |= own(batch, output.dist_params)
        if output.value is not None:
            terms |= value_terms(loss, batch, output.value, output.bonus_value)
        counted = weights(loss, coefs)
        for further in loss.terms:
            added = further(batch, output)
            twice = sorted(added.keys() & terms.keys())
            if twice:
                raise ValueError(f"extensions: loss terms called {', '.join(map(repr, twice))} are there already")
            counted |= dict.fromkeys(added, 1.0)
            terms |= added
        means = means_of(terms, batch)
        total = torch.stack([means[name] * weight for name, weight in counted.items() if name in means]).sum()
        return LossOutput(total, means, output.dist_params)

    def forward(self, batch: PPOBatch) -> ModelOutput:
        """Outputs of the networks that this loss trains; on a GPU the critic runs on a stream of its own."""
        states = [tree_map(lambda x: x[0], state) for state in (batch.policy_state, batch.critic_state)]
        model, obs, reset = self.model, batch.obs, batch.reset
        if self.loss.value_loss is None:
            return ModelOutput(model.actor(obs, states[0], reset)[0], None)
        if self.loss.surrogate is None:
            return ModelOutput(None, *model.values(obs, states[1], reset))
        if self.loss.trunk_value:
            return ModelOutput(*model.with_trunk_value(obs, states[0], reset))
        if model.shared_trunk and model.bonus_head is None:
            return ModelOutput(*model(obs, *states, reset))
        if model.shared_trunk:  # twice through the trunk: a second head is rare
            return ModelOutput(model.actor(obs, states[0], reset)[0], *model.values(obs, states[0], reset))
        with beside(self.stream) as join:
            values = model.values(obs, states[1], reset)
        params = model.actor(obs, states[0], reset)[0]
        join(*[value for value in values if value is not None])
        return ModelOutput(params, *values)

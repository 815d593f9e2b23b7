"""The definition of PPO's loss in plain PyTorch, differentiated by autograd.

`loss_terms` lists the terms and their weights; `AutogradEngine.evaluate` sums them.

L sequence length (1 for feed-forward networks), S sequences, B sequences in a minibatch, P
distribution parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.dispatch import concurrently, side_stream
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_map
from canter.engines.base import Acted, Coefs, ModelOutput, PPOBatch, PPOLoss, UpdateResult, Valued
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.optimization import take_sequences
from canter.functional.statistics import masked_mean, normalize
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import DiagGaussian, Distribution, TanhGaussian
from canter.nn.optimizer import Optimizer


@dataclass(frozen=True)
class Term:
    """A term of the loss: the mean of `value` over the valid samples, times `weight`."""

    name: str
    """Name under which the mean is logged, without the weight."""
    value: Tensor
    """`[L, B]`."""
    weight: float | Tensor


DIAGNOSTICS = ("policy/kl", "policy/clip_fraction")
"""Quantities that `policy_terms` returns for the log and for early stopping; they are not part of
the loss."""

UNAUGMENTED_ONLY = ("policy/entropy", *DIAGNOSTICS)
"""Quantities whose means leave out samples that an extension added."""


def policy_terms(loss: PPOLoss, distribution: Distribution, batch: PPOBatch, params: Tensor) -> Metrics:
    """Return surrogate, entropy, KL, whether the ratio was clipped and perhaps the bound loss.

    `[L, B]`, unweighted.
    """
    assert loss.surrogate is not None
    advantage = batch.advantage
    if loss.advantage != "given":
        advantage = normalize(advantage, batch.valid, unbiased=loss.advantage == "minibatch_sample")
    log_prob = distribution.log_prob(params, batch.action)
    with torch.no_grad():
        kl = rl_games_kl(distribution, batch, params) if loss.moving_kl else distribution.kl(batch.dist_params, params)
        clipped = ((torch.exp(log_prob - batch.log_prob) - 1).abs() > loss.clip_ratio).to(kl.dtype)
    values = {
        "loss/policy": SURROGATES[loss.surrogate](log_prob, batch.log_prob, advantage, loss.clip_ratio),
        "policy/entropy": distribution.entropy(params),
        "policy/kl": kl,
        "policy/clip_fraction": clipped,
    }
    if loss.bound is not None:
        values["loss/bound"] = loss.bound(params)
    return values


def rl_games_kl(distribution: Distribution, batch: PPOBatch, params: Tensor) -> Tensor:
    """Return KL(new || last seen) `[L, B]` of Gaussians, with the constants of rl_games.

    For other distributions rl_games estimates the KL from the ratio.
    """
    if not isinstance(distribution, DiagGaussian | TanhGaussian):
        return 0.5 * (distribution.log_prob(params, batch.action) - batch.log_prob).square()
    mean, log_std = params.chunk(2, -1)
    last_mean, last_log_std = batch.dist_params.chunk(2, -1)
    std = torch.exp(log_std)
    last_std = torch.exp(last_log_std)
    squares = std.square() + (last_mean - mean).square()
    return (torch.log(last_std / std + 1e-5) + squares / (2 * (last_std.square() + 1e-5)) - 0.5).sum(-1)


def loss_terms(loss: PPOLoss, coefs: Coefs, batch: PPOBatch, output: ModelOutput, policy: Metrics | None) -> list[Term]:
    """Return the terms of PPO's loss, without those of extensions, in their order of summation.

    `policy` are the values of `policy_terms`; None where the policy is not trained.
    """
    terms: list[Term] = []
    if policy is not None:
        terms.append(Term("loss/policy", policy["loss/policy"], weight=1.0))
    if output.value is not None:
        assert loss.value_loss is not None
        error = VALUE_LOSSES[loss.value_loss]
        value = error(output.value, batch.value, batch.return_, loss.value_clip)
        terms.append(Term("loss/value", value, weight=loss.value_coef))
        if output.bonus_value is not None and batch.bonus_value is not None and batch.bonus_return is not None:
            value = error(output.bonus_value, batch.bonus_value, batch.bonus_return, loss.value_clip)
            terms.append(Term("loss/bonus_value", value, weight=loss.bonus_coef or 0.0))
    if policy is not None:
        terms.append(Term("policy/entropy", policy["policy/entropy"], weight=-coefs.entropy))
        if loss.bound is not None:
            terms.append(Term("loss/bound", policy["loss/bound"], weight=loss.bound.config.coef))
    return terms


def extension_terms(loss: PPOLoss, batch: PPOBatch, output: ModelOutput) -> list[Term]:
    """Return the terms that extensions add; their values include their weights."""
    return [Term(name, value, weight=1.0) for hook in loss.terms for name, value in hook(batch, output).items()]


def sample_means(values: Metrics, batch: PPOBatch) -> Metrics:
    """Return the mean of each value `[L, B]` over the valid, or valid and unaugmented, samples."""
    means = dict(zip(values, masked_mean(torch.stack(list(values.values())), batch.valid).unbind(), strict=True))
    own = [name for name in UNAUGMENTED_ONLY if name in values]
    if batch.original is None or not own:
        return means
    unaugmented = masked_mean(torch.stack([values[name] for name in own]), batch.valid & batch.original)
    return means | dict(zip(own, unaugmented.unbind(), strict=True))


@dataclass
class LossOutput:
    """The loss of a minibatch, 0-d, and what to log."""

    loss: Tensor
    metrics: Metrics
    kl: Tensor | None = None
    """KL from the policy that collected the samples, 0-d; early stopping and adaptive learning
    rates follow it."""
    dist_params: Tensor | None = None
    """Output of the policy's network `[L, B, P]`."""

    def measured(self) -> UpdateResult:
        """Return metrics and KL without their autograd graphs."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        return UpdateResult(metrics, None if self.kl is None else self.kl.detach())


@dataclass
class LossGradients:
    """Gradients of any loss by autograd, for a phase of an update.

    `loss` takes a minibatch `[L, B, ...]`.
    """

    loss: Callable[[Any], LossOutput]
    optimizer: Optimizer

    def begin(self, batch: TensorStruct) -> TensorStruct:
        """Return the samples as they are."""
        return batch

    def gradients(self, samples: TensorStruct, index: Tensor, coefs: Any) -> UpdateResult:
        """Write the gradients of the loss of some sequences into the optimizer.

        Return metrics and KL.
        """
        output = self.loss(take_sequences(samples, index))
        self.optimizer.backward(output.loss)
        return output.measured()


class AutogradEngine:
    """Runs the modules themselves; supports every loss and every model."""

    name = "autograd"
    uncounted: Tensor
    """`[L, S]` samples of this update that the observation statistics do not have yet."""

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        self.loss = loss
        self.model = model
        self.optimizer = optimizer
        self.distribution = model.policy.distribution
        self.stream = side_stream(next(model.parameters()).device)

    def act(self, obs: Obs, state: State, reset: Tensor, rng: torch.Generator) -> Acted:
        """Sample actions: within bounds for the environment, as sampled for the record."""
        with torch.no_grad():
            params, state = self.model.policy.params(obs, state, reset)
            action = self.distribution.sample(params, rng)
            return self.distribution.to_env(action), action, params, state

    @torch.no_grad()
    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Return the values of all samples, or on a CPU of the needed ones and zeros elsewhere."""
        if needed is None or not needed.is_cpu:
            return self.model.critic.unroll(obs, state, reset)
        values = torch.zeros(needed.shape)
        index = torch.from_numpy(np.flatnonzero(needed.numpy()))
        if len(index):
            some = tree_map(lambda x: x[:, index], obs)
            states = tree_map(lambda x: x[index], state)
            values[:, index] = self.model.critic.unroll(some, states, None)[0]
        return values, ()

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Return the log-probabilities of the distribution."""
        return self.distribution.log_prob(dist_params, action)

    def begin(self, batch: PPOBatch) -> PPOBatch:
        """Return the samples.

        A moving KL overwrites its reference parameters, so it gets a copy of them.
        """
        if self.loss.update_obs_stats_per_minibatch == "first_epoch":
            self.uncounted = torch.ones_like(batch.valid)
        return replace(batch, dist_params=batch.dist_params.clone()) if self.loss.moving_kl else batch

    def gradients(self, samples: PPOBatch, index: Tensor, coefs: Coefs) -> UpdateResult:
        """Write the gradients of the loss of some sequences into the optimizer.

        Return metrics and KL.
        """
        batch = take_sequences(samples, index)
        if self.loss.update_obs_stats_per_minibatch:
            self._update_obs_statistics(batch, index)
        output = self.evaluate(batch, coefs)
        if self.loss.moving_kl and output.dist_params is not None:
            samples.dist_params[:, index] = output.dist_params.detach()
        self.optimizer.backward(output.loss)
        return output.measured()

    def _update_obs_statistics(self, batch: PPOBatch, index: Tensor) -> None:
        """Update the observation statistics of the networks that this loss trains, each once."""
        model = self.model
        counted = batch.valid
        if self.loss.update_obs_stats_per_minibatch == "first_epoch":
            counted = counted & self.uncounted[:, index]
            self.uncounted[:, index] = False
        trained = []
        if self.loss.surrogate is not None:
            trained.append(model.actor.network)
        if self.loss.value_loss is not None and not (trained and (model.shared_trunk or self.loss.trunk_value)):
            trained.append(model.critic.network)
        for network in trained:
            network.update_statistics(batch.obs, counted)

    def evaluate(self, batch: PPOBatch, coefs: Coefs) -> LossOutput:
        """Return the loss of one minibatch: the sum of the weighted means of its terms."""
        loss = self.loss
        for augment in loss.augment:
            batch = augment(batch)
        output = self.forward(batch)
        policy = None if output.dist_params is None else self._policy_terms(batch, output.dist_params)
        diagnostics = {} if policy is None else {name: policy[name] for name in DIAGNOSTICS}
        terms = loss_terms(loss, coefs, batch, output, policy)
        for term in extension_terms(loss, batch, output):
            if term.name in diagnostics or any(term.name == other.name for other in terms):
                raise ValueError(f"extensions: the loss has a term named {term.name!r} already: rename it")
            terms.append(term)
        means = sample_means({term.name: term.value for term in terms} | diagnostics, batch)
        total = torch.stack([means[term.name] * term.weight for term in terms]).sum()
        kl = means.pop("policy/kl", None)
        return LossOutput(total, means, kl, output.dist_params)

    def _policy_terms(self, batch: PPOBatch, params: Tensor) -> Metrics:
        """Return the policy's values, those of a subclass where it has its own.

        Raise if one of them has no weight.
        """
        values = (self.loss.policy_terms or partial(policy_terms, self.loss, self.distribution))(batch, params)
        known = {"loss/policy", "loss/bound", *UNAUGMENTED_ONLY}
        unweighted = sorted(values.keys() - known)
        if unweighted:
            raise ValueError(
                f"policy_terms returns {', '.join(unweighted)}, for which there is no weight: it may change "
                f"{', '.join(sorted(known))}; return further terms from the hook `loss` of an extension"
            )
        return values

    def forward(self, batch: PPOBatch) -> ModelOutput:
        """Return the outputs of the networks that this loss trains.

        On a GPU the critic runs on its own stream.
        """
        model = self.model
        obs = batch.obs
        reset = batch.reset
        policy_state, critic_state = (tree_map(lambda x: x[0], x) for x in (batch.policy_state, batch.critic_state))
        if self.loss.value_loss is None:
            return ModelOutput(model.actor(obs, policy_state, reset)[0], None)
        if self.loss.surrogate is None:
            return ModelOutput(None, *model.values(obs, critic_state, reset))
        if self.loss.trunk_value:
            return ModelOutput(*model.with_trunk_value(obs, policy_state, reset))
        if model.shared_trunk and model.bonus_head is None:
            return ModelOutput(*model(obs, policy_state, critic_state, reset))
        if model.shared_trunk:  # two passes through the trunk: a second head is rare
            return ModelOutput(model.actor(obs, policy_state, reset)[0], *model.values(obs, policy_state, reset))
        with concurrently(self.stream) as join:
            values = model.values(obs, critic_state, reset)
        params = model.actor(obs, policy_state, reset)[0]
        join(*[value for value in values if value is not None])
        return ModelOutput(params, *values)

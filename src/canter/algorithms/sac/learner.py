"""An update of SAC: critics, policy, temperature and target critics.

The loss is defined here and differentiated by autograd. An engine may write the same gradients
faster.

A action components, B samples, E critics, K atoms.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from canter.core.data.replay import ReplayBatch
from canter.core.specs import EnvSpec
from canter.core.struct import Metrics, Obs, copy_all_, tree_map
from canter.engines.base import SACLoss
from canter.engines.native.sac import NativeSACEngine
from canter.functional import losses as soft
from canter.functional.statistics import masked_mean
from canter.nn.actor_critic import Actor
from canter.nn.describe import SACModel
from canter.nn.optimizer import Optimizer
from canter.nn.stack import Critics, batch_statistics, has_batch_norm

if TYPE_CHECKING:
    from canter.algorithms.sac.config import SACConfig

ONE_THREAD = 2**15 - 1
"""Elements up to which torch uses one thread. Its other threads would keep looking for work for
longer than an update takes, while those of the native engine wait for a core."""
NONFINITE_STEPS = "optim/nonfinite_steps"
METRICS = (
    "loss/critic",
    "loss/policy",
    "policy/entropy",
    "policy/std",
    "policy/temperature",
    "value/mean",
    "value/target_std",
    "optim/grad_norm/policy",
    "optim/grad_norm/critic",
    "optim/learning_rate/policy",
    "optim/learning_rate/critic",
    NONFINITE_STEPS,
)
"""All metrics of an update."""


class SACLearner:
    """Networks, optimisers and the mathematics of an update."""

    def __init__(self, config: SACConfig, actor: Actor, critics: Critics, action_dim: int) -> None:
        self.config = config
        self.actor = actor
        self.critics = critics
        self.target_entropy = config.temperature.target(action_dim)
        device = critics.support.device
        self.temperature = Temperature(config.temperature.initial).to(device)
        self.target_critics = copy.deepcopy(critics).requires_grad_(False)
        # Observation statistics are not averaged: critics and target critics share them.
        self.target_critics.encoder.normalizers = critics.encoder.normalizers
        self.optimizers = {
            "policy": Optimizer.single("all", actor.parameters(), config.optimizer),
            "critic": Optimizer.single("all", critics.parameters(), config.critic_optimizer or config.optimizer),
            "temperature": Optimizer.single("all", self.temperature.parameters(), config.temperature.optimizer),
        }
        self.flat = self.optimizers["critic"].adams[0].flat
        """Parameters of the critics as one vector."""
        self.target_flat = parameters_to_vector(self.target_critics.parameters()).detach()
        vector_to_parameters(self.target_flat, self.target_critics.parameters())  # as views of it
        self.chunks = list(zip(self.target_flat.split(ONE_THREAD), self.flat.split(ONE_THREAD), strict=True))
        """Chunks of both vectors that one thread processes alone; split once, as this takes longer
        than a `lerp_`."""
        self.joint_critics = has_batch_norm(critics)
        self.joint_actor = has_batch_norm(actor)
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.one = torch.ones((), device=device)
        self.metrics: Metrics = {name: torch.zeros((), device=device) for name in METRICS}
        """Metrics of the last update of each kind, at fixed addresses."""
        self.engine: NativeSACEngine | None = None
        """Writes the gradients in place of autograd; None for autograd, which is the definition."""

    def update(
        self,
        batch: ReplayBatch,
        noise: Tensor,
        learn_policy: bool,
        log_critics: bool = True,
        log_policy: bool = True,
    ) -> None:
        """Learn from samples `[B, ...]`; `noise` `[2, B, A]` is for next and for current actions.

        Only the last metrics of an iteration are read, and computing them costs some per cent of an
        update, so the updates before leave them out.
        """
        if self.engine is not None:
            self._update_by_engine(self.engine, batch, noise, learn_policy, log_critics, log_policy)
            return
        self.learn_critics(batch, noise[0], log_critics)
        if learn_policy:
            self.learn_policy(batch, noise[1], log_policy)
        with torch.no_grad():
            self.target_flat.lerp_(self.flat, self.config.tau)

    def _update_by_engine(
        self,
        engine: NativeSACEngine,
        batch: ReplayBatch,
        noise: Tensor,
        learn_policy: bool,
        log_critics: bool,
        log_policy: bool,
    ) -> None:
        """Do the same update with the gradients of an engine."""
        temperature = self.temperature()
        measured = engine.learn_critics(batch, noise[0], temperature)
        self._optimizer_step("critic", self._tensors(measured) if log_critics else {})
        if learn_policy:
            measured = engine.learn_policy(batch, noise[1], temperature)
            metrics = {"policy/temperature": temperature.squeeze()} | self._tensors(measured) if log_policy else {}
            self._optimizer_step("policy", metrics)
            if self.config.temperature.learned:  # the slope of `temperature_loss`, which is linear
                slope = measured["policy/entropy"] - self.target_entropy
                self.optimizers["temperature"].adams[0].gradient.fill_(slope)
                self._optimizer_step("temperature", {})
        for target, online in self.chunks:
            target.lerp_(online, self.config.tau)

    def learn_critics(self, batch: ReplayBatch, noise: Tensor, log: bool = True) -> None:
        """Train the critics towards reward plus the target critics' value of the next action."""
        with torch.no_grad():
            next_action, next_log_prob = soft.squashed_sample(self.params(batch.next_obs), noise)
        out, next_out = self._critic_outputs(batch, next_action)
        with torch.no_grad():
            target = self._target(batch, next_out, next_log_prob)
        if self.critics.atoms == 1:
            loss = masked_mean(0.5 * (out - target).square(), batch.valid).sum()
        else:
            loss = masked_mean(soft.cross_entropy(out, target), batch.valid).sum() / self.critics.members
        metrics: Metrics = {}
        if log:
            means = target if self.critics.atoms == 1 else (target * self.critics.support).sum(-1)
            metrics = {"loss/critic": loss, "value/target_std": means.std()}
        self._minimize("critic", loss, metrics)

    def _critic_outputs(self, batch: ReplayBatch, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the critics' outputs for the samples and the target critics' for their successors.

        Batch norms see both as one batch, in critics and target critics: prediction and target then
        use the same statistics.
        """
        if not self.joint_critics:
            with torch.no_grad():
                next_out = self.target_critics(batch.next_obs, next_action)
            return self.critics(batch.obs, batch.action), next_out
        obs = _both(batch.obs, batch.next_obs)
        action = torch.cat([batch.action, next_action])
        size = len(next_action)
        with batch_statistics(self.critics), batch_statistics(self.target_critics):
            with torch.no_grad():
                next_out = self.target_critics(obs, action)[:, size:]
            return self.critics(obs, action)[:, :size], next_out

    def _target(self, batch: ReplayBatch, next_out: Tensor, next_log_prob: Tensor) -> Tensor:
        """Return the targets of the critics: returns `[B]` or distributions of returns `[B, K]`."""
        critics = self.critics
        temperature = self.temperature()
        if critics.atoms == 1:
            next_value = self.reduce_critics(next_out)
            return soft.soft_target(batch.reward, batch.discount, next_value, temperature, next_log_prob)
        probs = next_out.softmax(-1)
        probs = (
            soft.least_mean_distribution(probs, critics.support) if self.config.pessimism == "min" else probs.mean(0)
        )
        reward, discount, log_prob = (x.unsqueeze(-1) for x in (batch.reward, batch.discount, next_log_prob))
        atoms = soft.soft_target(reward, discount, critics.support, temperature, log_prob)
        return soft.project_distribution(probs, atoms, *critics.ends)

    def learn_policy(self, batch: ReplayBatch, noise: Tensor, log: bool = True) -> None:
        """Train the policy towards higher values and the temperature towards the target entropy."""
        if self.joint_actor:
            with batch_statistics(self.actor):
                params = self.params(_both(batch.obs, batch.next_obs))[: len(noise)]
        else:
            params = self.params(batch.obs)
        action, log_prob = soft.squashed_sample(params, noise)
        value = self.reduce_critics(self.critics.values(self.critics(batch.obs, action)))
        loss = soft.policy_loss(self.temperature(), log_prob, value).mean()
        metrics: Metrics = {}
        if log:
            with torch.no_grad():
                metrics = {
                    "loss/policy": loss,
                    "policy/entropy": -log_prob.mean(),
                    "policy/std": params.chunk(2, -1)[1].exp().mean(),
                    "policy/temperature": self.temperature().squeeze(),
                    "value/mean": value.mean(),
                }
        self._minimize("policy", loss, metrics)
        if self.config.temperature.learned:
            error = soft.temperature_loss(self.temperature.log, log_prob, self.target_entropy).mean()
            self._minimize("temperature", error, {})

    def params(self, obs: Obs) -> Tensor:
        """Return the distribution parameters `[B, 2A]` of the policy."""
        return self.actor(tree_map(lambda group: group.unsqueeze(0), obs), (), None)[0].squeeze(0)

    def reduce_critics(self, values: Tensor) -> Tensor:
        """Return the lowest of the values `[E, B]` or their mean, `[B]`."""
        return values.amin(0) if self.config.pessimism == "min" else values.mean(0)

    def _minimize(self, name: str, loss: Tensor, metrics: Metrics) -> None:
        """Compute the gradients of a loss and take an optimiser step."""
        self.optimizers[name].backward(loss)
        self._optimizer_step(name, {name: x.detach() for name, x in metrics.items()})

    def _optimizer_step(self, name: str, metrics: Metrics) -> None:
        """Take an optimiser step with the gradients that were written, and store the metrics."""
        optimizer = self.optimizers[name]
        metrics = optimizer.exchange_(metrics, self.one)
        step = optimizer.step(self.never)
        if metrics:
            metrics[f"optim/grad_norm/{name}"] = step["grad_norm"]
            metrics[f"optim/learning_rate/{name}"] = optimizer.adams[0].learning_rate
            copy_all_([self.metrics[key] for key in metrics], [value.detach() for value in metrics.values()])
        self.metrics[NONFINITE_STEPS].add_(step["nonfinite_steps"])

    def _tensors(self, numbers: dict[str, float]) -> Metrics:
        return {name: torch.full_like(self.metrics[name], number) for name, number in numbers.items()}

    def schedule_(self, progress: Tensor) -> None:
        """Set the learning rates for an iteration and reset the count of skipped steps."""
        self.metrics[NONFINITE_STEPS].zero_()
        for optimizer in self.optimizers.values():
            optimizer.schedule_(progress)

    def loss(self) -> SACLoss:
        """Return the description of the losses, for the choice of an engine."""
        subclass = None if type(self) is SACLearner else type(self).__name__
        return SACLoss(pessimism=self.config.pessimism, learner=subclass)

    def networks(self, spec: EnvSpec) -> SACModel:
        """Return the networks, for the choice of an engine."""
        return SACModel(spec, self.actor, self.critics, self.target_critics)

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules with weights or statistics, by their names in checkpoints."""
        return {
            "actor": self.actor,
            "critics": self.critics,
            "slow": self.target_critics,
            "temperature": self.temperature,
        }


class Temperature(nn.Module):
    """Weight of the entropy in units of the reward, as a logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(initial)]))

    def forward(self) -> Tensor:
        """Return the temperature `[1]`, without gradient."""
        return self.log.detach().exp()


def _both(obs: Obs, next_obs: Obs) -> Obs:
    return {name: torch.cat([group, next_obs[name]]) for name, group in obs.items()}

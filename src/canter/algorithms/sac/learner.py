"""One update of SAC: critics, policy, temperature, and the critics' slow copies.

A action components, B rows, E critics, K atoms.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from canter.algorithms.sac.config import SACSettings
from canter.core.data.replay import Transitions
from canter.core.specs import EnvSpec
from canter.core.struct import Metrics, Obs, copy_all_, tree_map
from canter.engines.native.soft import ONE_THREAD, SoftEngine, SoftModel
from canter.functional import losses as soft
from canter.functional.statistics import masked_mean
from canter.nn.actor_critic import Actor
from canter.nn.optimizer import Optimizer, OptimizerConfig, ParameterGroup
from canter.nn.stack import Critics, batch_statistics, has_batch_norm

BLOCKED = "optim/nonfinite_steps"
METRICS = (
    *("loss/critic", "loss/policy", "policy/entropy", "policy/std", "policy/temperature", "value/mean"),
    *("value/target_std", "optim/grad_norm/policy", "optim/grad_norm/critic", "optim/learning_rate/policy"),
    *("optim/learning_rate/critic", BLOCKED),
)
"""All that an update has to tell."""


class Temperature(nn.Module):
    """What entropy is worth, as a logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(initial)]))

    def forward(self) -> Tensor:
        """The temperature `[1]`, without gradient."""
        return self.log.detach().exp()


class Learner:
    """Networks, optimisers and the mathematics of an update."""

    def __init__(self, config: SACSettings, actor: Actor, critics: Critics, action_dim: int) -> None:
        self.config, self.actor, self.critics = config, actor, critics
        self.target_entropy = config.temperature.target(action_dim)
        device = critics.support.device
        self.temperature = Temperature(config.temperature.initial).to(device)
        self.slow = copy.deepcopy(critics).requires_grad_(False)
        # Statistics of the observations are no parameters: the copy looks through the same ones.
        self.slow.encoder.normalizers = critics.encoder.normalizers
        critic_optimizer = config.critic_optimizer or config.optimizer
        self.optimizers = {
            "policy": _optimizer(actor, config.optimizer),
            "critic": _optimizer(critics, critic_optimizer),
            "temperature": _optimizer(self.temperature, config.temperature.optimizer),
        }
        self.flat = self.optimizers["critic"].adams[0].flat
        self.slow_flat = parameters_to_vector(self.slow.parameters()).detach()
        vector_to_parameters(self.slow_flat, self.slow.parameters())  # as views of it
        self.pieces = list(zip(self.slow_flat.split(ONE_THREAD), self.flat.split(ONE_THREAD), strict=True))
        """Of both, such as one thread does alone; cut once, which takes longer than to move a short one."""
        self.joint_critics, self.joint_actor = has_batch_norm(critics), has_batch_norm(actor)
        self.never, self.once = torch.zeros((), dtype=torch.bool, device=device), torch.ones((), device=device)
        self.metrics: Metrics = {name: torch.zeros((), device=device) for name in METRICS}
        """Of the last update of each kind, at addresses that stay."""
        self.engine: SoftEngine | None = None
        """Writes the gradients in place of autograd, which is the definition."""

    def update(
        self, batch: Transitions, noise: Tensor, learn_policy: bool, tell: tuple[bool, bool] = (True, True)
    ) -> None:
        """Learn from rows `[B, ...]`; `noise` `[2, B, A]` is that of the successors' and of the policy's actions.

        `tell` says whether the metrics of the critics and of the policy are made: only the last ones of an iteration
        are read, and making them costs some per cent of an update.
        """
        if self.engine is not None:
            self._update_by(self.engine, batch, noise, learn_policy, tell)
            return
        self.learn_critics(batch, noise[0], tell[0])
        if learn_policy:
            self.learn_policy(batch, noise[1], tell[1])
        with torch.no_grad():
            self.slow_flat.lerp_(self.flat, self.config.tau)

    def _update_by(
        self, engine: SoftEngine, batch: Transitions, noise: Tensor, learn_policy: bool, tell: tuple[bool, bool]
    ) -> None:
        """The same by an engine."""
        temperature = self.temperature()
        found = engine.learn_critics(batch, noise[0], temperature)
        self._take("critic", self._tensors(found) if tell[0] else {})
        if learn_policy:
            found = engine.learn_policy(batch, noise[1], temperature)
            told = {"policy/temperature": temperature.squeeze()} | self._tensors(found) if tell[1] else {}
            self._take("policy", told)
            if self.config.temperature.learned:  # the slope of `temperature_loss`, which is linear
                self.optimizers["temperature"].adams[0].gradient.fill_(found["policy/entropy"] - self.target_entropy)
                self._take("temperature", {})
        for slow, fast in self.pieces:
            slow.lerp_(fast, self.config.tau)

    def learn_critics(self, batch: Transitions, noise: Tensor, tell: bool = True) -> None:
        """Move the critics towards reward plus what their slow copies expect of the policy's next action."""
        with torch.no_grad():
            next_action, next_log_prob = soft.squashed_sample(self.params(batch.next_obs), noise)
        out, next_out = self._judge(batch, next_action)
        with torch.no_grad():
            target = self._target(batch, next_out, next_log_prob)
        if self.critics.atoms == 1:
            loss = masked_mean(0.5 * (out - target).square(), batch.valid).sum()
        else:
            loss = masked_mean(soft.cross_entropy(out, target), batch.valid).sum() / self.critics.members
        about: Metrics = {}
        if tell:
            means = target if self.critics.atoms == 1 else (target * self.critics.support).sum(-1)
            about = {"loss/critic": loss, "value/target_std": means.std()}
        self._step("critic", loss, about)

    def _judge(self, batch: Transitions, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """What the critics say of the rows, and their slow copies of the successors.

        Batch norms see both as one batch, in the critics and in the copies: prediction and target then come from the
        same statistics.
        """
        if not self.joint_critics:
            with torch.no_grad():
                next_out = self.slow(batch.next_obs, next_action)
            return self.critics(batch.obs, batch.action), next_out
        obs = _both(batch.obs, batch.next_obs)
        action, rows = torch.cat([batch.action, next_action]), len(next_action)
        with batch_statistics(self.critics), batch_statistics(self.slow):
            with torch.no_grad():
                next_out = self.slow(obs, action)[:, rows:]
            return self.critics(obs, action)[:, :rows], next_out

    def _target(self, batch: Transitions, next_out: Tensor, next_log_prob: Tensor) -> Tensor:
        """Returns `[B]` or distributions of returns `[B, K]` to learn."""
        critics, temperature = self.critics, self.temperature()
        if critics.atoms == 1:
            return soft.soft_target(batch.reward, batch.discount, self._agree(next_out), temperature, next_log_prob)
        probs = next_out.softmax(-1)
        probs = soft.lowest(probs, critics.support) if self.config.pessimism == "min" else probs.mean(0)
        reward, discount, log_prob = (x.unsqueeze(-1) for x in (batch.reward, batch.discount, next_log_prob))
        atoms = soft.soft_target(reward, discount, critics.support, temperature, log_prob)
        return soft.project(probs, atoms, *critics.ends)

    def learn_policy(self, batch: Transitions, noise: Tensor, tell: bool = True) -> None:
        """Move the policy towards actions of higher value and the temperature towards the target entropy."""
        if self.joint_actor:
            with batch_statistics(self.actor):
                params = self.params(_both(batch.obs, batch.next_obs))[: len(noise)]
        else:
            params = self.params(batch.obs)
        action, log_prob = soft.squashed_sample(params, noise)
        value = self._agree(self.critics.values(self.critics(batch.obs, action)))
        loss = soft.policy_loss(self.temperature(), log_prob, value).mean()
        about: Metrics = {}
        if tell:
            with torch.no_grad():
                about = {
                    "loss/policy": loss,
                    "policy/entropy": -log_prob.mean(),
                    "policy/std": params.chunk(2, -1)[1].exp().mean(),
                    "policy/temperature": self.temperature().squeeze(),
                    "value/mean": value.mean(),
                }
        self._step("policy", loss, about)
        if self.config.temperature.learned:
            error = soft.temperature_loss(self.temperature.log, log_prob, self.target_entropy).mean()
            self._step("temperature", error, {})

    def params(self, obs: Obs) -> Tensor:
        """Distribution parameters `[B, 2A]`."""
        return self.actor(tree_map(lambda group: group.unsqueeze(0), obs), (), None)[0].squeeze(0)

    def _agree(self, values: Tensor) -> Tensor:
        """`[E, B]` to `[B]`: the lowest, or the mean."""
        return values.amin(0) if self.config.pessimism == "min" else values.mean(0)

    def _step(self, name: str, loss: Tensor, metrics: Metrics) -> None:
        self.optimizers[name].backward(loss)
        self._take(name, {name: x.detach() for name, x in metrics.items()})

    def _take(self, name: str, metrics: Metrics) -> None:
        """A step by the gradients that were written."""
        optimizer = self.optimizers[name]
        metrics = optimizer.exchange_(metrics, self.once)
        done = optimizer.step(self.never)
        if metrics:
            rate = optimizer.adams[0].learning_rate
            metrics |= {f"optim/grad_norm/{name}": done["grad_norm"], f"optim/learning_rate/{name}": rate}
            copy_all_([self.metrics[key] for key in metrics], [value.detach() for value in metrics.values()])
        self.metrics[BLOCKED].add_(done["nonfinite_steps"])

    def _tensors(self, found: dict[str, float]) -> Metrics:
        return {name: torch.full_like(self.metrics[name], number) for name, number in found.items()}

    def schedule_(self, progress: Tensor) -> None:
        """Set the learning rates at the start of an iteration."""
        self.metrics[BLOCKED].zero_()
        for optimizer in self.optimizers.values():
            optimizer.schedule_(progress)

    def described(self, spec: EnvSpec) -> SoftModel:
        """What the gradients depend on, for an engine."""
        gradients = self.optimizers["policy"].gradients | self.optimizers["critic"].gradients
        networks, changed = (self.actor, self.critics, self.slow), type(self) is not Learner
        return SoftModel(spec, *networks, self.config.pessimism, gradients, changed)

    def modules(self) -> dict[str, nn.Module]:
        """Everything with weights or statistics, by name."""
        return {"actor": self.actor, "critics": self.critics, "slow": self.slow, "temperature": self.temperature}


def _optimizer(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    return Optimizer({"all": ParameterGroup(list(module.parameters()), config)}, clip_jointly=True)


def _both(obs: Obs, next_obs: Obs) -> Obs:
    return {name: torch.cat([group, next_obs[name]]) for name, group in obs.items()}

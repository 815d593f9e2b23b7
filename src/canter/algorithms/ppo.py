"""Proximal policy optimisation.

T steps, N environments, L sequence length (1 without memory), S sequences, P distribution parameters.

The critic does not act: values are computed after collection, in one batched pass over the rollout with the weights
that collected it. That is the same numbers for a fraction of the work.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Metrics
from canter.algorithms.phase import LossOutput, Phase
from canter.data.rollout import Rollout, as_sequences
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.returns import gae, successor_values
from canter.functional.stats import explained_variance, masked_mean, normalize
from canter.nn.actor_critic import ActorCritic, ModelConfig, Policy
from canter.optim import Optimizer, OptimizerConfig, ParameterGroup
from canter.schedules import AnySchedule, Constant
from canter.seeding import derive_seed
from canter.specs import EnvSpec
from canter.struct import Obs, State, TensorStruct, tree_map


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO; A2C is `surrogate="vanilla", epochs=1, num_minibatches=1`."""

    horizon: int = 128
    """Steps per rollout in each environment; independent of how long episodes are."""
    epochs: int = 10
    """Passes over each rollout."""
    num_minibatches: int = 8
    """Minibatches per pass; must divide `horizon * num_envs`."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Bias-variance trade-off of the advantage estimate; 1 is Monte Carlo, 0 one-step TD."""
    surrogate: Literal["clipped", "smooth_clipped", "vanilla"] = "clipped"
    """Policy objective."""
    clip_ratio: float = 0.2
    """How far the probability ratio may move from 1 before its gain stops counting."""
    value_loss: Literal["mse", "clipped", "huber"] = "mse"
    """Error of the critic: half the square, the pessimistic clipped half square, or Huber's."""
    value_clip: float = 0.2
    """For `value_loss="clipped"`: how far a value may move, in the (normalised) units of the value."""
    value_coef: float = 1.0
    """Weight of the value loss."""
    entropy_coef: AnySchedule = field(default_factory=lambda: Constant(0.0))
    """Weight of the entropy bonus."""
    advantage_normalization: Literal["rollout", "minibatch", "none"] = "rollout"
    """Over which rows advantages are standardised."""
    recompute_advantage: bool = False
    """Judge the rollout anew, by the critic as it is then, before each pass after the first; a clipped value loss then
    measures from there."""
    target_kl: float | None = None
    """Stop an update early once a minibatch finds the policy further than this from the one that acted."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser of the policy, and of the critic unless that has its own."""
    critic_optimizer: OptimizerConfig | None = None
    """Separate optimiser for the critic, with its own learning rate and schedule."""
    gradient_clipping: Literal["joint", "per_network"] = "joint"
    """Whether one gradient norm covers both networks or each has its own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Networks, distribution and normalisation."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        for name in ("horizon", "epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in 0..1")
        for name in ("clip_ratio", "value_clip", "target_kl"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")

    def build(self, spec: EnvSpec, seed: int) -> PPO:
        """PPO for an environment, on the environment's device."""
        check_batch(self.horizon, spec.num_envs, self.num_minibatches)
        check_discount(self.gamma, spec)
        return PPO(self, spec, seed)


def check_batch(horizon: int, num_envs: int, num_minibatches: int) -> None:
    """Refuse minibatches that do not come out even, and offer the nearest numbers that do."""
    batch = horizon * num_envs
    if batch % num_minibatches == 0:
        return
    fewer = next(n for n in range(num_minibatches, 0, -1) if batch % n == 0)
    more = next((n for n in range(num_minibatches, batch) if batch % n == 0), batch)
    step = num_minibatches // math.gcd(num_minibatches, num_envs)
    raise ValueError(
        f"num_minibatches={num_minibatches} does not divide horizon * num_envs = {horizon} * {num_envs} = {batch}; "
        f"use num_minibatches={fewer} or {more}, or horizon={math.ceil(horizon / step) * step}"
    )


def check_discount(gamma: float, spec: EnvSpec) -> None:
    """Refuse gamma = 1 where values would have no fixed point, warn where they might not."""
    if gamma < 1 or spec.truncates is False:
        return
    reason = (
        "with gamma=1 a value is the whole future reward; where episodes are cut off and bootstrapped from that value, "
        "it has no fixed point and drifts without end"
    )
    if spec.truncates:
        raise ValueError(
            f"gamma=1 on {spec.env_id or 'this environment'}, whose episodes are truncated: {reason}. "
            "Use gamma < 1, or declare finite_horizon=True if the deadline is part of the task and the observation "
            "tells the time"
        )
    warnings.warn(f"gamma=1: {reason}. This is fine only if every episode terminates by itself", stacklevel=3)


@dataclass
class PPORecord(TensorStruct):
    """What PPO remembers of each step, `[N, ...]`."""

    action: Tensor
    """The sample itself, never clipped or rescaled."""
    log_prob: Tensor
    dist_params: Tensor


@dataclass
class Judgement(TensorStruct):
    """What the critic makes of a rollout, `[T, N]` in the units of the reward."""

    value: Tensor
    advantage: Tensor
    return_: Tensor


@dataclass
class PPOBatch(TensorStruct):
    """Rows to learn from, `[L, S, ...]`."""

    obs: Obs
    action: Tensor
    log_prob: Tensor
    dist_params: Tensor
    value: Tensor
    """Values before the update, in normalised units."""
    return_: Tensor
    """Targets of the critic, in the same units."""
    advantage: Tensor
    valid: Tensor


class PPO:
    """Acts by sampling, learns by a clipped policy gradient with GAE."""

    def __init__(self, config: PPOConfig, spec: EnvSpec, seed: int) -> None:
        self.config, self.spec, self.horizon = config, spec, config.horizon
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init"))
            self.model: ActorCritic = config.model.build(spec).to(spec.device)
        for tensor in self.model.state_dict().values():
            distributed.broadcast_(tensor)
        self.distribution = self.model.distribution
        self.policy = Policy(self.model.actor, self.distribution)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.shuffle_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        self.progress = torch.zeros((), device=spec.device)
        self.entropy_coef = torch.tensor(config.entropy_coef.initial, device=spec.device)
        self.surrogate = SURROGATES[config.surrogate]
        self.value_error = VALUE_LOSSES[config.value_loss]
        self.optimizer = build_optimizer(config, self.model)
        self.phases = [
            Phase(
                loss=self.loss,
                optimizer=self.optimizer,
                epochs=config.epochs,
                num_minibatches=config.num_minibatches,
                generator=self.shuffle_rng,
                target_kl=math.inf if config.target_kl is None else config.target_kl,
            )
        ]

    def empty_record(self) -> PPORecord:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        params = torch.zeros((self.spec.num_envs, self.distribution.param_dim), device=self.spec.device)
        return PPORecord(self.distribution.mode(params), params[:, 0], params)

    @torch.no_grad()
    def act(self, obs: Obs, state: State) -> tuple[Tensor, PPORecord, State]:
        """Sample actions; the environment gets them within bounds, the record keeps them as drawn."""
        params, state = self.policy.params(obs, state)
        action = self.distribution.sample(params, self.policy_rng)
        record = PPORecord(action, self.distribution.log_prob(params, action), params)
        return self.distribution.to_env(action), record, state

    def update(self, rollout: Rollout[PPORecord]) -> Metrics:
        """Improve policy and critic on one rollout."""
        self.optimizer.schedule_(self.progress)
        self.config.entropy_coef.set_(self.entropy_coef, self.progress)
        batch, metrics = self.targets(rollout)
        refresh = (lambda: self.batch(rollout, self.judge(rollout))) if self.config.recompute_advantage else None
        for phase in self.phases:
            metrics |= phase.run(batch, refresh)
        # After the phases: the recorded distribution parameters belong to the statistics they were computed with, or
        # the first ratio would not be 1 and the KL would be biased.
        self.model.update_statistics(tree_map(lambda x: x[:-1], rollout.obs), rollout.valid)
        return metrics

    @torch.no_grad()
    def targets(self, rollout: Rollout[PPORecord]) -> tuple[PPOBatch, Metrics]:
        """What to learn from a rollout; moves the value statistics to include its returns."""
        judged = self.judge(rollout)
        metrics = {
            "value/explained_variance": explained_variance(judged.value, judged.return_, rollout.valid),
            "value/mean": masked_mean(judged.value, rollout.valid),
        }
        std = self.distribution.std(rollout.record.dist_params)
        if std is not None:
            metrics["policy/std"] = masked_mean(std.mean(-1), rollout.valid)
        self.model.critic.head.update_statistics(judged.return_, rollout.valid)
        return self.batch(rollout, judged), metrics

    @torch.no_grad()
    def judge(self, rollout: Rollout[PPORecord]) -> Judgement:
        """Values, advantages and returns by the critic as it is now."""
        head = self.model.critic.head
        value = head.normalizer.inverse(self.model.critic(rollout.obs, (), None)[0])
        final_value = None
        if rollout.final_obs is not None:
            final_value = head.normalizer.inverse(self.model.critic(rollout.final_obs, (), None)[0])
        advantage, return_ = gae(
            reward=rollout.reward,
            value=value[:-1],
            next_value=successor_values(value, rollout.done, final_value),
            terminated=rollout.terminated,
            done=rollout.done,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )
        return Judgement(value[:-1], advantage, return_)

    @torch.no_grad()
    def batch(self, rollout: Rollout[PPORecord], judged: Judgement) -> PPOBatch:
        """Rows for the loss, with old values and returns in the units of one set of statistics."""
        normalizer, advantage = self.model.critic.head.normalizer, judged.advantage
        if self.config.advantage_normalization == "rollout":
            advantage = normalize(advantage, rollout.valid)
        batch = PPOBatch(
            obs=tree_map(lambda x: x[:-1], rollout.obs),
            action=rollout.record.action,
            log_prob=rollout.record.log_prob,
            dist_params=rollout.record.dist_params,
            value=normalizer(judged.value),
            return_=normalizer(judged.return_),
            advantage=advantage,
            valid=rollout.valid,
        )
        return as_sequences(batch, length=1)

    def loss(self, batch: PPOBatch) -> LossOutput:
        """Policy, value and entropy terms of one minibatch; rows that are not valid count for nothing."""
        config, valid = self.config, batch.valid
        params, value = self.model(batch.obs, (), None)
        log_prob = self.distribution.log_prob(params, batch.action)
        advantage = batch.advantage
        if config.advantage_normalization == "minibatch":
            advantage = normalize(advantage, valid)
        with torch.no_grad():
            kl = self.distribution.kl(batch.dist_params, params)
            ratio = torch.exp(log_prob - batch.log_prob)
            clipped = ((ratio - 1).abs() > config.clip_ratio).to(kl.dtype)
        terms = torch.stack(
            [
                self.surrogate(log_prob, batch.log_prob, advantage, config.clip_ratio),
                self.value_error(value, batch.value, batch.return_, config.value_clip),
                self.distribution.entropy(params),
                kl,
                clipped,
            ]
        )
        policy_loss, value_loss, entropy, kl, clip_fraction = masked_mean(terms, valid).unbind()
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy,
            "policy/clip_fraction": clip_fraction,
        }
        return LossOutput(policy_loss + config.value_coef * value_loss - self.entropy_coef * entropy, kl, metrics)

    def set_progress(self, fraction: float) -> None:
        """Tell how much of the run is done, 0..1."""
        self.progress.fill_(fraction)

    def state_dict(self) -> dict[str, Any]:
        """Weights, statistics, moments, learning rates, coefficients and random states."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "entropy_coef": self.entropy_coef.clone(),
            "policy_rng": self.policy_rng.get_state(),
            "shuffle_rng": self.shuffle_rng.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.entropy_coef.copy_(state["entropy_coef"])
        self.policy_rng.set_state(state["policy_rng"])
        self.shuffle_rng.set_state(state["shuffle_rng"])


def build_optimizer(config: PPOConfig, model: ActorCritic) -> Optimizer:
    """One group for everything where one learning rate and one norm serve, else one for each network."""
    policy, critic = model.policy_parameters(), model.critic_parameters()
    jointly = config.gradient_clipping == "joint"
    if config.critic_optimizer is None and jointly:
        return Optimizer({"model": ParameterGroup(policy + critic, config.optimizer)}, clip_jointly=True)
    groups = {
        "policy": ParameterGroup(policy, config.optimizer),
        "critic": ParameterGroup(critic, config.critic_optimizer or config.optimizer),
    }
    return Optimizer(groups, clip_jointly=jointly)

"""Proximal policy optimisation.

T steps, N environments, L sequence length (1 without memory), S sequences, P distribution parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.action_bounds import BoundLossConfig
from canter.algorithms.base import Metrics, algorithms
from canter.algorithms.central_value import CentralValueConfig
from canter.algorithms.checks import check_batch, check_discount
from canter.algorithms.extension import AnyExtensionConfig, Extensions, ModelOutput
from canter.algorithms.fused import fits, fused_loss, loss_by_hand
from canter.algorithms.judge import Judge, Judgement
from canter.algorithms.objectives import AverageReward, Discounted, Objective
from canter.algorithms.on_device import Indices, OnDevice, on_device
from canter.algorithms.phase import LossOutput, Phase
from canter.algorithms.ppo_batch import PPOBatch, PPORecord
from canter.algorithms.ppo_declared import LeavesCritic, PPODeclared
from canter.algorithms.rewards import RewardConfig
from canter.data.rollout import Rollout, as_sequences
from canter.functional.losses import SURROGATES, VALUE_LOSSES
from canter.functional.stats import explained_variance, masked_mean, normalize
from canter.kernels import usable
from canter.kernels.streams import beside
from canter.nn.actor_critic import ActorCritic, ModelConfig
from canter.nn.by_hand import by_hand
from canter.optim import Optimizer, OptimizerConfig, ParameterGroup
from canter.schedules import AnySchedule, Constant
from canter.seeding import derive_seed
from canter.specs import EnvSpec
from canter.struct import Obs, State, tree_copy_, tree_map


@algorithms.register("ppo")
@dataclass(frozen=True, kw_only=True)
class PPOConfig(PPODeclared):
    """Settings of PPO; A2C is `surrogate="vanilla", epochs=1, num_minibatches=1`."""

    horizon: int = 128
    """Steps per rollout in each environment; independent of how long episodes are."""
    epochs: int = 10
    """Passes over each rollout."""
    num_minibatches: int = 8
    """Minibatches per pass; must divide `horizon * num_envs`, with memory the number of sequences."""
    sequence_length: int = 16
    """With memory: steps through which gradients flow back; must divide `horizon`. Without memory it has no effect."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What is made of the reward before learning from it; what is reported is always the raw one."""
    objective: Literal["discounted", "average"] = "discounted"
    """What to maximise: the discounted sum of rewards, or, for tasks that never end, the reward per unit of time."""
    gamma: float = 0.99
    """Discount; for `objective="average"` only of the returns that `reward.normalize` looks at."""
    discount_per: Literal["step", "time"] = "step"
    """Whether `gamma` discounts a step or a unit of time, for steps of varying duration."""
    average_step: float = 0.1
    """For `objective="average"`: share of a new rollout in the reward rate and in the centre of the values."""
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
    bound_loss: BoundLossConfig | None = None
    """Keep the mean of a Gaussian policy near the bounds of the action."""
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
    central_value: CentralValueConfig | None = None
    """Train the critic apart from the policy, in passes and minibatches of its own."""
    gradient_clipping: Literal["joint", "per_network"] = "joint"
    """Whether one gradient norm covers both networks or each has its own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Networks, distribution and normalisation."""
    extensions: tuple[AnyExtensionConfig, ...] = ()
    """What is added to the algorithm: further rewards, losses and phases, in this order."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        for name in ("horizon", "epochs", "num_minibatches", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in 0..1")
        if not 0 < self.average_step <= 1:
            raise ValueError(f"average_step={self.average_step} must lie above 0 and up to 1")
        for name in ("clip_ratio", "value_clip", "target_kl"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.central_value and (self.critic_optimizer or self.model.shared_trunk):
            rival = "critic_optimizer" if self.critic_optimizer else "model.shared_trunk"
            raise ValueError(f"central_value has a network and an optimizer of its own: it leaves no room for {rival}")

    def build(self, spec: EnvSpec, seed: int) -> PPO:
        """PPO for an environment, on the environment's device."""
        if self.objective == "discounted":
            check_discount(self.gamma, spec)
        return PPO(self, spec, seed)

    def build_objective(self) -> Objective:
        """What values, advantages and returns are of."""
        if self.objective == "average":
            return AverageReward(self.average_step, self.gae_lambda)
        return Discounted(self.gamma, self.discount_per, self.gae_lambda)


class PPO(LeavesCritic):
    """Acts by sampling, learns by a clipped policy gradient with GAE."""

    def __init__(self, config: PPOConfig, spec: EnvSpec, seed: int) -> None:
        self.config, self.spec, self.horizon = config, spec, config.horizon
        with torch.random.fork_rng(devices=[spec.device] if spec.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(seed, "init"))
            self.model: ActorCritic = config.model.build(spec).to(spec.device)
            self.shuffle_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
            with spec.device:  # where an extension makes its parameters, before it hands them to an optimiser
                built = [extension.build(spec, self.model, self.shuffle_rng) for extension in config.extensions]
            self.extensions = Extensions(built)
        for tensor in (*self.model.state_dict().values(), *self.extensions.state_dict().values()):
            distributed.broadcast_(tensor)
        self.policy, self.distribution = self.model.policy, self.model.policy.distribution
        self.sequence_length = config.sequence_length if self.model.has_memory else 1
        self.rewards = config.reward.build(spec, config.gamma, config.discount_per)
        self.objective = config.build_objective().to(spec.device)
        self.judge = Judge(
            self.model, self.objective, spec.num_envs, self.sequence_length, find_kernels=lambda: self.on_device
        )
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.progress = torch.zeros((), device=spec.device)
        self.entropy_coef = torch.tensor(config.entropy_coef.initial, device=spec.device)
        self.policy_kl = torch.zeros((), device=spec.device)
        self.surrogate = SURROGATES[config.surrogate]
        self.value_error = VALUE_LOSSES[config.value_loss]
        # A subclass may have changed the terms; the kernel knows only these.
        self.has_kernel = type(self) is PPO and fits(config, self.distribution, spec.device)
        self.bound_error = config.bound_loss and config.bound_loss.build(self.distribution, spec.device)
        self.phases = self._build_phases()
        on_cpu = spec.device.type == "cpu" and self.has_kernel and not config.extensions
        gradients = {p: view for phase in self.phases.values() for p, view in phase.optimizer.gradients.items()}
        self.by_hand = by_hand(self.model, gradients) if on_cpu else None
        on_gpu = spec.device.type == "cuda" and self.has_kernel
        self.kernels = on_device(config, self.model, self.phases["policy"].optimizer) if on_gpu else None

    @property
    def on_device(self) -> OnDevice | None:
        """Kernels for whole networks, where there are any for these and they may multiply in TF32."""
        return self.kernels if torch.get_float32_matmul_precision() != "highest" else None

    def _build_phases(self) -> dict[str, Phase[Any]]:
        """One phase for everything, or one for the policy and then one for the critic."""
        config, central, model = self.config, self.config.central_value, self.model
        policy, critic = model.policy_parameters(), model.critic_parameters()
        groups = {"model": ParameterGroup(policy + critic, config.optimizer)}
        if central is not None:
            groups = {"policy": ParameterGroup(policy, config.optimizer)}
        elif config.critic_optimizer is not None or config.gradient_clipping == "per_network":
            own = config.critic_optimizer or config.optimizer
            groups = {"policy": ParameterGroup(policy, config.optimizer), "critic": ParameterGroup(critic, own)}
        check_batch(self.horizon, self.spec.num_envs, config.num_minibatches, self.sequence_length)
        phases = {
            "policy": Phase(
                loss=self.quick_loss if central is None else self.policy_loss,
                optimizer=Optimizer(groups, clip_jointly=config.gradient_clipping == "joint"),
                epochs=config.epochs,
                num_minibatches=config.num_minibatches,
                generator=self.shuffle_rng,
                target_kl=math.inf if config.target_kl is None else config.target_kl,
            )
        }
        if central is not None:
            key = "central_value."
            check_batch(self.horizon, self.spec.num_envs, central.num_minibatches, self.sequence_length, key)
            phases["central_value"] = Phase(
                loss=self.value_loss,
                optimizer=Optimizer({"critic": ParameterGroup(critic, central.optimizer)}, clip_jointly=True),
                epochs=central.epochs,
                num_minibatches=central.num_minibatches,
                generator=self.shuffle_rng,
                name="central_value",
            )
        return self.extensions.add_phases(phases)

    def empty_record(self) -> PPORecord:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        params = torch.zeros((self.spec.num_envs, self.distribution.param_dim), device=self.spec.device)
        return PPORecord(self.distribution.mode(params), params)

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, PPORecord, State]:
        """Sample actions; the environment gets them within bounds, the record keeps them as drawn."""
        quick = self.by_hand or self.on_device
        if quick is not None:
            for_env, *record = quick.act(obs, self.policy_rng)
            return for_env, PPORecord(*record), state
        with torch.no_grad():
            params, state = self.policy.params(obs, state, reset)
            action = self.distribution.sample(params, self.policy_rng)
            return self.distribution.to_env(action), PPORecord(action, params), state

    def update(self, rollout: Rollout[PPORecord]) -> Metrics:
        """Improve policy and critic on one rollout."""
        config = self.config
        config.entropy_coef.set_(self.entropy_coef, self.progress)
        rollout = self.paid(rollout)
        batch, judged = self.targets(rollout)
        with beside(self.model.side_stream) as join:
            metrics = self.describe(rollout, judged)
        refresh = (lambda: self._read(self.batch(rollout, self.judge(rollout)))) if config.recompute_advantage else None
        for phase in self.phases.values():
            phase.optimizer.schedule_(self.progress)
            metrics |= phase.run(self._read(batch), refresh)
            self.policy_kl.copy_(metrics["policy/kl"])
        # After the phases: the recorded distribution parameters belong to the statistics they were computed with, or
        # the first ratio would not be 1 and the KL would be biased.
        self.model.update_statistics(tree_map(lambda x: x[:-1], rollout.obs), rollout.valid)
        self.judge.advance(judged)
        self.objective.centre_(self.model.critic.head, judged.return_, rollout.valid)
        join(*metrics.values())
        return metrics

    @torch.no_grad()
    def paid(self, rollout: Rollout[PPORecord]) -> Rollout[PPORecord]:
        """The rollout with the rewards to learn from; call it once for each, because statistics move."""
        return self.extensions.reward(self.rewards(rollout))

    @torch.no_grad()
    def targets(self, rollout: Rollout[PPORecord]) -> tuple[PPOBatch, Judgement]:
        """What to learn from a new rollout; moves the value statistics to include its returns."""
        judged = self.judge(rollout, new=True)
        self.model.critic.head.update_statistics(judged.return_, rollout.valid)
        return self.batch(rollout, judged), judged

    @torch.no_grad()
    def describe(self, rollout: Rollout[PPORecord], judged: Judgement) -> Metrics:
        """What can be said before learning from a rollout."""
        metrics = {
            "value/explained_variance": explained_variance(judged.value, judged.return_, rollout.valid),
            "value/mean": masked_mean(judged.value, rollout.valid),
        } | self.objective.metrics()
        std = self.distribution.std(rollout.record.dist_params)
        return metrics if std is None else metrics | {"policy/std": masked_mean(std.mean(-1), rollout.valid)}

    @torch.no_grad()
    def batch(self, rollout: Rollout[PPORecord], judged: Judgement) -> PPOBatch:
        """Rows for the loss, with old values and returns in the units of one set of statistics."""
        normalizer, advantage = self.model.critic.head.normalizer, judged.advantage
        if self.config.advantage_normalization == "rollout":
            advantage = normalize(advantage, rollout.valid)
        rows = PPOBatch(
            obs=tree_map(lambda x: x[:-1], rollout.obs),
            action=rollout.record.action,
            log_prob=self.distribution.log_prob(rollout.record.dist_params, rollout.record.action),
            dist_params=rollout.record.dist_params,
            value=normalizer(judged.value),
            return_=normalizer(judged.return_),
            advantage=advantage,
            valid=rollout.valid,
            reset=rollout.reset[:-1],
            policy_state=(),
            critic_state=(),
        )
        states = as_sequences({"policy_state": rollout.state, "critic_state": judged.state}, length=1)
        return replace(as_sequences(rows, self.sequence_length), **states)

    def loss(self, batch: PPOBatch) -> LossOutput:
        """Policy, value and entropy terms of one minibatch."""
        batch = self.extensions.augment(batch)
        states = (tree_map(lambda x: x[0], state) for state in (batch.policy_state, batch.critic_state))
        params, value = self.model(batch.obs, *states, batch.reset)
        if self.has_kernel and usable(params):
            output = fused_loss(self.config, batch, params, value, self.entropy_coef)
        else:
            output = self._weigh(self.policy_terms(batch, params) | self.value_terms(batch, value), batch.valid)
        return self.extensions.extend(output, batch, ModelOutput(params, value))

    def _read(self, batch: PPOBatch) -> PPOBatch | Indices:
        """The batch with what networks make of observations before their first layer, if `quick_loss` is by hand."""
        if self.on_device is not None:
            return self.on_device.read(batch)
        if self.by_hand is None or self.config.central_value is not None:
            return batch
        return replace(batch, obs=self.by_hand.read_rows(batch.obs))

    def quick_loss(self, batch: Any) -> LossOutput:
        """`loss` of what `_read` gives, with gradients found by hand where that is known for these settings."""
        if self.on_device is not None:
            return self.on_device.loss(batch, self.entropy_coef)
        if self.by_hand is None:
            return self.loss(batch)
        return loss_by_hand(self.config, self.distribution, batch, self.by_hand, self.entropy_coef)

    def policy_loss(self, batch: PPOBatch) -> LossOutput:
        """The same without the critic."""
        batch = self.extensions.augment(batch)
        params, _ = self.model.actor(batch.obs, tree_map(lambda x: x[0], batch.policy_state), batch.reset)
        output = self._weigh(self.policy_terms(batch, params), batch.valid)
        return self.extensions.extend(output, batch, ModelOutput(params, None))

    def value_loss(self, batch: PPOBatch) -> LossOutput:
        """The critic's part, for a phase of its own."""
        value, _ = self.model.critic(batch.obs, tree_map(lambda x: x[0], batch.critic_state), batch.reset)
        return self._weigh(self.value_terms(batch, value), batch.valid)

    def policy_terms(self, batch: PPOBatch, params: Tensor) -> Metrics:
        """Surrogate, entropy, KL, whether the ratio was clipped, how far the mean is out of bounds; each `[L, B]`."""
        advantage, clip_ratio = batch.advantage, self.config.clip_ratio
        if self.config.advantage_normalization == "minibatch":
            advantage = normalize(advantage, batch.valid)
        log_prob = self.distribution.log_prob(params, batch.action)
        with torch.no_grad():
            kl = self.distribution.kl(batch.dist_params, params)
            clipped = ((torch.exp(log_prob - batch.log_prob) - 1).abs() > clip_ratio).to(kl.dtype)
        terms = {
            "loss/policy": self.surrogate(log_prob, batch.log_prob, advantage, clip_ratio),
            "policy/entropy": self.distribution.entropy(params),
            "policy/kl": kl,
            "policy/clip_fraction": clipped,
        }
        return terms if self.bound_error is None else terms | {"loss/bound": self.bound_error(params)}

    def value_terms(self, batch: PPOBatch, value: Tensor) -> Metrics:
        """The critic's error `[L, B]`."""
        return {"loss/value": self.value_error(value, batch.value, batch.return_, self.config.value_clip)}

    def _weigh(self, terms: Metrics, valid: Tensor) -> LossOutput:
        """Means of all terms over the valid rows, and their weighted sum; other rows count for nothing."""
        means = dict(zip(terms, masked_mean(torch.stack(list(terms.values())), valid).unbind(), strict=True))
        weights = {"loss/policy": 1.0, "loss/value": self.config.value_coef, "policy/entropy": -self.entropy_coef}
        weights["loss/bound"] = self.config.bound_loss.coef if self.config.bound_loss else 0.0
        loss = torch.stack([means[name] * weight for name, weight in weights.items() if name in means]).sum()
        return LossOutput(loss, means.get("policy/kl", self.policy_kl), means)

    def generators(self) -> list[torch.Generator]:
        """The random streams of acting and of shuffling."""
        return [self.policy_rng, self.shuffle_rng]

    def transform(self, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the losses and the networks that act and judge by what `compile` makes of them."""
        self.by_hand = self.kernels = None
        for phase in self.phases.values():
            phase.loss = compile(phase.loss)
        self.policy.actor.forward = compile(self.policy.actor.forward)
        self.model.critic.unroll = compile(self.model.critic.unroll)

    def set_progress(self, fraction: float | Tensor) -> None:
        """Tell how much of the run is done, 0..1."""
        self.progress.fill_(fraction)

    def state_dict(self) -> dict[str, Any]:
        """Weights, statistics, memory, moments, learning rates, coefficients and random states."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "rewards": {name: tensor.clone() for name, tensor in self.rewards.state_dict().items()},
            "objective": {name: tensor.clone() for name, tensor in self.objective.state_dict().items()},
            "extensions": {name: tensor.clone() for name, tensor in self.extensions.state_dict().items()},
            "critic_state": tree_map(lambda x: x.clone(), self.judge.state),
            "optimizers": {name: phase.optimizer.state_dict() for name, phase in self.phases.items()},
            "entropy_coef": self.entropy_coef.clone(),
            "policy_rng": self.policy_rng.get_state(),
            "shuffle_rng": self.shuffle_rng.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        self.model.load_state_dict(state["model"])
        self.rewards.load_state_dict(state["rewards"])
        self.objective.load_state_dict(state["objective"])
        self.extensions.load_state_dict(state["extensions"])
        tree_copy_(self.judge.state, state["critic_state"])
        for name, phase in self.phases.items():
            phase.optimizer.load_state_dict(state["optimizers"][name])
        self.entropy_coef.copy_(state["entropy_coef"])
        self.policy_rng.set_state(state["policy_rng"])
        self.shuffle_rng.set_state(state["shuffle_rng"])

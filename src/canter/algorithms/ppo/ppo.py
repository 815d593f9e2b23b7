"""Proximal policy optimisation.

T steps, N environments, L sequence length (1 without memory), S sequences, P distribution parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import algorithms
from canter.algorithms.extension import AnyExtensionConfig, Extensions
from canter.algorithms.phase import Phase
from canter.algorithms.ppo.central_value import CentralValueConfig
from canter.algorithms.ppo.checks import check_batch, check_discount
from canter.algorithms.ppo.judge import Judge, Judgement
from canter.algorithms.ppo.objectives import AverageReward, Discounted, Objective
from canter.algorithms.ppo.rewards import RewardConfig
from canter.data.rollout import Rollout, as_sequences
from canter.distributions import Distribution
from canter.engines.autograd import policy_terms
from canter.engines.base import Coefs, PPOLoss
from canter.engines.batch import PPOBatch, PPORecord
from canter.engines.bound import BoundLossConfig
from canter.engines.choose import Choice, EngineName, choose
from canter.functional.stats import explained_variance, masked_mean, normalize
from canter.kernels.streams import beside, side_stream
from canter.nn.actor_critic import ActorCritic, ModelConfig
from canter.optim import Optimizer, OptimizerConfig, ParameterGroup
from canter.schedules import AdaptiveKL, AnySchedule, Constant
from canter.seeding import derive_seed
from canter.specs import EnvSpec
from canter.struct import Metrics, Obs, State, tree_copy_, tree_map


@algorithms.register("ppo")
@dataclass(frozen=True, kw_only=True)
class PPOConfig:
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
        if not self.value_coef > 0:
            raise ValueError(f"value_coef={self.value_coef} must be above 0")
        if isinstance(self.entropy_coef, AdaptiveKL):
            raise ValueError("entropy_coef: adaptive_kl moves learning rates; use a number, linear or constant")
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

    def build_loss(self, distribution: Distribution, device: torch.device) -> PPOLoss:
        """The loss that these settings describe, without what extensions add."""
        return PPOLoss(
            surrogate=self.surrogate,
            clip_ratio=self.clip_ratio,
            value_loss=self.value_loss,
            value_clip=self.value_clip,
            value_coef=self.value_coef,
            advantage="minibatch" if self.advantage_normalization == "minibatch" else "given",
            bound=self.bound_loss and self.bound_loss.build(distribution, device),
        )


class PPO:
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
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.progress = torch.zeros((), device=spec.device)
        self.coefs = Coefs(entropy=torch.tensor(config.entropy_coef.initial, device=spec.device))
        self.policy_kl = torch.zeros((), device=spec.device)
        self.stream = side_stream(spec.device)
        self.losses, self.optimizers = self._build_losses(), self._build_optimizers()
        self.judge = Judge(self.model, self.objective, spec.num_envs, self.sequence_length)
        self.use_engine("auto")

    def _build_losses(self) -> dict[str, PPOLoss]:
        """The loss of each phase: one for everything, or one for the policy and then one for the critic."""
        loss = self.config.build_loss(self.distribution, self.spec.device)
        # A subclass may have changed the terms, which only the definition can follow.
        own = None if type(self).policy_terms is PPO.policy_terms else self.policy_terms
        both = replace(loss, policy_terms=own, augment=self.extensions.augments(), terms=self.extensions.terms())
        if self.config.central_value is None:
            return {"policy": both}
        return {
            "policy": replace(both, value_loss=None),
            "central_value": replace(loss, surrogate=None, bound=None, advantage="given"),
        }

    def _build_optimizers(self) -> dict[str, Optimizer]:
        """The optimiser of each phase."""
        config, central, model = self.config, self.config.central_value, self.model
        policy, critic = model.policy_parameters(), model.critic_parameters()
        groups = {"model": ParameterGroup(policy + critic, config.optimizer)}
        if central is not None:
            groups = {"policy": ParameterGroup(policy, config.optimizer)}
        elif config.critic_optimizer is not None or config.gradient_clipping == "per_network":
            own = config.critic_optimizer or config.optimizer
            groups = {"policy": ParameterGroup(policy, config.optimizer), "critic": ParameterGroup(critic, own)}
        optimizers = {"policy": Optimizer(groups, clip_jointly=config.gradient_clipping == "joint")}
        if central is not None:
            own = ParameterGroup(critic, central.optimizer)
            optimizers["central_value"] = Optimizer({"critic": own}, clip_jointly=True)
        return optimizers

    def use_engine(self, name: EngineName) -> None:
        """Compute by this engine from now on; raises ValueError where it cannot."""
        self.engines: dict[str, Choice] = {
            phase: choose(loss, self.model, self.optimizers[phase], name) for phase, loss in self.losses.items()
        }
        self.engine = self.engines["policy"].engine
        self.judge.engine = self.engines.get("central_value", self.engines["policy"]).engine
        config, central = self.config, self.config.central_value
        check_batch(self.horizon, self.spec.num_envs, config.num_minibatches, self.sequence_length)
        phases: dict[str, Phase[Any]] = {
            "policy": Phase(
                self.engine,
                config.epochs,
                config.num_minibatches,
                self.shuffle_rng,
                target_kl=math.inf if config.target_kl is None else config.target_kl,
            )
        }
        if central is not None:
            key = "central_value."
            check_batch(self.horizon, self.spec.num_envs, central.num_minibatches, self.sequence_length, key)
            phases["central_value"] = Phase(
                self.judge.engine, central.epochs, central.num_minibatches, self.shuffle_rng, name="central_value"
            )
        self.phases = self.extensions.add_phases(phases)

    def empty_record(self) -> PPORecord:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        params = torch.zeros((self.spec.num_envs, self.distribution.param_dim), device=self.spec.device)
        return PPORecord(self.distribution.mode(params), params)

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, PPORecord, State]:
        """Sample actions; the environment gets them within bounds, the record keeps them as drawn."""
        for_env, action, params, state = self.engine.act(obs, state, reset, self.policy_rng)
        return for_env, PPORecord(action, params), state

    def update(self, rollout: Rollout[PPORecord]) -> Metrics:
        """Improve policy and critic on one rollout."""
        config = self.config
        config.entropy_coef.set_(self.coefs.entropy, self.progress)
        rollout = self.with_rewards(rollout)
        batch, judged = self.targets(rollout)
        with beside(self.stream) as join:
            metrics = self.describe(rollout, judged)
        refresh = (lambda: self.batch(rollout, self.judge(rollout))) if config.recompute_advantage else None
        for phase in self.phases.values():
            phase.optimizer.schedule_(self.progress)
            metrics |= phase.run(batch, self.coefs, kl=self.policy_kl, refresh=refresh)
            self.policy_kl.copy_(metrics["policy/kl"])
        # After the phases: the recorded distribution parameters belong to the statistics they were computed with, or
        # the first ratio would not be 1 and the KL would be biased.
        self.model.update_statistics(tree_map(lambda x: x[:-1], rollout.obs), rollout.valid)
        self.judge.advance(judged)
        self.objective.centre_(self.model.critic.head, judged.return_, rollout.valid)
        join(*metrics.values())
        return metrics

    @torch.no_grad()
    def with_rewards(self, rollout: Rollout[PPORecord]) -> Rollout[PPORecord]:
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

    def policy_terms(self, batch: PPOBatch, params: Tensor) -> Metrics:
        """The policy's terms of a minibatch, `[L, B]` each; a subclass may change them."""
        return policy_terms(self.losses["policy"], self.distribution, batch, params)

    def generators(self) -> list[torch.Generator]:
        """The random streams of acting and of shuffling."""
        return [self.policy_rng, self.shuffle_rng]

    def set_progress(self, fraction: float) -> None:
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
            "entropy_coef": self.coefs.entropy.clone(),
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
        self.coefs.entropy.copy_(state["entropy_coef"])
        self.policy_rng.set_state(state["policy_rng"])
        self.shuffle_rng.set_state(state["shuffle_rng"])

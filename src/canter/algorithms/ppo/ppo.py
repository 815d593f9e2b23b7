"""Proximal policy optimisation.

T steps, N environments, L sequence length (1 without memory), S sequences, P distribution parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from canter.algorithms.base import Algorithm, Declared, RolloutPlan, algorithms, symmetries_of
from canter.algorithms.extension import Extensions
from canter.algorithms.phase import Phase, check_batch, check_blocks, check_discount, check_norms
from canter.algorithms.ppo.advantages import AveragedPolicy, Judge, Judgement
from canter.algorithms.ppo.config import DECLARED, CentralValueConfig, PPOSettings, unused_settings
from canter.core import distributed
from canter.core.data.rollout import Rollout, as_sequences
from canter.core.seeding import derive_seed
from canter.core.specs import EnvSpec, Symmetry
from canter.core.struct import Metrics, Obs, State, tree_map
from canter.engines.autograd import policy_terms
from canter.engines.base import Coefs, Engine, PPOBatch, PPOLoss, PPORecord
from canter.engines.choose import Choice, EngineName, choose
from canter.engines.streams import beside, side_stream
from canter.functional.statistics import explained_variance, moments, normalize
from canter.nn.actor_critic import ActorCritic, Policy
from canter.nn.optimizer import Optimizer, ParameterGroup
from canter.nn.policy_file import FINAL_CRITIC, ValueFunction


class PPO(Algorithm[PPORecord]):
    """Acts by sampling, learns by a clipped policy gradient with GAE."""

    streams = ("policy_rng", "shuffle_rng", "extensions_rng")

    def __init__(self, config: PPOSettings, spec: EnvSpec, seed: int) -> None:
        self.config, self.spec, self.horizon = config, spec, config.horizon
        self.progress = torch.zeros((), device=spec.device)
        self.shuffle_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        # Of their own, so that an extension which changes nothing leaves every bit as it is without.
        self.extensions_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "extensions"))
        with torch.random.fork_rng(devices=[spec.device] if spec.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(seed, "init"))
            trunk_value = config.central_value is not None and config.central_value.actor_value
            self.model: ActorCritic = config.model.build(spec, trunk_value=trunk_value)
            if config.bonus_value is not None:
                self.model.add_bonus_head(config.model)
            self.model.to(spec.device)
            with spec.device:  # where an extension makes its parameters, before it hands them to an optimiser
                built = [extension.build(spec, self.model, self.extensions_rng) for extension in config.extensions]
            self.extensions = Extensions(built, self.progress)
        check_norms(self.model)
        for tensor in (*self.model.state_dict().values(), *self.extensions.state_dict().values()):
            distributed.broadcast_(tensor)
        self.policy, self.distribution = self.model.policy, self.model.policy.distribution
        self.average = AveragedPolicy(self.policy, config.policy_average) if config.policy_average else None
        if self.average is not None:
            self.policy = self.average.policy
        self.reads_reset = self.model.has_memory
        self.sequence_length = config.sequence_length if self.reads_reset else 1
        self.rewards = config.reward.build(spec, config.gamma, config.discount_per)
        self.objective = config.build_objective().to(spec.device)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.coefs = Coefs(entropy=torch.tensor(config.entropy_coef.initial, device=spec.device))
        self.policy_kl = torch.zeros((), device=spec.device)
        self.stream = side_stream(spec.device)
        self.losses, self.optimizers = self._build_losses(), self._build_optimizers()
        bonus, bootstrap = config.bonus_value, config.bootstrap_truncated
        self.judge = Judge(self.model, self.objective, spec.num_envs, self.sequence_length, bootstrap, bonus)
        self.use_engine("auto")

    def _build_losses(self) -> dict[str, PPOLoss]:
        """The loss of each phase: one for everything, or one for the policy and then one for the critic."""
        loss = self.config.build_loss(self.distribution, self.spec.device)
        # A subclass may have changed the terms, which only the definition can follow.
        own = None if type(self).policy_terms is PPO.policy_terms else self.policy_terms
        both = replace(loss, policy_terms=own, augment=self.extensions.augments(), terms=self.extensions.terms())
        central = self.config.central_value
        if central is None:
            return {"policy": both}
        policy = replace(both, trunk_value=True) if central.actor_value else replace(both, value_loss=None)
        return {"policy": replace(policy, bonus_coef=None), "central_value": central.loss_of(loss)}

    def _build_optimizers(self) -> dict[str, Optimizer]:
        """The optimiser of each phase."""
        config, central = self.config, self.config.central_value
        policy, critic = self.model.policy_parameters(), self.model.critic_parameters()
        jointly, of_critic = config.gradient_clipping == "joint", config.critic_optimizer or config.optimizer
        if central is not None:
            groups = {"policy": ParameterGroup(policy, config.optimizer)}
            own = {"critic": ParameterGroup(critic, central.optimizer)}
            return {"policy": Optimizer(groups, jointly), "central_value": Optimizer(own, clip_jointly=True)}
        if jointly and config.critic_optimizer is None:
            groups = {"model": ParameterGroup(policy + critic, config.optimizer)}
        else:
            groups = {"policy": ParameterGroup(policy, config.optimizer), "critic": ParameterGroup(critic, of_critic)}
        return {"policy": Optimizer(groups, jointly)}

    def use_engine(self, name: EngineName) -> None:
        """Compute by this engine from now on; raises ValueError where it cannot."""
        self.engines: dict[str, Choice] = {
            phase: choose(loss, self.model, self.optimizers[phase], name) for phase, loss in self.losses.items()
        }
        self.engine = self.engines["policy"].engine
        self.judge.engine = self.engines.get("central_value", self.engines["policy"]).engine
        phases = {"policy": self._phase(self.config, self.engine, "optim")}
        phases["policy"].target_kl = self.config.target_kl or math.inf
        if self.config.central_value is not None:
            phases["central_value"] = self._phase(self.config.central_value, self.judge.engine, "central_value")
        self.phases = self.extensions.add_phases(phases)
        for phase in self.phases.values():
            if phase.num_envs == self.spec.num_envs:  # its rows are those of the environments
                phase.blocks = self.config.shuffle_blocks

    def _phase(self, passes: PPOSettings | CentralValueConfig, engine: Engine, name: str) -> Phase[Any]:
        """So many epochs and minibatches, in the order that the settings say."""
        config, count, num_envs = self.config, passes.num_minibatches, self.spec.num_envs
        rows, even = check_blocks(config.shuffle_blocks, num_envs), config.uneven_minibatches == "refuse"
        key = "" if passes is config else f"{name}."
        check_batch(self.horizon, rows, count, self.sequence_length, key, even=even)
        return Phase(
            engine, passes.epochs, count, self.shuffle_rng, name=name, shuffle=config.shuffle, num_envs=num_envs
        )

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
        for phase in self.phases.values():
            phase.optimizer.schedule_(self.progress)
            if phase.draw is None:
                refresh = partial(self.judge_again, rollout, batch) if config.recompute_advantage else None
                metrics |= phase.run(batch, self.coefs, kl=self.policy_kl, refresh=refresh)
            else:
                metrics |= phase.run(phase.draw(rollout), kl=self.policy_kl)
            self.policy_kl.copy_(metrics["policy/kl"])
        # After the phases: the recorded distribution parameters belong to the statistics they were computed with, or
        # the first ratio would not be 1 and the KL would be biased.
        if config.obs_statistics == "update":
            self.model.update_statistics(tree_map(lambda x: x[:-1], rollout.obs), rollout.valid)
        self.judge.advance(judged)
        self.objective.centre_(self.model.critic.head, judged.return_, rollout.valid)
        if self.average is not None:
            self.average.add_()
        join(*metrics.values())
        return metrics

    @torch.no_grad()
    def with_rewards(self, rollout: Rollout[PPORecord]) -> Rollout[PPORecord]:
        """The rollout with the rewards to learn from; call it once for each, because statistics move."""
        rollout = self.extensions.reward(self.rewards(rollout))
        if (rollout.bonus is None) != (self.config.bonus_value is None):
            raise ValueError("extensions give bonuses apart from the reward if, and only if, there is a bonus_value")
        return rollout

    @torch.no_grad()
    def targets(self, rollout: Rollout[PPORecord]) -> tuple[PPOBatch, Judgement]:
        """What to learn from a new rollout; moves the value statistics to include its returns."""
        judged = self.judge(rollout, new=True)
        # What belongs to a sequence comes once for each, the rest once for each of its rows.
        carried = tree_map(
            lambda x: as_sequences(x, self.sequence_length * len(x) // self.horizon), self.extensions.carry(rollout)
        )
        return replace(self.batch(rollout, judged, new=True), carried=carried), judged

    def judge_again(self, rollout: Rollout[PPORecord], batch: PPOBatch) -> PPOBatch:
        """The rows of a rollout with the values, advantages and returns by the critic as it is now."""
        return replace(batch, **self.judged_rows(rollout, self.judge(rollout)))

    @torch.no_grad()
    def describe(self, rollout: Rollout[PPORecord], judged: Judgement) -> Metrics:
        """What can be said before learning from a rollout."""
        described = {"value/mean": judged.value, "value/mean_absolute_error": (judged.value - judged.return_).abs()}
        std = self.distribution.std(rollout.record.dist_params)
        described |= {} if std is None else {"policy/std": std.mean(-1)}
        means = moments(torch.stack(list(described.values()), -1), rollout.valid)[1].to(judged.value.dtype)
        explained = explained_variance(judged.value, judged.return_, rollout.valid)
        metrics = {"value/explained_variance": explained, **dict(zip(described, means.unbind(), strict=True))}
        return metrics | self.objective.metrics()

    @torch.no_grad()
    def batch(self, rollout: Rollout[PPORecord], judged: Judgement, *, new: bool = False) -> PPOBatch:
        """Rows for the loss; the value statistics move first to include those of a `new` rollout."""
        record = rollout.record
        rows = {
            "obs": tree_map(lambda x: x[:-1], rollout.obs),
            "action": record.action,
            "log_prob": self.engine.log_prob(record.dist_params, record.action),
            "dist_params": record.dist_params,
            "valid": rollout.valid,
            "reset": rollout.reset[:-1],
        }
        recorded = as_sequences(rows, self.sequence_length) | as_sequences({"policy_state": rollout.state}, length=1)
        return PPOBatch(**recorded, **self.judged_rows(rollout, judged, new=new))

    @torch.no_grad()
    def judged_rows(self, rollout: Rollout[PPORecord], judged: Judgement, *, new: bool = False) -> dict[str, Any]:
        """What the critic says of the rows; the value statistics move first to include those of a `new` rollout."""
        head, bonus_head, advantage = self.model.critic.head, self.model.bonus_head, judged.advantage
        if new:
            value, return_ = head.absorb(judged.value, judged.return_, rollout.valid)
        else:
            value, return_ = head.normalizer(judged.value), head.normalizer(judged.return_)
        if self.config.advantage_normalization == "rollout":
            advantage = normalize(advantage, rollout.valid, unbiased=self.config.advantage_std == "sample")
        rows = {"value": value, "return_": return_, "advantage": advantage}
        if bonus_head is not None and judged.bonus_return is not None:
            if new:
                bonus_head.update_statistics(judged.bonus_return, rollout.valid)
            numbers = {"bonus_value": judged.bonus_value, "bonus_return": judged.bonus_return}
            rows |= tree_map(bonus_head.normalizer, numbers)
        return as_sequences(rows, self.sequence_length) | as_sequences({"critic_state": judged.state}, length=1)

    def policy_terms(self, batch: PPOBatch, params: Tensor) -> Metrics:
        """The policy's terms of a minibatch, `[L, B]` each; a subclass may change them."""
        return policy_terms(self.losses["policy"], self.distribution, batch, params)

    def set_progress(self, fraction: float | Tensor) -> None:
        """Tell how much of the run is done, 0..1."""
        self.progress.fill_(fraction)

    def about(self) -> dict[str, Any]:
        """Which engine computes each phase, and why others declined."""
        words = {phase: choice.in_words() for phase, choice in self.engines.items()}
        return {"engine": ", ".join(words.values() if len(words) == 1 else map(": ".join, words.items()))}

    @property
    def acting(self) -> Policy:
        """The policy that acts in rollouts and learns; `policy` may be its running mean."""
        return self.model.policy

    @property
    def critic(self) -> ValueFunction:
        """What values are judged by, to be asked or saved."""
        return ValueFunction(self.model.critic, self.policy.config, self.policy.spec)

    def artefacts(self) -> dict[str, Callable[..., None]]:
        """The critic, usable alone, in a file at the end of a run."""
        return {FINAL_CRITIC: self.critic.save}

    def living(self) -> dict[str, Any]:
        """Weights, statistics, memory, moments, learning rates and coefficients, where they live."""
        living = {
            "model": dict(self.model.state_dict()),
            "rewards": dict(self.rewards.state_dict()),
            "objective": dict(self.objective.state_dict()),
            "extensions": dict(self.extensions.state_dict()),
            "critic_state": self.judge.state,
            "optimizers": {name: phase.optimizer.living() for name, phase in self.phases.items()},
            "entropy_coef": self.coefs.entropy,
        }
        return living if self.average is None else living | {"average": self.average.living()}


@algorithms.register("ppo")
@dataclass(frozen=True, kw_only=True)
class PPOConfig(PPOSettings):
    """Settings that build PPO; A2C is `surrogate="vanilla", epochs=1, num_minibatches=1`."""

    declared: ClassVar[Declared] = DECLARED

    def build(self, spec: EnvSpec, seed: int) -> PPO:
        """PPO for an environment, on the environment's device."""
        if self.objective == "discounted" and self.bootstrap_truncated:
            check_discount(self.gamma, spec)
        return PPO(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """How a rollout is cut up and how far returns look ahead; an average reward is not discounted."""
        return RolloutPlan(
            horizon=self.horizon,
            epochs=self.epochs,
            num_minibatches=self.num_minibatches,
            gamma=1.0 if self.objective == "average" else self.gamma,
            gae_lambda=self.gae_lambda,
        )

    def symmetries(self, spec: EnvSpec) -> tuple[Symmetry, ...]:
        """Those that extensions rely on."""
        return tuple(symmetry for extension in self.extensions for symmetry in symmetries_of(extension, spec))

    def unused(self, spec: EnvSpec) -> list[str]:
        """A line for each setting that was changed and has no part in this configuration."""
        return unused_settings(self, spec)

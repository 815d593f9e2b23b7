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

from canter import distributed
from canter.algorithms.base import Algorithm, Declared, RolloutPlan, algorithms, symmetries_of
from canter.algorithms.extension import Extensions
from canter.algorithms.phase import Phase
from canter.algorithms.ppo.central_value import CentralValueConfig
from canter.algorithms.ppo.checks import check_batch, check_blocks, check_discount, check_norms
from canter.algorithms.ppo.declared import DECLARED
from canter.algorithms.ppo.judge import Judge, Judgement
from canter.algorithms.ppo.moving_average import AveragedPolicy
from canter.algorithms.ppo.settings import PPOSettings
from canter.algorithms.ppo.unused import unused_settings
from canter.data.rollout import Rollout, as_sequences
from canter.engines.autograd import policy_terms
from canter.engines.base import Coefs, Engine, PPOLoss
from canter.engines.batch import PPOBatch, PPORecord
from canter.engines.choose import Choice, EngineName, choose
from canter.functional.stats import explained_variance, moments, normalize
from canter.kernels.streams import beside, side_stream
from canter.nn.actor_critic import ActorCritic, Policy
from canter.optim import Optimizer, ParameterGroup
from canter.seeding import derive_seed
from canter.specs import EnvSpec, Symmetry
from canter.storage.policy_file import FINAL_CRITIC, ValueFunction
from canter.struct import Metrics, Obs, State, tree_copy_, tree_map


class PPO(Algorithm[PPORecord]):
    """Acts by sampling, learns by a clipped policy gradient with GAE."""

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
        phases = {"policy": self._phase(config, self.engine, "")}
        phases["policy"].target_kl = math.inf if config.target_kl is None else config.target_kl
        if central is not None:
            phases["central_value"] = self._phase(central, self.judge.engine, "central_value")
        self.phases = self.extensions.add_phases(phases)
        for phase in self.phases.values():
            if phase.num_envs == self.spec.num_envs:  # its rows are those of the environments
                phase.blocks = config.shuffle_blocks

    def _phase(self, passes: PPOSettings | CentralValueConfig, engine: Engine, name: str) -> Phase[Any]:
        """So many epochs and minibatches, in the order that the settings say."""
        spec, config, key = self.spec, self.config, f"{name}." if name else ""
        even = config.uneven_minibatches == "refuse"
        rows = check_blocks(config.shuffle_blocks, spec.num_envs)
        check_batch(self.horizon, rows, passes.num_minibatches, self.sequence_length, key, even=even)
        return Phase(
            engine,
            passes.epochs,
            passes.num_minibatches,
            self.shuffle_rng,
            name=name or "optim",
            shuffle=config.shuffle,
            num_envs=spec.num_envs,
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

    def generators(self) -> list[torch.Generator]:
        """The random streams of acting, of shuffling and of extensions."""
        return [self.policy_rng, self.shuffle_rng, self.extensions_rng]

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
        modules = {"model": self.model, "rewards": self.rewards, "objective": self.objective}
        modules["extensions"] = self.extensions
        return (
            {name: dict(module.state_dict()) for name, module in modules.items()}
            | {
                "critic_state": self.judge.state,
                "optimizers": {name: phase.optimizer.living() for name, phase in self.phases.items()},
                "entropy_coef": self.coefs.entropy,
            }
            | ({} if self.average is None else {"average": self.average.living()})
        )

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of them, and the random states."""
        random = {name: getattr(self, name).get_state() for name in ("policy_rng", "shuffle_rng", "extensions_rng")}
        return tree_map(torch.clone, self.living()) | random

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        self.model.load_state_dict(state["model"])
        self.rewards.load_state_dict(state["rewards"])
        self.objective.load_state_dict(state["objective"])
        self.extensions.load_state_dict(state["extensions"])
        tree_copy_(self.judge.state, state["critic_state"])
        if self.average is not None:
            tree_copy_(self.average.living(), state["average"])
        for name, phase in self.phases.items():
            phase.optimizer.load_state_dict(state["optimizers"][name])
        self.coefs.entropy.copy_(state["entropy_coef"])
        self.policy_rng.set_state(state["policy_rng"])
        self.shuffle_rng.set_state(state["shuffle_rng"])
        self.extensions_rng.set_state(state["extensions_rng"])


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

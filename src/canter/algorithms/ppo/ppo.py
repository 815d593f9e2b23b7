"""Proximal policy optimisation.

`PPO.update` is the algorithm: rewards, values and advantages of a rollout, then epochs of
minibatches, then the running statistics. The parts: `ppo.rewards` transforms the reward,
`ppo.advantages` computes values, advantages and returns, `phase` runs epochs and minibatches, an
engine acts and computes gradients, and `canter.engines.autograd` defines the loss.

T steps, N environments, L sequence length (1 if feed-forward), S sequences, P distribution parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from canter.algorithms.base import Algorithm
from canter.algorithms.doctor.signals import policy_signals
from canter.algorithms.extension import Extensions
from canter.algorithms.phase import Phase, check_batch, check_blocks
from canter.algorithms.ppo.advantages import AdvantageEstimator, CentralValueConfig, ValueTargets
from canter.core import distributed
from canter.core.data.rollout import Rollout, as_sequences
from canter.core.dispatch import concurrently, side_stream
from canter.core.registry import UserError
from canter.core.seeding import derive_seed
from canter.core.specs import Env, EnvSpec
from canter.core.struct import Metrics, Obs, State, tree_map
from canter.engines.autograd import policy_terms
from canter.engines.base import Coefs, Engine, PPOBatch, PPOLoss, PPORecord
from canter.engines.choose import Choice, EngineName, choose, compile_rollout
from canter.functional.statistics import explained_variance, moments, normalize
from canter.nn.actor_critic import ActorCritic, Policy, ValueFunction
from canter.nn.optimizer import AveragedPolicy, Optimizer, ParameterGroup
from canter.nn.policy_file import FINAL_CRITIC
from canter.nn.stack import has_batch_norm

if TYPE_CHECKING:
    from canter.algorithms.ppo.config import PPOConfig


class PPO(Algorithm[PPORecord]):
    """Acts by sampling, learns by a clipped policy gradient with GAE."""

    streams = ("policy_rng", "shuffle_rng", "extensions_rng")

    def __init__(self, config: PPOConfig, spec: EnvSpec, seed: int) -> None:
        self.config = config
        self.spec = spec
        self.horizon = config.horizon
        self.progress = torch.zeros((), device=spec.device)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.shuffle_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        # A separate stream: an extension that changes nothing leaves every bit as it is without it.
        self.extensions_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "extensions"))
        self.model, self.extensions = self._build_networks(derive_seed(seed, "init"))
        self.policy = self.model.policy
        self.distribution = self.policy.distribution
        self.average = AveragedPolicy(self.policy, config.policy_average) if config.policy_average else None
        if self.average is not None:
            self.policy = self.average.policy
        self.reads_reset = self.model.is_recurrent
        self.sequence_length = config.sequence_length if self.reads_reset else 1
        self.rewards = config.reward.build(spec, config.gamma, config.discount_per)
        self.objective = config.build_objective().to(spec.device)
        self.estimator = AdvantageEstimator(
            self.model,
            self.objective,
            self.model.critic.network.initial_state(spec.num_envs),
            self.sequence_length,
            bootstrap=config.bootstrap_truncated,
            bonus=config.bonus_value,
            recurrence="exact" if config.central_value is None else config.central_value.recurrence,
        )
        self.coefs = Coefs(entropy=torch.tensor(config.entropy_coef.initial, device=spec.device))
        self.policy_kl = torch.zeros((), device=spec.device)
        """KL of the last phase that measured one; adaptive rates of other phases follow it."""
        self.stream = side_stream(spec.device)
        self.losses = self._build_losses()
        self.optimizers = self._build_optimizers()
        self.use_engine("auto")

    def _build_networks(self, seed: int) -> tuple[ActorCritic, Extensions]:
        """Build networks and extensions with initial weights by `seed`, the same on all ranks."""
        config = self.config
        spec = self.spec
        with torch.random.fork_rng(devices=[spec.device] if spec.device.type == "cuda" else []):
            torch.manual_seed(seed)
            trunk_value = config.central_value is not None and config.central_value.actor_value
            model = config.model.build(spec, trunk_value=trunk_value, bonus_value=config.bonus_value is not None)
            model.to(spec.device)
            with spec.device:  # where an extension makes its parameters, before it hands them to an optimiser
                built = [extension.build(spec, model, self.extensions_rng) for extension in config.extensions]
            extensions = Extensions(built, self.progress)
        if has_batch_norm(model):  # its statistics would never be updated, as only joint batches do that
            raise UserError("a norm of kind batch needs the joint batches of sac; use layer or rms with ppo")
        for tensor in (*model.state_dict().values(), *extensions.state_dict().values()):
            distributed.broadcast_(tensor)
        return model, extensions

    def _build_losses(self) -> dict[str, PPOLoss]:
        """Build the loss of each phase: one for everything, or one each for policy and critic."""
        loss = self.config.build_loss(self.distribution, self.spec.device)
        complete = replace(
            loss,
            # Only the autograd engine can follow the terms of a subclass.
            policy_terms=self.policy_terms if type(self).policy_terms is not PPO.policy_terms else None,
            augment=self.extensions.augments(),
            terms=self.extensions.terms(),
        )
        central = self.config.central_value
        if central is None:
            return {"policy": complete}
        policy = replace(complete, trunk_value=True) if central.actor_value else replace(complete, value_loss=None)
        return {"policy": replace(policy, bonus_coef=None), "central_value": central.loss_of(loss)}

    def _build_optimizers(self) -> dict[str, Optimizer]:
        """Build the optimiser of each phase."""
        config = self.config
        policy = self.model.policy_parameters()
        critic = self.model.critic_parameters()
        jointly = config.gradient_clipping == "joint"
        if (central := config.central_value) is not None:
            return {
                "policy": Optimizer({"policy": ParameterGroup(policy, config.optimizer)}, jointly),
                "central_value": Optimizer.single("critic", critic, central.optimizer),
            }
        if jointly and config.critic_optimizer is None:
            groups = {"model": ParameterGroup(policy + critic, config.optimizer)}
        else:
            groups = {
                "policy": ParameterGroup(policy, config.optimizer),
                "critic": ParameterGroup(critic, config.critic_optimizer or config.optimizer),
            }
        return {"policy": Optimizer(groups, jointly)}

    def use_engine(self, name: EngineName) -> None:
        """Compute with this engine from now on; raise ValueError if it cannot."""
        self.engines: dict[str, Choice] = {
            phase: choose(loss, self.model, self.optimizers[phase], name) for phase, loss in self.losses.items()
        }
        self.engine = self.engines["policy"].engine
        self.estimator.engine = self.engines.get("central_value", self.engines["policy"]).engine
        phases = {"policy": self._build_phase(self.config, self.engine, "optim")}
        phases["policy"].target_kl = self.config.target_kl or math.inf
        if (central := self.config.central_value) is not None:
            phases["central_value"] = self._build_phase(central, self.estimator.engine, "central_value")
            phases["central_value"].select = partial(central.select, spec=self.spec)
        self.phases = self.extensions.add_phases(phases)
        for phase in self.phases.values():
            if phase.num_envs == self.spec.num_envs:  # its sequences are those of the environments
                phase.blocks = self.config.shuffle_blocks

    def _build_phase(self, passes: PPOConfig | CentralValueConfig, engine: Engine, name: str) -> Phase[Any]:
        """Build an optimisation phase: epochs, minibatches and shuffling from the settings."""
        config = self.config
        stride = passes.stride(self.spec) if isinstance(passes, CentralValueConfig) else 1
        num_envs = self.spec.num_envs // stride
        block = check_blocks(config.shuffle_blocks, num_envs)
        check_batch(
            self.horizon,
            block,
            passes.num_minibatches,
            self.sequence_length,
            key="" if passes is config else f"{name}.",
            even=config.uneven_minibatches == "refuse",
        )
        return Phase(
            engine,
            passes.epochs,
            passes.num_minibatches,
            self.shuffle_rng,
            name=name,
            shuffle=config.shuffle,
            num_envs=num_envs,
            blocks=config.shuffle_blocks,
        )

    def empty_record(self) -> PPORecord:
        """Return a record `[N, ...]` of the right shapes and dtypes, as a template for buffers."""
        params = torch.zeros((self.spec.num_envs, self.distribution.param_dim), device=self.spec.device)
        return PPORecord(self.distribution.mode(params), params)

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, PPORecord, State]:
        """Sample actions: within bounds for the environment, as sampled for the record."""
        for_env, action, params, state = self.engine.act(obs, state, reset, self.policy_rng)
        return for_env, PPORecord(action, params), state

    def compile_rollout(self, env: Env) -> Callable[[Rollout[PPORecord]], Metrics]:
        """Return a function that fills whole rollouts of a simulator in JAX by one XLA program."""
        unchanged = type(self).act is PPO.act
        return compile_rollout(env, self.model, self.policy_rng) if unchanged else super().compile_rollout(env)

    def update(self, rollout: Rollout[PPORecord]) -> Metrics:
        """Improve policy and critic on one rollout and return the metrics."""
        self.config.entropy_coef.set_(self.coefs.entropy, self.progress)
        rollout = self.with_rewards(rollout)
        batch, targets = self.prepare_batch(rollout)
        with concurrently(self.stream) as join:
            metrics = self.rollout_metrics(rollout, targets)
        for phase in self.phases.values():
            metrics |= self._run_phase(phase, rollout, batch)
        self._update_statistics(rollout, targets)
        join(*metrics.values())
        return metrics

    @torch.no_grad()
    def with_rewards(self, rollout: Rollout[PPORecord]) -> Rollout[PPORecord]:
        """Update the reward statistics and return the rollout with the rewards to learn from."""
        rollout = self.extensions.reward(self.rewards(rollout))
        if (rollout.bonus is None) != (self.config.bonus_value is None):
            raise UserError("a separate exploration bonus needs bonus_value, and bonus_value needs such a bonus")
        return rollout

    @torch.no_grad()
    def prepare_batch(self, rollout: Rollout[PPORecord]) -> tuple[PPOBatch, ValueTargets]:
        """Update the value statistics with a new rollout; return its samples and value targets."""
        values = self.estimator.values(rollout)
        self.estimator.update(rollout, values)
        targets = self.estimator.targets(rollout, values)
        # Tensors [T, N, ...] become sequences of L steps; tensors [T / L, N, ...] have one row for
        # each sequence.
        carried = tree_map(
            lambda x: as_sequences(x, self.sequence_length * len(x) // self.horizon), self.extensions.carry(rollout)
        )
        normalized = self.model.critic.head.update_and_normalize(targets.value, targets.return_, rollout.valid)
        if self.model.bonus_head is not None and targets.bonus_return is not None:
            self.model.bonus_head.update_statistics(targets.bonus_return, rollout.valid)
        return replace(self.batch(rollout, targets, normalized), carried=carried), targets

    @torch.no_grad()
    def batch(
        self, rollout: Rollout[PPORecord], targets: ValueTargets, normalized: tuple[Tensor, Tensor] | None = None
    ) -> PPOBatch:
        """Return the samples of a rollout as sequences; `normalized` as in `value_targets`."""
        record = rollout.record
        samples = {
            "obs": tree_map(lambda x: x[:-1], rollout.obs),
            "action": record.action,
            "log_prob": self.engine.log_prob(record.dist_params, record.action),
            "dist_params": record.dist_params,
            "valid": rollout.valid,
            "reset": rollout.reset[:-1],
        }
        return PPOBatch(
            **as_sequences(samples, self.sequence_length),
            **as_sequences({"policy_state": rollout.state}, length=1),
            **self.value_targets(rollout, targets, normalized),
        )

    @torch.no_grad()
    def value_targets(
        self, rollout: Rollout[PPORecord], targets: ValueTargets, normalized: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """Return the fields of `PPOBatch` that the critic determines, in normalised units.

        `normalized` are value and return; None normalises them with the current statistics.
        """
        normalizer = self.model.critic.head.normalizer
        if normalized is None:
            normalized = normalizer(targets.value), normalizer(targets.return_)
        value, return_ = normalized
        advantage = targets.advantage
        if self.config.advantage_normalization == "rollout":
            advantage = normalize(advantage, rollout.valid, unbiased=self.config.advantage_std == "sample")
        samples = {"value": value, "return_": return_, "advantage": advantage}
        if self.model.bonus_head is not None and targets.bonus_return is not None:
            bonus = {"bonus_value": targets.bonus_value, "bonus_return": targets.bonus_return}
            samples |= tree_map(self.model.bonus_head.normalizer, bonus)
        states = as_sequences({"critic_state": targets.state}, length=1)
        return as_sequences(samples, self.sequence_length) | states

    def recompute_advantages(self, rollout: Rollout[PPORecord], batch: PPOBatch) -> PPOBatch:
        """Return the samples with values, advantages and returns by the current critic."""
        return replace(batch, **self.value_targets(rollout, self.estimator(rollout)))

    @torch.no_grad()
    def rollout_metrics(self, rollout: Rollout[PPORecord], targets: ValueTargets) -> Metrics:
        """Return explained variance, mean value, value error and policy std of a rollout."""
        samples = {
            "value/mean": targets.value,
            "value/mean_absolute_error": (targets.value - targets.return_).abs(),
        }
        std = self.distribution.std(rollout.record.dist_params)
        if std is not None:
            samples["policy/std"] = std.mean(-1)
        _, means, _ = moments(torch.stack(list(samples.values()), -1), rollout.valid)
        means = means.to(targets.value.dtype)
        explained = explained_variance(targets.value, targets.return_, rollout.valid)
        metrics = {"value/explained_variance": explained, **dict(zip(samples, means.unbind(), strict=True))}
        return metrics | self.objective.metrics()

    def signals(self, rollout: Rollout[PPORecord]) -> Metrics:
        """Return the error of the first ratio, the share of actions at a bound, and their effect."""
        return policy_signals(self.acting, rollout)

    def _run_phase(self, phase: Phase[Any], rollout: Rollout[PPORecord], batch: PPOBatch) -> Metrics:
        """Run a phase on the algorithm's samples or on those that it draws."""
        phase.optimizer.schedule_(self.progress)
        if phase.draw is not None:
            result = phase.run(phase.draw(rollout), kl=self.policy_kl)
        else:
            refresh = partial(self.recompute_advantages, rollout, batch) if self.config.recompute_advantage else None
            result = phase.run(batch, self.coefs, kl=self.policy_kl, refresh=refresh)
        if result.kl is not None:
            self.policy_kl.copy_(result.kl)
        return result.metrics

    def _update_statistics(self, rollout: Rollout[PPORecord], targets: ValueTargets) -> None:
        """Update what must not change while a rollout is learned from."""
        # Only now: recorded parameters belong to the old statistics, so that the first ratio is 1.
        if self.config.obs_statistics == "update":
            self.model.update_statistics(tree_map(lambda x: x[:-1], rollout.obs), rollout.valid)
        self.estimator.advance(targets)
        self.objective.centre_(self.model.critic.head, targets.return_, rollout.valid)
        if self.average is not None:
            self.average.add_()

    def policy_terms(self, batch: PPOBatch, params: Tensor) -> Metrics:
        """Return the policy's terms of a minibatch, `[L, B]` each; a subclass may change them."""
        return policy_terms(self.losses["policy"], self.distribution, batch, params)

    def about(self) -> dict[str, Any]:
        """Return the engine of each phase, and why faster ones were not chosen."""
        choices = {phase: choice.summary() for phase, choice in self.engines.items()}
        if len(choices) == 1:
            return {"engine": choices["policy"]}
        return {"engine": ", ".join(f"{phase}: {choice}" for phase, choice in choices.items())}

    @property
    def acting(self) -> Policy:
        """Policy that acts in rollouts and learns; `policy` may be its running mean."""
        return self.model.policy

    @property
    def critic(self) -> ValueFunction:
        """Critic, to be evaluated or saved."""
        return ValueFunction(self.model.critic, self.policy.config, self.policy.spec)

    def artefacts(self) -> dict[str, Callable[..., None]]:
        """Return the file of the critic, usable alone, to be written at the end of a run."""
        return {FINAL_CRITIC: self.critic.save}

    def state_tensors(self) -> dict[str, Any]:
        """Return the live weights, statistics, states, moments, rates and coefficients."""
        tensors = {
            "model": dict(self.model.state_dict()),
            "rewards": dict(self.rewards.state_dict()),
            "objective": dict(self.objective.state_dict()),
            "extensions": dict(self.extensions.state_dict()),
            "critic_state": self.estimator.state,
            "optimizers": {name: phase.optimizer.state_tensors() for name, phase in self.phases.items()},
            "entropy_coef": self.coefs.entropy,
        }
        if self.average is not None:
            tensors["average"] = self.average.state_tensors()
        return tensors

"""A population: P members that learn by PPO side by side in one program, on tensor environments.

The members have one architecture and stacked tensors `[P, ...]`; each has its own environments,
random streams, learning rate and further settings (`MemberConfig`). PPO itself is not written again:
one PPO, which holds no tensors itself, computes for all members at once, under `torch.vmap`. So a launch
on a GPU, or a call on a CPU, serves all of them, and a population of one is a single run.

P members, N environments of each, T steps, S = T * N samples of a member, B in a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from canter.algorithms.base import Algorithm, algorithms
from canter.algorithms.phase import Phase
from canter.algorithms.ppo.advantages import Discounted, ValueTargets
from canter.algorithms.ppo.config import PPOConfig
from canter.algorithms.ppo.members import MemberConfig, check_supported, settings_of_member
from canter.algorithms.ppo.ppo import PPO
from canter.algorithms.ppo.rewards import ReturnScaling
from canter.core.data.rollout import Rollout
from canter.core.dispatch import plain_functions
from canter.core.registry import UserError
from canter.core.seeding import MemberStreams, derive_seed
from canter.core.specs import Env, EnvSpec
from canter.core.struct import Metrics, Obs, State, tree_copy_, tree_leaves, tree_map
from canter.engines.autograd import AutogradEngine
from canter.engines.base import Coefs, PPOBatch, PPORecord, UpdateResult, Valued
from canter.envs.tensor import TensorEnv
from canter.nn.actor_critic import Policy
from canter.nn.optimizer import MemberOptimizer, MemberSchedules


class MemberEngine(AutogradEngine):
    """The definition, without reads by the host, which `vmap` excludes."""

    @torch.no_grad()
    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Return the values of all samples."""
        return self.model.critic.unroll(obs, state, reset)


class MemberModules(nn.Module):
    """The modules of a member, so that all their tensors can be replaced while a function runs."""

    def __init__(self, model: nn.Module, rewards: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.rewards = rewards

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the function."""
        return function(*args)


class MemberPhase(Phase[PPOBatch]):
    """A phase over the samples of all members, `[P, 1, S, ...]`, each in its own order."""

    def _epoch_orders(self, batch: PPOBatch) -> Iterator[Tensor]:
        """Yield the orders `[P, S]` of each epoch."""
        members = len(tree_leaves(batch)[0])
        for order in super()._epoch_orders(batch[0]):
            yield order.expand(members, -1)

    def _minibatches(self, order: Tensor) -> Tensor:
        """Return the samples of each minibatch, `[M, P, B]`."""
        size = order.shape[1] // self.num_minibatches
        return order[:, : size * self.num_minibatches].unflatten(1, (-1, size)).movedim(1, 0)


class PopulationPPO(Algorithm[PPORecord]):
    """P members that learn by PPO side by side; environments `[P * N]` in blocks of N."""

    streams = ("policy_rng", "shuffle_rng")

    def __init__(self, config: PopulationConfig, spec: EnvSpec, seed: int) -> None:
        check_supported(config, len(config.members), spec)
        self.config = config
        self.spec = spec
        self.seed = seed
        self.configs = config.single_runs()
        self.seeds = config.seeds(seed)
        self.size = len(self.configs)
        self.horizon = config.horizon
        device = spec.device
        self.progress = torch.zeros((), device=device)
        self.policy_rng = MemberStreams(device, [derive_seed(own, "policy") for own in self.seeds])
        self.shuffle_rng = MemberStreams(device, [derive_seed(own, "shuffle") for own in self.seeds])
        self.streams_ahead = [self.policy_rng]
        """Streams that are drawn from in every step of a rollout."""
        self.draws_ahead = device.type == "cuda"
        """Draw for all steps of a rollout at once; on a CPU each step draws what a single run draws."""
        self.single = PPO(self.configs[0], replace(spec, num_envs=spec.num_envs // self.size), self.seeds[0])
        """PPO of one member; its tensors are replaced by those of the members while it computes."""
        engine = MemberEngine(self.single.losses["policy"], self.single.model, self.single.optimizers["policy"])
        engine.stream = None
        self.single.engine = engine
        self.single.estimator.engine = engine
        self.reads_reset = False
        self.modules = MemberModules(self.single.model, self.single.rewards)
        self.distribution = self.single.distribution
        self._stack_tensors()
        self.settings = {
            name: torch.tensor([float(own[name]) for own in map(settings_of_member, self.configs)], device=device)
            for name in settings_of_member(self.configs[0])
        }
        """Settings `[P]` on the device: they may change during a run, also if it is captured."""
        entropy = [config.entropy_coef for config in self.configs]
        self.entropy_schedules = MemberSchedules(entropy, self.settings["entropy_coef"])
        self.configured = tree_map(torch.clone, self.live_settings)
        """The same and the learning rates, as the run's settings have them."""
        self.policy_kl = torch.zeros(self.size, device=device)
        self.running_return = torch.zeros(spec.num_envs, dtype=torch.float64, device=device)
        self.ended = torch.zeros((2, self.size), dtype=torch.float64, device=device)
        """Sum of the returns, and number, of all episodes of each member that have ended."""
        self.latest: dict[str, Tensor] = {}
        """Metrics `[P]` of the last update."""
        source: Any = self  # with an optimizer for all members
        generator: Any = self.shuffle_rng
        self.phase = MemberPhase(
            source,
            config.epochs,
            config.num_minibatches,
            generator,
            config.target_kl or float("inf"),
            shuffle=config.shuffle,
            num_envs=self.single.spec.num_envs,
        )
        self.views = [self._policy_of(p) for p in range(self.size)]
        self.leader = 0
        """The member whose policy is `policy`."""

    def _stack_tensors(self) -> None:
        """Build the weights of each member by its seed, and stack parameters and buffers."""
        models = [self.single._build_networks(derive_seed(own, "init"))[0] for own in self.seeds]
        members = [MemberModules(model, self.single.rewards) for model in models]
        parameters = _stack([dict(member.named_parameters()) for member in members])
        self.buffers = _stack([dict(member.named_buffers()) for member in members])
        self.optimizer = MemberOptimizer(parameters, [config.optimizer for config in self.configs])
        self.parameters = self.optimizer.parameters

    def prepare_env(self, env: Env) -> None:
        """Give each member's environments their own random stream."""
        if not isinstance(env, TensorEnv):
            raise UserError(
                f"{env.spec.env_id}: a population needs a plain tensor environment, such as tensor:cartpole"
            )
        seeds = [derive_seed(own, "env") for own in self.seeds]
        env.generator = MemberStreams(self.spec.device, seeds, origin=derive_seed(self.seed, "env"))
        self.streams_ahead = [self.policy_rng, env.generator]

    def generators(self) -> list[torch.Generator]:
        """Return the random streams of all members."""
        return [*self.policy_rng.generators, *self.shuffle_rng.generators]

    # Computing for all members at once

    def _for_each_member(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Return `function(*trees)` of every member; tensors `[P, ...]` are `[...]` inside."""
        structure: Any = None

        def run(tensors: dict[str, Tensor], settings: dict[str, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
            nonlocal structure
            self._use_settings(settings)
            structure = functional_call(self.modules, tensors, (function, *_rebuild(trees, leaves)))
            return tuple(tree_leaves(structure))

        leaves = tree_leaves(trees)
        try:
            with plain_functions():
                results = vmap(run)(self.parameters | self.buffers, self.settings, leaves)
        finally:
            self._use_settings(settings_of_member(self.configs[0]))
        return _rebuild(structure, results)

    def _use_settings(self, settings: dict[str, Any]) -> None:
        """Let PPO compute with these settings, 0-d tensors of a member or numbers."""
        single = self.single
        single.coefs = Coefs(entropy=settings["entropy_coef"])
        single.engine.loss = replace(single.losses["policy"], clip_ratio=settings["clip_ratio"])  # pyright: ignore
        assert isinstance(single.objective, Discounted)
        single.objective.gamma = settings["gamma"]
        single.objective.gae_lambda = settings["gae_lambda"]
        for stage in single.rewards.stages:
            if isinstance(stage, ReturnScaling):
                stage.gamma = settings["gamma"]

    def _by_member(self, tree: Any, axis: int = 0) -> Any:
        """Return tensors `[..., P * N, ...]` as `[P, ..., N, ...]`; the environments are at `axis`."""
        return tree_map(lambda x: x.unflatten(axis, (self.size, -1)).movedim(axis, 0), tree)

    # Acting and learning

    def begin_iteration(self) -> None:
        """Let the steps of the next rollout draw together."""
        for streams in self.streams_ahead:
            streams.draw_ahead(self.horizon if self.draws_ahead else 1)

    def empty_record(self) -> PPORecord:
        """Return a record `[P * N, ...]` of the right shapes and dtypes, as a template for buffers."""
        params = torch.zeros((self.spec.num_envs, self.distribution.param_dim), device=self.spec.device)
        return PPORecord(self.distribution.mode(params), params)

    def params(self, obs: Obs) -> Tensor:
        """Return distribution parameters of all members, for observations `[P * N, ...]` of any N."""
        return self._for_each_member(lambda own: self.single.acting.params(own, ())[0], self._by_member(obs)).flatten(
            0, 1
        )

    @torch.no_grad()
    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, PPORecord, State]:
        """Sample actions: within bounds for the environment, as sampled for the record."""
        params = self.params(obs)
        rng: Any = self.policy_rng
        action = self.distribution.sample(params, rng)
        return self.distribution.to_env(action), PPORecord(action, params), ()

    def update(self, rollout: Rollout[PPORecord]) -> Metrics:
        """Improve every member on its part of the rollout; return metrics, the means over members."""
        self.entropy_schedules.set_(self.progress)
        self.optimizer.schedule_(self.progress)
        self._count_episodes(rollout)
        self.shuffle_rng.draw_ahead(self.config.epochs if self.draws_ahead else 1)
        parts = self._by_member(rollout, 1)
        batch, targets, metrics = self._for_each_member(self._prepare, parts)
        result = self.phase.run(batch, kl=self.policy_kl)
        assert result.kl is not None
        self.policy_kl.copy_(result.kl)
        self._for_each_member(self._finish, parts, targets)
        self.latest = metrics | result.metrics
        return {name: values.mean() for name, values in self.latest.items()}

    @torch.no_grad()
    def _prepare(self, rollout: Rollout[PPORecord]) -> tuple[PPOBatch, ValueTargets, Metrics]:
        """Return samples, value targets and metrics of a member's rollout."""
        rollout = self.single.with_rewards(rollout)
        batch, targets = self.single.prepare_batch(rollout)
        return batch, targets, self.single.rollout_metrics(rollout, targets)

    @torch.no_grad()
    def _finish(self, rollout: Rollout[PPORecord], targets: ValueTargets) -> tuple[()]:
        """Update a member's statistics."""
        self.single._update_statistics(rollout, targets)
        return ()

    def begin(self, batch: PPOBatch) -> PPOBatch:
        """Return the samples of all members one behind the other, `[P * S, ...]`."""
        return tree_map(lambda x: x.flatten(0, 2), batch)

    def gradients(self, samples: PPOBatch, index: Tensor, coefs: Any) -> UpdateResult:
        """Write the gradients of samples `index` `[P, B]` of each member; return metrics and KL, `[P]` each."""

        def loss_of(minibatch: PPOBatch) -> tuple[Tensor, Metrics, Tensor | None]:
            engine: Any = self.single.engine
            output = engine.evaluate(minibatch, self.single.coefs)
            return output.loss, output.metrics, output.kl

        first = torch.arange(self.size, device=index.device) * (len(samples.value) // self.size)
        rows = (index + first.unsqueeze(1)).flatten()
        minibatch = tree_map(lambda x: x.index_select(0, rows).unflatten(0, index.shape).unsqueeze(1), samples)
        loss, metrics, kl = self._for_each_member(loss_of, minibatch)
        self.optimizer.backward(loss)
        return UpdateResult({name: value.detach() for name, value in metrics.items()}, kl.detach())

    def _count_episodes(self, rollout: Rollout[PPORecord]) -> None:
        """Add the returns of the episodes that ended in a rollout."""
        done = rollout.done
        total = torch.where(rollout.valid, rollout.reward, 0.0).cumsum(0, dtype=torch.float64) + self.running_return
        step = torch.arange(1, len(done) + 1, device=done.device).unsqueeze(1)
        last = torch.where(done, step, 0).amax(0)  # number of the last step that ended an episode, or 0
        ended = torch.where(last > 0, total.gather(0, (last - 1).clamp(min=0).unsqueeze(0)).squeeze(0), 0.0)
        self.running_return.copy_(total[-1] - ended)
        self.ended.add_(self._by_member(torch.stack([ended, done.sum(0).double()]), 1).sum(-1).t())

    # What others see

    def _policy_of(self, member: int) -> Policy:
        """Return the policy of a member; its tensors are views of the stacked ones."""
        view = self.single.policy.frozen_copy()
        for name, parameter in view.actor.named_parameters():
            parameter.data = self.parameters[f"model.actor.{name}"].detach()[member]
        for path, module in view.actor.named_modules():
            for name in module._buffers:
                module._buffers[name] = self.buffers[".".join(filter(None, ("model.actor", path, name)))][member]
        return view

    @property
    def policy(self) -> Policy:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Policy of the leader."""
        return self.views[self.leader]

    @property
    def all_policies(self) -> MemberPolicies:
        """The policies of all members, to be played side by side."""
        return MemberPolicies(self)

    def member_rows(self) -> dict[str, list[float]]:
        """Return the metrics of the last update, and the total and number of returns, of each member."""
        rows = self.latest | dict(zip(("episode_returns", "episodes"), self.ended.unbind(), strict=True))
        values = torch.stack([value.double() for value in rows.values()]).tolist()
        return dict(zip(rows, values, strict=True))

    def about(self) -> dict[str, Any]:
        """Return the number of members and the engine."""
        return {"members": self.size, "engine": "autograd, all members at once"}

    @property
    def live_settings(self) -> dict[str, Tensor]:
        """Settings `[P]` and learning rates; the tensors themselves."""
        return self.settings | {"learning_rate": self.optimizer.adam.learning_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; settings that the run's settings have changed since take effect."""
        configured = tree_map(torch.clone, self.configured)
        super().load_state_dict(state)
        for name, value in self.live_settings.items():
            value.copy_(torch.where(configured[name] == self.configured[name], value, configured[name]))
        tree_copy_(self.configured, configured)

    def state_tensors(self) -> dict[str, Any]:
        """Return the live tensors of all members."""
        return {
            "flat": self.optimizer.adam.flat,
            "buffers": self.buffers,
            "optimizer": self.optimizer.state_tensors(),
            "settings": self.settings,
            "configured": self.configured,
            "policy_kl": self.policy_kl,
            "running_return": self.running_return,
            "ended": self.ended,
        }


class MemberPolicies(Policy):
    """The policies of all members as one, acting in environments `[P * N]`."""

    def __init__(self, population: PopulationPPO) -> None:
        single = population.single.policy
        super().__init__(single.actor, single.distribution, single.config, single.spec)
        self.population = population

    def params(self, obs: Obs, state: State, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return distribution parameters `[P * N, ...]`, and the state `()`."""
        return self.population.params(obs), ()


def _stack(members: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all members by name, `[P, ...]`."""
    return {name: torch.stack([own[name].detach() for own in members]) for name in members[0]}


def _rebuild(tree: Any, leaves: Sequence[Tensor]) -> Any:
    """Return a tree of the same structure with other tensors."""
    rest = iter(leaves)
    return tree_map(lambda _: next(rest), tree)


@algorithms.register("population")
@dataclass(frozen=True, kw_only=True)
class PopulationConfig(PPOConfig):
    """Settings that P members share, and those of each; `env.num_envs` is divided among them."""

    members: tuple[MemberConfig, ...] = ()
    """Settings of each member."""

    def build(self, spec: EnvSpec, seed: int) -> Any:
        """Return the population for an environment, on the environment's device."""
        return PopulationPPO(self, spec, seed)

    def single_runs(self) -> list[PPOConfig]:
        """Return for each member the settings of a single run that learns as it does."""
        return [member.settings_of(self) for member in self.members]

    def seeds(self, seed: int) -> list[int]:
        """Return the seed of each member; `seed` is the run's."""
        return [seed + p if member.seed is None else member.seed for p, member in enumerate(self.members)]

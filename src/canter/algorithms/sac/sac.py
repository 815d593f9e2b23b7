"""The noise that a policy explores with.

N environments, A action components.

The unit of rewards: known from all that were seen, applied to those that are drawn.

T steps, N environments.

Soft actor-critic, from two plain critics to a fleet's recipe.

T steps, N environments, A action components, B rows in an update, E critics, K atoms.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from canter.algorithms.base import Algorithm, Declared, RolloutPlan, algorithms
from canter.algorithms.sac.config import DECLARED, SACSettings, check_spec, unused_settings
from canter.algorithms.sac.learner import Learner
from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.seeding import derive_seed, draw_rows
from canter.core.specs import Continuous, EnvSpec
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_map
from canter.engines.choose import EngineName, choose_soft
from canter.engines.triton.kernels import load_kernels
from canter.functional.returns import discounted_return
from canter.nn.normalizer import Normalizer


class FreshNoise(nn.Module):
    """New noise in every step."""

    def forward(self, like: Tensor, generator: Generator) -> Tensor:
        """Standard normal, of the shape of `like` `[N, A]`."""
        return draw_rows(torch.randn, like.shape, generator=generator, device=like.device, dtype=like.dtype)


class KeptNoise(nn.Module):
    """Each environment keeps its noise for a random number of steps, k of them with a chance of k^-2 up to `most`.

    Noise that lasts moves a robot; noise that changes in every step shakes it.
    """

    def __init__(self, most: int, num_envs: int, dim: int) -> None:
        super().__init__()
        weights = torch.arange(1, most + 1, dtype=torch.float64) ** -2
        self.chance = nn.Buffer((weights.cumsum(0) / weights.sum()).float(), persistent=False)
        self.noise = nn.Buffer(torch.zeros(num_envs, dim))
        self.left = nn.Buffer(torch.zeros(num_envs, dtype=torch.int64))

    def forward(self, like: Tensor, generator: Generator) -> Tensor:
        """The noise of this step; overwritten by the next."""
        fresh = draw_rows(torch.randn, like.shape, generator=generator, device=like.device, dtype=like.dtype)
        share = draw_rows(torch.rand, (len(like),), generator=generator, device=like.device)
        steps = (torch.searchsorted(self.chance, share) + 1).clamp(max=len(self.chance))
        renew = self.left <= 0
        self.left.copy_(torch.where(renew, steps, self.left) - 1)
        self.noise.copy_(torch.where(renew.unsqueeze(-1), fresh, self.noise))
        return self.noise


class ReturnScale(nn.Module):
    """Divides by the standard deviation of discounted returns, or by their largest amount over `limit` if that is more.

    Rewards are stored as they came, so old ones follow what is known of the returns now.
    """

    def __init__(self, gamma: float, limit: float, num_envs: int) -> None:
        super().__init__()
        self.gamma, self.limit = gamma, limit
        self.statistics = Normalizer()
        self.running = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))
        self.largest = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rollout: Rollout[Any]) -> None:
        """Take note of a rollout, once."""
        reward = rollout.reward.double()
        returns, after = discounted_return(reward, rollout.done, rollout.valid, self.running, self.gamma)
        self.running.copy_(torch.where(torch.isfinite(after), after, 0.0))
        self.statistics.update(returns, rollout.valid)
        amount = torch.where(rollout.valid & torch.isfinite(returns), returns.abs(), 0.0).amax()
        self.largest.copy_(torch.maximum(self.largest, distributed.max_(amount)))

    def forward(self, reward: Tensor) -> Tensor:
        """In the unit of the returns seen so far."""
        return reward / torch.maximum(self.statistics.scale, (self.largest / self.limit).float())


logger = logging.getLogger(__name__)

ROW_STEPS, ROW_ROUNDS = 1_000, 64
"""A row of the log is due after so many transitions, but no sooner than after so many steps of all environments."""


@dataclass
class SACRecord(TensorStruct):
    """What is remembered of a step."""

    action: Tensor
    """`[N, A]` in -1..1."""


@dataclass(frozen=True)
class Stage:
    """What an iteration does that the host decides; each has CUDA graphs of its own."""

    random: bool
    """Act by chance."""
    learns: bool
    """Update after the rollout."""
    turn: int
    """Updates since the policy last learned."""


class SAC(Algorithm[SACRecord]):
    """Acts by a squashed Gaussian, remembers, and learns from what it draws."""

    grows = ("replay",)
    reads_reset = False
    streams = ("policy_rng", "replay_rng")

    def __init__(self, config: SACSettings, spec: EnvSpec, seed: int) -> None:
        check_spec(config, spec)
        assert isinstance(spec.action, Continuous)
        if spec.device.type == "cuda":
            load_kernels()
        self.config, self.spec, self.horizon, dim = config, spec, config.horizon, spec.action.dim
        with torch.random.fork_rng(devices=[spec.device] if spec.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(seed, "init"))
            self.policy = config.model().build_policy(spec)
            self.policy.actor.to(spec.device)
            critics = config.critic.build(spec, dim).to(spec.device)
        for tensor in (*self.policy.actor.state_dict().values(), *critics.state_dict().values()):
            distributed.broadcast_(tensor)
        self.learner = Learner(config, self.policy.actor, critics, dim)
        self.use_engine("auto")
        self.replay = config.replay.build(spec, dim)
        noise = KeptNoise(config.noise_repeat, spec.num_envs, dim) if config.noise_repeat > 1 else FreshNoise()
        scale = ReturnScale(config.gamma, config.return_limit, spec.num_envs) if config.scale_rewards else nn.Identity()
        self.noise, self.rewards = noise.to(spec.device), scale.to(spec.device)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.replay_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        self.progress = torch.zeros((), device=spec.device)
        self.like = torch.zeros((spec.num_envs, dim), device=spec.device)
        """The shape of actions, for noise."""
        self.rollouts, self.refilled, self.updates = 0, 0, 0
        """Rollouts so far, those whose rows the ring was given, and updates so far; counted by the host."""
        self.stage = Stage(random=True, learns=False, turn=0)
        self.pace = max(1, round(max(ROW_STEPS / spec.num_envs, ROW_ROUNDS) / self.horizon))

    def use_engine(self, name: EngineName) -> None:
        """Compute gradients by this engine from now on; raises ValueError where it cannot."""
        self.learner.engine, self.engine = choose_soft(self.learner.described(self.spec), name)
        self.shares_rows = self.learner.engine is not None

    def empty_record(self) -> SACRecord:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        return SACRecord(torch.zeros_like(self.like))

    def begin_iteration(self) -> None:
        """Decide what the coming rollout and its updates are."""
        config, rows = self.config, self.horizon * self.spec.num_envs * distributed.world_size()
        random = self.rollouts * rows < config.warmup_steps
        self.rollouts, self.refilled = self.rollouts + 1, self.refilled + 1
        learns = self.refilled * rows >= max(config.warmup_steps, 1)
        self.stage = Stage(random, learns, turn=self.updates % config.policy_delay)
        self.updates += config.updates if learns else 0

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, SACRecord, State]:
        """Sample actions; during the warm-up all are equally likely."""
        if self.stage.random:
            share = draw_rows(torch.rand, self.like.shape, generator=self.policy_rng, device=self.spec.device)
            raw = torch.atanh((2.0 * share - 1.0).clamp(-0.999999, 0.999999))
        elif self.learner.engine is not None:
            raw = self.learner.engine.act(obs, self.noise(self.like, self.policy_rng))
        else:
            params, state = self.policy.params(obs, state)
            mean, log_std = params.chunk(2, -1)
            raw = torch.addcmul(mean, log_std.exp(), self.noise(mean, self.policy_rng))
        return self.policy.distribution.to_env(raw), SACRecord(torch.tanh(raw)), state

    def update(self, rollout: Rollout[SACRecord]) -> Metrics:
        """Remember a rollout and learn from what is drawn."""
        config, seen = self.config, tree_map(lambda x: x[:-1], rollout.obs)
        self.replay.write(rollout, rollout.record.action)
        if isinstance(self.rewards, ReturnScale):
            self.rewards.update(rollout)
        # Moved by new rows, once: what is drawn again and again must not count again and again.
        self.learner.actor.network.update_statistics(seen, rollout.valid)
        self.learner.critics.encoder.update_statistics(seen, rollout.valid)
        metrics = {"replay/rows": self.replay.count}
        if not self.stage.learns:
            return metrics
        self.learner.schedule_(self.progress)
        drawn = self.replay.sample(config.updates * config.batch_size, config.n_steps, config.gamma, self.replay_rng)
        drawn = replace(drawn, reward=self.rewards(drawn.reward))
        shape = (config.updates, 2, config.batch_size, rollout.record.action.shape[-1])
        noise = torch.randn(shape, generator=self.replay_rng, device=self.spec.device)
        for number in range(config.updates):
            batch = drawn[number * config.batch_size : (number + 1) * config.batch_size]
            learn_policy = (self.stage.turn + number + 1) % config.policy_delay == 0
            last = number + 1 == config.updates, number + config.policy_delay >= config.updates
            self.learner.update(batch, noise[number], learn_policy, last)
        updates = torch.full((), float(config.updates), device=self.spec.device)
        metrics |= {"replay/lost": 1.0 - drawn.valid.float().mean(), "optim/minibatch_updates": updates}
        if isinstance(self.rewards, ReturnScale):
            metrics["reward/unit"] = 1.0 / self.rewards(torch.ones_like(self.progress))
        told = torch.stack(list(self.learner.metrics.values())).unbind()  # copies, by one call
        return metrics | dict(zip(self.learner.metrics, told, strict=True))

    def set_progress(self, fraction: float | Tensor) -> None:
        """Tell how much of the run is done, 0..1."""
        self.progress.fill_(fraction)

    def about(self) -> dict[str, Any]:
        """What computes the gradients, how large the memory is, and whether checkpoints hold it."""
        config, size = self.config.replay, self.config.replay.nbytes(self.spec, self.policy.distribution.param_dim // 2)
        saved = "saved in checkpoints" if config.save else "left out of checkpoints (replay.save=false)"
        rows = (self.replay.slots - 1) * self.spec.num_envs
        replay = f"{rows:,} transitions, {size / 1e6:,.0f} MB on {self.spec.device}, {saved}"
        return {"engine": self.engine, "replay": replay}

    def living(self) -> dict[str, Any]:
        """Weights, moments, statistics and metrics, where they live; the ring only changes once a rollout is done."""
        modules = self.learner.modules() | {"noise": self.noise, "rewards": self.rewards}
        return {
            "modules": {name: dict(module.state_dict()) for name, module in modules.items()},
            "optimizers": {name: optimizer.living() for name, optimizer in self.learner.optimizers.items()},
            "metrics": self.learner.metrics,
        }

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of them, counters, random states, and the ring unless it is left out."""
        counters = {"rollouts": self.rollouts, "refilled": self.refilled, "updates": self.updates}
        return super().state_dict() | {"counters": counters, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        super().load_state_dict(state)
        self.rollouts, self.refilled, self.updates = (state["counters"][n] for n in ("rollouts", "refilled", "updates"))
        self.replay.load_state_dict(state["replay"])
        if self.refilled and not state["replay"]["tables"]:
            self.refilled, needed = 0, max(self.config.warmup_steps, 1)
            logger.warning(
                f"the checkpoint holds no remembered transitions (replay.save=false): {needed} are collected, by the "
                "policy, before learning goes on"
            )


@algorithms.register("sac")
@dataclass(frozen=True, kw_only=True)
class SACConfig(SACSettings):
    """Settings that build SAC; as they stand, the plain one: two critics of 256 x 256 and nothing else."""

    declared: ClassVar[Declared] = DECLARED

    def build(self, spec: EnvSpec, seed: int) -> SAC:
        """SAC for an environment, on the environment's device."""
        return SAC(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """How far returns look ahead."""
        return RolloutPlan(
            horizon=self.horizon,
            num_minibatches=self.updates,
            drawn=self.batch_size,
            warmup_steps=self.warmup_steps,
            gamma=self.gamma,
            gae_lambda=0.0,
        )

    def unused(self, spec: EnvSpec) -> list[str]:
        """A line for each setting that was changed and has no part in this configuration."""
        return unused_settings(self, spec)

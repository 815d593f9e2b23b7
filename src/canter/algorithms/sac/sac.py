"""Soft actor-critic, from the plain algorithm with two critics to large fleets of environments.

T steps, N environments, A action components, B samples in an update.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from canter.algorithms.base import Algorithm
from canter.algorithms.doctor.signals import ENOUGH_TRANSITIONS, transition_signals
from canter.algorithms.sac.learner import SACLearner
from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.seeding import derive_seed, draw_for_rank
from canter.core.specs import Continuous, EnvSpec
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_map
from canter.engines.choose import EngineName, choose
from canter.engines.triton.kernels import load_kernels
from canter.nn.normalizer import Normalizer, add_returns_

if TYPE_CHECKING:
    from canter.algorithms.sac.config import SACConfig

logger = logging.getLogger(__name__)

TICK_TRANSITIONS = 1_000
TICK_STEPS = 64
"""An iteration of SAC is short: a row of the log covers at least TICK_TRANSITIONS transitions and
TICK_STEPS vectorised steps."""


@dataclass
class SACRecord(TensorStruct):
    """Record of a step."""

    action: Tensor
    """`[N, A]` in -1..1."""


@dataclass(frozen=True)
class Stage:
    """Decisions of the host about an iteration; each stage has its own CUDA graphs."""

    random: bool
    """Act uniformly at random."""
    learns: bool
    """Update after the rollout."""
    turn: int
    """Updates since the policy was last updated."""


class SAC(Algorithm[SACRecord]):
    """Acts by a squashed Gaussian, stores transitions and learns from samples of them."""

    variable_size_keys = ("replay",)
    reads_reset = False
    streams = ("policy_rng", "replay_rng")

    def __init__(self, config: SACConfig, spec: EnvSpec, seed: int) -> None:
        config.check(spec)
        assert isinstance(spec.action, Continuous)
        if spec.device.type == "cuda":
            load_kernels()
        self.config = config
        self.spec = spec
        self.horizon = config.horizon
        self.transitions = config.horizon * spec.num_envs * distributed.world_size()
        """Transitions of a rollout, of all ranks."""
        self.updates_per_rollout = config.updates_after(self.transitions)
        """Updates of the critics after each rollout."""
        dim = spec.action.dim
        with torch.random.fork_rng(devices=[spec.device] if spec.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(seed, "init"))
            self.policy = config.model().build_policy(spec)
            self.policy.actor.to(spec.device)
            critics = config.critic.build(spec, dim).to(spec.device)
        for tensor in (*self.policy.actor.state_dict().values(), *critics.state_dict().values()):
            distributed.broadcast_(tensor)
        self.learner = SACLearner(config, self.policy.actor, critics, dim)
        self.use_engine("auto")
        self.replay = config.replay.build(spec, dim)
        noise = RepeatedNoise(config.noise_repeat, spec.num_envs, dim) if config.noise_repeat > 1 else WhiteNoise()
        scale = ReturnScale(config.gamma, config.return_limit, spec.num_envs) if config.scale_rewards else nn.Identity()
        self.noise = noise.to(spec.device)
        self.rewards = scale.to(spec.device)
        self.policy_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "policy"))
        self.replay_rng = torch.Generator(spec.device).manual_seed(derive_seed(seed, "shuffle"))
        self.progress = torch.zeros((), device=spec.device)
        self.like = torch.zeros((spec.num_envs, dim), device=spec.device)
        """Template of the actions, for noise."""
        self.rollouts = 0
        """Rollouts so far; the host counts these three."""
        self.refilled = 0
        """Rollouts in the replay buffer, which a checkpoint may have left out."""
        self.updates = 0
        """Updates of the critics so far."""
        self.stage = Stage(random=True, learns=False, turn=0)
        steps = max(TICK_TRANSITIONS / spec.num_envs, TICK_STEPS)
        self.iterations_per_tick = max(1, round(steps / self.horizon))

    def use_engine(self, name: EngineName) -> None:
        """Compute gradients with this engine from now on; raise ValueError if it cannot."""
        learner = self.learner
        choice = choose(learner.loss(), learner.networks(self.spec), learner.optimizers, name)
        learner.engine = choice.engine
        self.engine = choice.summary()
        self.multithreaded_update = self.learner.engine is not None

    def empty_record(self) -> SACRecord:
        """Return a record `[N, ...]` of the right shapes and dtypes, as a template for buffers."""
        return SACRecord(torch.zeros_like(self.like))

    def begin_iteration(self) -> None:
        """Decide how the coming rollout acts and whether updates follow it."""
        config = self.config
        random = self.rollouts * self.transitions < config.warmup_steps
        self.rollouts += 1
        self.refilled += 1
        learns = self.refilled * self.transitions >= max(config.warmup_steps, 1)
        self.stage = Stage(random, learns, turn=self.updates % config.policy_delay)
        self.updates += self.updates_per_rollout if learns else 0

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, SACRecord, State]:
        """Sample actions; during the warm-up all are equally likely."""
        if self.stage.random:
            share = draw_for_rank(torch.rand, self.like.shape, generator=self.policy_rng, device=self.spec.device)
            raw = torch.atanh((2.0 * share - 1.0).clamp(-0.999999, 0.999999))
        elif self.learner.engine is not None:
            raw = self.learner.engine.act(obs, self.noise(self.like, self.policy_rng))
        else:
            params, state = self.policy.params(obs, state)
            mean, log_std = params.chunk(2, -1)
            raw = torch.addcmul(mean, log_std.exp(), self.noise(mean, self.policy_rng))
        return self.policy.distribution.to_env(raw), SACRecord(torch.tanh(raw)), state

    def update(self, rollout: Rollout[SACRecord]) -> Metrics:
        """Store a rollout, learn from samples of the replay buffer and return the metrics."""
        self.replay.write(rollout, rollout.record.action)
        self._update_statistics(rollout)
        metrics = {"replay/rows": self.replay.count}
        if not self.stage.learns:
            return metrics
        return metrics | self._learn()

    def signals(self, rollout: Rollout[SACRecord]) -> Metrics:
        """Return signals of recent transitions, and the target and the upper limit of the entropy."""
        if self.refilled < 2:  # the rollout itself is not stored yet
            return {}
        index = self.replay.newest(ENOUGH_TRANSITIONS)
        constants = {
            "target_entropy": self.learner.target_entropy,
            "entropy_limit": self.like.shape[-1] * math.log(2.0),
        }
        limits = {name: torch.full_like(self.progress, value) for name, value in constants.items()}
        recent = transition_signals(self.replay.read_obs(index), self.replay.action[index], self.replay.reward[index])
        return recent | limits

    def _update_statistics(self, rollout: Rollout[SACRecord]) -> None:
        """Update the statistics with new transitions, once, however often they will be sampled."""
        obs = tree_map(lambda x: x[:-1], rollout.obs)
        if isinstance(self.rewards, ReturnScale):
            self.rewards.update(rollout)
        self.learner.actor.network.update_statistics(obs, rollout.valid)
        self.learner.critics.encoder.update_statistics(obs, rollout.valid)

    def _learn(self) -> Metrics:
        """Sample transitions for all updates of an iteration at once, and learn from them."""
        config = self.config
        updates = self.updates_per_rollout
        self.learner.schedule_(self.progress)
        samples = self.replay.sample(updates * config.batch_size, config.n_steps, config.gamma, self.replay_rng)
        samples = replace(samples, reward=self.rewards(samples.reward))
        shape = (updates, 2, config.batch_size, self.like.shape[-1])
        noise = torch.randn(shape, generator=self.replay_rng, device=self.spec.device)
        for number in range(updates):
            self.learner.update(
                samples[number * config.batch_size : (number + 1) * config.batch_size],
                noise[number],
                learn_policy=(self.stage.turn + number + 1) % config.policy_delay == 0,
                log_critics=number + 1 == updates,
                log_policy=number + config.policy_delay >= updates,
            )
        metrics = {
            "replay/lost": 1.0 - samples.valid.float().mean(),
            "optim/minibatch_updates": torch.full((), float(updates), device=self.spec.device),
        }
        if isinstance(self.rewards, ReturnScale):
            metrics["reward/unit"] = 1.0 / self.rewards(torch.ones_like(self.progress))
        copies = torch.stack(list(self.learner.metrics.values())).unbind()  # by one call
        return metrics | dict(zip(self.learner.metrics, copies, strict=True))

    def about(self) -> dict[str, Any]:
        """Return the engine, and the size of the replay buffer and whether checkpoints hold it."""
        size = self.config.replay.nbytes(self.spec, self.policy.distribution.param_dim // 2)
        saved = "saved in checkpoints" if self.config.replay.save else "left out of checkpoints (replay.save=false)"
        transitions = (self.replay.slots - 1) * self.spec.num_envs
        replay = f"{transitions:,} transitions, {size / 1e6:,.0f} MB on {self.spec.device}, {saved}"
        return {"engine": self.engine, "replay": replay}

    def state_tensors(self) -> dict[str, Any]:
        """Return the live weights, moments, statistics and metrics.

        The replay buffer needs no rollback: it changes only once a rollout is complete.
        """
        modules = self.learner.modules() | {"noise": self.noise, "rewards": self.rewards}
        return {
            "modules": {name: dict(module.state_dict()) for name, module in modules.items()},
            "optimizers": {name: optimizer.state_tensors() for name, optimizer in self.learner.optimizers.items()},
            "metrics": self.learner.metrics,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return copies of `state_tensors`, random states and counters.

        The replay buffer is included if `replay.save` is set.
        """
        counters = {"rollouts": self.rollouts, "refilled": self.refilled, "updates": self.updates}
        return super().state_dict() | {"counters": counters, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state into the live tensors; they keep their addresses."""
        super().load_state_dict(state)
        self.rollouts = state["counters"]["rollouts"]
        self.refilled = state["counters"]["refilled"]
        self.updates = state["counters"]["updates"]
        self.replay.load_state_dict(state["replay"])
        if self.refilled and not state["replay"]["tables"]:
            self.refilled = 0
            needed = max(self.config.warmup_steps, 1)
            logger.warning(
                f"the checkpoint holds no replay buffer (replay.save=false): the policy collects {needed} transitions "
                "before learning goes on"
            )


class WhiteNoise(nn.Module):
    """Exploration noise that is new in every step."""

    def forward(self, like: Tensor, generator: Generator) -> Tensor:
        """Return standard normal noise of the shape of `like` `[N, A]`."""
        return draw_for_rank(torch.randn, like.shape, generator=generator, device=like.device, dtype=like.dtype)


class RepeatedNoise(nn.Module):
    """Exploration noise that each environment keeps for k <= `most` steps with probability ~ k^-2.

    Noise that lasts moves a robot; noise that changes in every step shakes it.
    """

    def __init__(self, most: int, num_envs: int, dim: int) -> None:
        super().__init__()
        weights = torch.arange(1, most + 1, dtype=torch.float64) ** -2
        self.chance = nn.Buffer((weights.cumsum(0) / weights.sum()).float(), persistent=False)
        self.noise = nn.Buffer(torch.zeros(num_envs, dim))
        self.left = nn.Buffer(torch.zeros(num_envs, dtype=torch.int64))

    def forward(self, like: Tensor, generator: Generator) -> Tensor:
        """Return the noise of this step; the next step overwrites it."""
        fresh = draw_for_rank(torch.randn, like.shape, generator=generator, device=like.device, dtype=like.dtype)
        share = draw_for_rank(torch.rand, (len(like),), generator=generator, device=like.device)
        steps = (torch.searchsorted(self.chance, share) + 1).clamp(max=len(self.chance))
        renew = self.left <= 0
        self.left.copy_(torch.where(renew, steps, self.left) - 1)
        self.noise.copy_(torch.where(renew.unsqueeze(-1), fresh, self.noise))
        return self.noise


class ReturnScale(nn.Module):
    """Divides by the std of discounted returns or their largest amount over `limit`, if greater.

    Rewards are stored unscaled, so that old ones are scaled by the current statistics.
    """

    def __init__(self, gamma: float, limit: float, num_envs: int) -> None:
        super().__init__()
        self.gamma = gamma
        self.limit = limit
        self.statistics = Normalizer()
        self.running = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))
        self.largest = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rollout: Rollout[Any]) -> None:
        """Update the statistics with a rollout, once."""
        returns = add_returns_(self.statistics, self.running, rollout.reward, rollout.done, rollout.valid, self.gamma)
        amount = torch.where(rollout.valid & torch.isfinite(returns), returns.abs(), 0.0).amax()
        self.largest.copy_(torch.maximum(self.largest, distributed.max_(amount)))

    def forward(self, reward: Tensor) -> Tensor:
        """Return the rewards in the unit of the returns so far."""
        return reward / torch.maximum(self.statistics.scale, (self.largest / self.limit).float())

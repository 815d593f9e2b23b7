"""Style from motion clips: a reward for moving in a way that cannot be told from them.

Adversarial motion priors (Peng et al., 2021): a discriminator learns to tell transitions of the policy from those of
clips, and the policy is paid for those that it takes for the latter. T steps, N environments, F frames, D components
of a frame, W = F * D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.algorithms.extension import Extension, extensions
from canter.algorithms.phase import Phase
from canter.core.data.motion import Frames, MotionLibrary, column, load_clip, pose_error
from canter.core.data.rollout import Rollout
from canter.core.declarations import MotionSpec
from canter.core.plain import check_range
from canter.core.registry import UserError, nearest
from canter.core.seeding import draw_for_rank
from canter.core.specs import EnvSpec
from canter.core.struct import TensorStruct
from canter.engines.autograd import LossGradients, LossOutput
from canter.functional.statistics import masked_mean, moments
from canter.nn.actor_critic import ActorCritic
from canter.nn.mlp import MLP, Activation, Linear, init_layer
from canter.nn.normalizer import IdentityNormalizer, Normalizer
from canter.nn.optimizer import Optimizer, OptimizerConfig, ParameterGroup
from canter.nn.schedules import AdaptiveKL, Constant

CLIP = 5.0
"""Standardised frames are cut off there."""
MOST = -math.log(1e-4)
"""What a transition earns at the most, before it is scaled."""
WATCHED, LATEST, COMPARED = 8, 64, 4096
"""The pose error is of so many environments in at most so many steps, against the first so many frames of the clips."""


@extensions.register("amp")
@dataclass(frozen=True, kw_only=True)
class AMPConfig:
    """Style from motion clips by an adversary."""

    motions: tuple[str, ...] = ()
    """Files of clips, `.npz` or `.csv`; `canter:NAME` is one that comes with Canter."""
    motion_weights: tuple[float, ...] | None = None
    """How often each is drawn, relative to others; null draws all alike."""
    obs_group: str | None = None
    """The observation group that is compared with clips; null takes the one that the environment says how to."""
    columns: tuple[str, ...] | None = None
    """Which columns of clips the components of that group are, `FIELD/NAME` or `FIELD/NAME/AXIS`; null leaves it to the
    environment."""
    time_step: float | None = None
    """Seconds from one observation to the next; null takes what the environment says."""
    frames: int = 2
    """Observations in a row that are judged together."""
    task_weight: float = 0.5
    """What the environment's reward is multiplied by."""
    style_weight: float = 0.5
    """What the reward for style is multiplied by."""
    reward_scale: float = 2.0
    """The reward for style is -log(1 - p) times this, where p is how likely the discriminator takes it for a clip."""
    hidden: tuple[int, ...] = (1024, 512)
    """Hidden layers of the discriminator."""
    activation: Activation = "relu"
    """Its non-linearity."""
    normalize_obs: bool = True
    """Standardise what it sees by running statistics of both kinds, clipped at 5 standard deviations."""
    input_noise: float = 0.0
    """Noise on all that it learns from, in standard deviations of a component: without, the noise of the policy may be
    all that it goes by."""
    gradient_penalty: float = 5.0
    """Weight of the squared gradient of the logit by its input, at clips."""
    logit_regularization: float = 0.05
    """Weight of the squared weights of the last layer."""
    weight_regularization: float = 1e-4
    """Weight of the squared weights of all layers."""
    batch_size: int = 4096
    """Rows of each kind in an update: clips, the policy now, and the policy before."""
    updates: int = 4
    """Updates of the discriminator after each rollout."""
    replay: int = 100_000
    """Transitions of the policy that are remembered; 0 for none."""
    replay_rows: int = 1000
    """How many of each rollout are, drawn at random."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=Constant(1e-4)))
    """Of the discriminator."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        weights = ("task_weight", "style_weight", "gradient_penalty", "logit_regularization", "weight_regularization")
        check_range(self, "must not be negative", *weights, "input_noise", "replay")
        check_range(self, "must be at least 1", "batch_size", "updates", "replay_rows")
        check_range(self, "must be above 0", "reward_scale", "time_step")
        if self.frames < 2:
            raise UserError(f"frames={self.frames} must be at least 2")
        check_range(self, "must be widths of at least 1", "hidden")
        if self.replay and self.replay_rows > self.replay:
            raise UserError(f"replay_rows={self.replay_rows} is more than replay={self.replay} can hold")
        weights = self.motion_weights
        if weights is not None and (len(weights) != len(self.motions) or min(weights) < 0 or not sum(weights) > 0):
            raise UserError(
                f"motion_weights={weights} must be one for each of {len(self.motions)} motions, not below 0"
            )
        if isinstance(self.optimizer.learning_rate, AdaptiveKL):
            raise UserError("optimizer.learning_rate: adaptive_kl follows the policy; use a number, linear or step")

    def build(self, spec: EnvSpec, model: ActorCritic, generator: torch.Generator) -> AMP:
        """Discriminator, normaliser and memory for an environment."""
        return AMP(self, spec, generator)

    def motion_of(self, spec: EnvSpec) -> tuple[str, MotionSpec]:
        """The observation group, and how clips look to an environment by its declaration and these settings."""
        if not self.motions:
            raise UserError("amp: motions names no clips, and there is nothing to imitate")
        told, name = spec.motion or MotionSpec(0.0, {}), self.obs_group
        if name is None:
            known = [*told.observe, "amp"]
            name = next((key for key in known if key in spec.obs), known[0])
        if name not in spec.obs:
            raise UserError(f"amp: obs_group names {name!r}, which the environment does not show: "
                             f"{nearest(name, spec.obs)}")  # fmt: skip
        if spec.motion is None and (self.columns is None or self.time_step is None):
            raise UserError(
                f"amp: {spec.env_id or 'this environment'} does not say how clips look to it (EnvSpec.motion): give "
                "columns and time_step"
            )
        if self.columns is None and name not in told.observe:
            raise UserError(f"amp: obs_group={name!r} is none that the environment compares with clips: "
                             f"{nearest(name, told.observe)}")  # fmt: skip
        step = self.time_step or told.time_step
        return name, replace(told, time_step=step) if self.columns is None else MotionSpec(step, {})


@dataclass
class AMPBatch(TensorStruct):
    """What the discriminator learns from, standardised and with noise, `[1, S, W]` each."""

    agent: Tensor
    before: Tensor
    """Of the policy as it was; the same as `agent` without replay."""
    demo: Tensor
    valid: Tensor
    """`[1, S]` bool; False only where a rollout had no transition to judge."""


class AMP(Extension):
    """Pays for style by `reward`, and trains the discriminator in a phase of its own."""

    def __init__(self, config: AMPConfig, spec: EnvSpec, generator: torch.Generator) -> None:
        super().__init__()
        self.config, self.generator = config, generator
        self.group, self.motion = config.motion_of(spec)
        clips, motion, device = [load_clip(file) for file in config.motions], self.motion, generator.device
        self.span = (config.frames - 1) * motion.time_step
        for clip in clips:
            if clip.duration < self.span:
                raise UserError(f"amp: motion {clip.name!r} lasts {clip.duration:g} s, {config.frames} frames take "
                                 f"{self.span:g} s")  # fmt: skip
        self.motions = MotionLibrary(clips, config.motion_weights, motion.joints, motion.bodies, device)
        self.size = torch.Size(spec.obs[self.group].shape).numel()
        frames, begins = self.motions.every(motion.time_step)
        seen = self._look(frames)
        if seen.shape[-1] != self.size:
            raise UserError(f"amp: obs_group {self.group!r} has {self.size} components, clips give {seen.shape[-1]}")
        width = config.frames * self.size
        pose = torch.tensor(motion.pose or tuple(range(self.size)), device=device)
        self.pose = nn.Buffer(pose, persistent=False)
        self.reference = nn.Buffer(seen[:COMPARED].index_select(-1, self.pose), persistent=False)
        self.begins = nn.Buffer(begins[:COMPARED], persistent=False)
        self.normalizer = Normalizer((width,), clip=CLIP) if config.normalize_obs else IdentityNormalizer()
        self.trunk = MLP(width, config.hidden, config.activation, "orthogonal", 2**0.5)
        self.logit = init_layer(Linear((width, *config.hidden)[-1], 1), "orthogonal", 1.0)
        self.past = nn.Buffer(torch.zeros(config.frames - 2, spec.num_envs, self.size))
        self.age = nn.Buffer(torch.zeros(spec.num_envs, dtype=torch.int64))
        self.ring = nn.Buffer(torch.zeros(config.replay, width))
        self.written = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.told = nn.Buffer(torch.zeros(2))
        own = {"discriminator": ParameterGroup([*self.trunk.parameters(), *self.logit.parameters()], config.optimizer)}
        source = LossGradients(self.discriminator_loss, Optimizer(own, clip_jointly=True))
        self.phase: Phase[AMPBatch] = Phase(source, 1, config.updates, generator, name="amp", draw=self.draw)

    def _look(self, frames: Frames) -> Tensor:
        """The observation `[..., D]` of frames of clips."""
        if not self.motion.observe:
            return torch.stack([column(frames, self.motions, name) for name in self.config.columns or ()], -1)
        try:
            return self.motion.observe[self.group](frames)
        except KeyError as error:
            raise UserError(
                f"amp: the environment asks clips for {error}, and they have {', '.join(frames)}"
            ) from error

    def demonstrations(self, count: int) -> Tensor:
        """Transitions `[count, W]` of clips, the earliest frame first."""
        clip, time = self.motions.sample(count, self.generator, self.span)
        back = self.motion.time_step * torch.arange(self.config.frames - 1, -1, -1, device=time.device)
        times = time.unsqueeze(-1) - back
        return self._look(self.motions.at(clip.unsqueeze(-1).expand_as(times), times)).flatten(1)

    def transitions(self, rollout: Rollout[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """What the policy did, `[T, N, W]`, which of it lies in one episode, and the steps since that began."""
        rows = rollout.transitions([self.group])
        obs, after = rows.obs[self.group].flatten(2), rows.next_obs[self.group].flatten(2)
        horizon, numbers = len(obs), torch.arange(len(obs), device=obs.device).unsqueeze(-1)
        start = torch.where(rollout.reset[:-1], numbers, -self.age).cummax(0).values
        frames = torch.cat((self.past, obs))
        earlier = [frames[k : k + horizon] for k in range(self.config.frames - 1)]
        age = numbers - start
        return torch.cat((*earlier, after), -1), rows.valid & (age >= self.config.frames - 2), age

    def style(self, rows: Tensor) -> Tensor:
        """What transitions `[..., W]` earn, before it is scaled: `-log(max(1 - sigmoid(d), 1e-4))`."""
        return F.softplus(self.judge(self.normalizer(rows))).clamp(max=MOST)

    def judge(self, rows: Tensor) -> Tensor:
        """Logits `[...]` of standardised transitions `[..., W]`: high for clips."""
        return self.logit(self.trunk(rows)).squeeze(-1)

    def reward(self, rollout: Rollout[Any]) -> Tensor:
        """The reward for task and style together."""
        config, (rows, valid, _) = self.config, self.transitions(rollout)
        self.normalizer.update(rows, valid)
        shown = self.demonstrations(valid.numel())
        self.normalizer.update(shown, torch.ones_like(shown[:, 0], dtype=torch.bool))
        style = torch.where(valid, config.reward_scale * self.style(rows), 0.0)
        poses = rollout.obs[self.group].flatten(2)[:-1][-LATEST:, :WATCHED].index_select(-1, self.pose)
        error = pose_error(poses, rollout.reset[:-1][-LATEST:, :WATCHED], self.reference, self.begins).mean()
        self.told.copy_(torch.stack((moments(style, valid)[1], error)))
        return config.task_weight * rollout.reward + config.style_weight * style

    @torch.no_grad()
    def draw(self, rollout: Rollout[Any]) -> AMPBatch:
        """Rows of each kind for all updates; remembers some of the policy's, and where each episode stands."""
        config, count = self.config, self.config.batch_size * self.config.updates
        rows, valid, age = self.transitions(rollout)
        rows, valid, there = rows.flatten(0, 1), valid.flatten(), valid.any()
        agent = rows[self._pick(valid, count)]
        before = agent
        if config.replay:
            places = (self.written + torch.arange(config.replay_rows, device=rows.device)) % config.replay
            new = torch.where(there, rows[self._pick(valid, config.replay_rows)], self.ring[places])
            self.ring.index_copy_(0, places, new)
            self.written += config.replay_rows * there
            share = draw_for_rank(torch.rand, (count,), generator=self.generator, device=rows.device)
            before = self.ring[(share * self.written.clamp(max=config.replay)).long().clamp(max=config.replay - 1)]
        self.past.copy_(torch.cat((self.past, rollout.obs[self.group][:-1].flatten(2)))[rollout.horizon :])
        self.age.copy_(age[-1] + 1)
        agent, before, demo = (self._shown(rows) for rows in (agent, before, self.demonstrations(count)))
        return AMPBatch(agent, before, demo, there.expand(1, count))

    def _shown(self, rows: Tensor) -> Tensor:
        """Rows `[S, W]` as the discriminator learns from them, `[1, S, W]`."""
        rows = self.normalizer(rows)
        if self.config.input_noise:
            noise = draw_for_rank(torch.randn, rows.shape, generator=self.generator, device=rows.device)
            rows = rows + self.config.input_noise * noise
        return rows.unsqueeze(0)

    def _pick(self, valid: Tensor, count: int) -> Tensor:
        """Numbers `[count]` of rows that are valid, each equally likely; any where none is."""
        ranks = valid.cumsum(0)
        how = {"generator": self.generator, "device": valid.device, "dtype": torch.float64}
        share = draw_for_rank(torch.rand, (count,), **how)
        return torch.searchsorted(ranks, (share * ranks[-1]).long() + 1).clamp(max=len(valid) - 1)

    def discriminator_loss(self, batch: AMPBatch) -> LossOutput:
        """Cross-entropy of telling policy and clips apart, with its penalties."""
        config = self.config
        demo = batch.demo.detach().requires_grad_()
        of_demo, of_agent = self.judge(demo), self.judge(batch.agent)
        wrong = F.softplus(of_agent)
        if config.replay:
            wrong = 0.5 * (wrong + F.softplus(self.judge(batch.before)))
        told_apart = 0.5 * (masked_mean(wrong, batch.valid) + F.softplus(-of_demo).mean())
        (slope,) = torch.autograd.grad(of_demo.sum(), demo, create_graph=True)
        penalty = slope.square().sum(-1).mean()
        weights = [layer.weight for layer in (*self.trunk, self.logit) if isinstance(layer, nn.Linear)]
        squares = [weight.square().sum() for weight in weights]
        loss = (
            told_apart
            + config.gradient_penalty * penalty
            + config.logit_regularization * squares[-1]
            + config.weight_regularization * torch.stack(squares).sum()
        )
        told = {
            "loss/amp": loss,
            "amp/accuracy_agent": masked_mean((of_agent < 0).float(), batch.valid),
            "amp/accuracy_demo": (of_demo > 0).float().mean(),
            "amp/logit_agent": masked_mean(of_agent, batch.valid),
            "amp/logit_demo": of_demo.mean(),
            "amp/gradient_penalty": penalty,
            "amp/style_reward": self.told[0],
            "amp/pose_error": self.told[1],
        }
        return LossOutput(loss, told)

    def phases(self) -> dict[str, Phase[Any]]:
        """The discriminator's."""
        return {"amp": self.phase}

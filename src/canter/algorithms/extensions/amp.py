"""Style from motion clips: a reward for motion that a discriminator takes for a clip.

Adversarial motion priors (Peng et al., 2021): a discriminator learns to distinguish transitions of
the policy from those of clips, and the policy is rewarded for transitions that look like clips.

T steps, N environments, S samples, F frames, D components of a frame, W = F * D.
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
from canter.nn.optimizer import Optimizer, OptimizerConfig
from canter.nn.schedules import AdaptiveKL, Constant

CLIP = 5.0
"""Limit of standardised frames."""
MAX_STYLE = -math.log(1e-4)
"""Upper limit of the style reward of a transition, before scaling."""
POSE_ENVS = 8
POSE_STEPS = 64
POSE_FRAMES = 4096
"""The pose error compares POSE_ENVS environments in the last POSE_STEPS steps with the first
POSE_FRAMES frames of clips."""


@extensions.register("amp")
@dataclass(frozen=True, kw_only=True)
class AMPConfig:
    """Style from motion clips, learned by a discriminator."""

    motions: tuple[str, ...] = ()
    """Files of clips, `.npz` or `.csv`; `canter:NAME` is a clip that comes with Canter."""
    motion_weights: tuple[float, ...] | None = None
    """Relative sampling weight of each clip; null samples all equally."""
    obs_group: str | None = None
    """Observation group to compare with clips; null takes the one that the environment declares."""
    columns: tuple[str, ...] | None = None
    """Columns of clips for the components of that group, `FIELD/NAME` or `FIELD/NAME/AXIS`; null
    takes the environment's declaration."""
    time_step: float | None = None
    """Seconds between observations; null takes the environment's declaration."""
    frames: int = 2
    """Consecutive observations that the discriminator sees together."""
    task_weight: float = 0.5
    """Factor of the environment's reward."""
    style_weight: float = 0.5
    """Factor of the style reward."""
    reward_scale: float = 2.0
    """Scale of the style reward -log(1 - p), where p is the discriminator's probability of a
    clip."""
    hidden: tuple[int, ...] = (1024, 512)
    """Hidden layers of the discriminator."""
    activation: Activation = "relu"
    """Activation of the discriminator."""
    normalize_obs: bool = True
    """Standardise its input by running statistics of policy and clips, clipped at 5 standard
    deviations."""
    input_noise: float = 0.0
    """Noise on its training data, in standard deviations of a component. Without noise the
    discriminator may recognise the policy by its exploration noise alone."""
    gradient_penalty: float = 5.0
    """Weight of the squared gradient of the logit with respect to its input, at clips."""
    logit_regularization: float = 0.05
    """Weight of the squared weights of the last layer."""
    weight_regularization: float = 1e-4
    """Weight of the squared weights of all layers."""
    batch_size: int = 4096
    """Samples of each kind in an update: clips, the current policy, and the policy of earlier
    rollouts."""
    updates: int = 4
    """Updates of the discriminator after each rollout."""
    replay: int = 100_000
    """Transitions of the policy in the replay buffer; 0 for none."""
    replay_rows: int = 1000
    """Random transitions of each rollout that are added to the replay buffer."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=Constant(1e-4)))
    """Optimiser of the discriminator."""

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
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
        """Return discriminator, normaliser and replay buffer for an environment."""
        return AMP(self, spec, generator)

    def motion_of(self, spec: EnvSpec) -> tuple[str, MotionSpec]:
        """Return the observation group to compare, and how the environment observes clips."""
        declared = spec.motion or MotionSpec(0.0, {})
        if not self.motions and declared.demonstrations is not None:
            return "amp", declared
        if not self.motions:
            raise UserError("amp: motions names no clips, and there is nothing to imitate")
        name = self.obs_group
        if name is None:
            candidates = [*declared.observe, "amp"]
            name = next((key for key in candidates if key in spec.obs), candidates[0])
        if name not in spec.obs:
            raise UserError(f"amp: obs_group names {name!r}, which the environment does not return: "
                             f"{nearest(name, spec.obs)}")  # fmt: skip
        if spec.motion is None and (self.columns is None or self.time_step is None):
            raise UserError(
                f"amp: {spec.env_id or 'this environment'} does not declare how to observe clips (EnvSpec.motion): set "
                "columns and time_step"
            )
        if self.columns is None and name not in declared.observe:
            raise UserError(f"amp: obs_group={name!r} is none that the environment compares with clips: "
                             f"{nearest(name, declared.observe)}")  # fmt: skip
        step = self.time_step or declared.time_step
        return name, replace(declared, time_step=step) if self.columns is None else MotionSpec(step, {})


@dataclass
class AMPBatch(TensorStruct):
    """Training data of the discriminator, standardised and with noise, `[1, S, W]` each."""

    agent: Tensor
    before: Tensor
    """Transitions of earlier policies; the same as `agent` without replay."""
    demo: Tensor
    valid: Tensor
    """`[1, S]` bool; False only if the rollout has no valid transition."""


class AMP(Extension):
    """Adds the style reward and trains the discriminator in a separate phase."""

    def __init__(self, config: AMPConfig, spec: EnvSpec, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.generator = generator
        self.group, self.motion = config.motion_of(spec)
        self.size = torch.Size(spec.obs[self.group].shape).numel()
        self.frames = config.frames if config.motions else 1
        """Frames that are stacked to a transition; 1 if the environment's group is one."""
        if config.motions:
            self._load_clips(generator.device)
        width = self.frames * self.size
        self.normalizer = Normalizer((width,), clip=CLIP) if config.normalize_obs else IdentityNormalizer()
        self.trunk = MLP(width, config.hidden, config.activation, "orthogonal", 2**0.5)
        self.logit = init_layer(Linear((width, *config.hidden)[-1], 1), "orthogonal", 1.0)
        self.past = nn.Buffer(torch.zeros(max(self.frames - 2, 0), spec.num_envs, self.size))
        self.age = nn.Buffer(torch.zeros(spec.num_envs, dtype=torch.int64))
        self.ring = nn.Buffer(torch.zeros(config.replay, width))
        self.written = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.told = nn.Buffer(torch.zeros(2))
        """Mean style reward and pose error of the last rollout, for the log; the name is a key of
        checkpoints."""
        parameters = [*self.trunk.parameters(), *self.logit.parameters()]
        optimizer = Optimizer.single("discriminator", parameters, config.optimizer)
        source = LossGradients(self.discriminator_loss, optimizer)
        self.phase: Phase[AMPBatch] = Phase(source, 1, config.updates, generator, name="amp", draw=self.draw)

    def _load_clips(self, device: torch.device) -> None:
        """Load the clips, and the frames that poses are compared with."""
        config = self.config
        motion = self.motion
        clips = [load_clip(file) for file in config.motions]
        self.span = (config.frames - 1) * motion.time_step
        for clip in clips:
            if clip.duration < self.span:
                raise UserError(f"amp: motion {clip.name!r} lasts {clip.duration:g} s, {config.frames} frames take "
                                 f"{self.span:g} s")  # fmt: skip
        self.motions = MotionLibrary(clips, config.motion_weights, motion.joints, motion.bodies, device)
        frames, begins = self.motions.every(motion.time_step)
        observed = self._observe(frames)
        width = observed.shape[-1]
        if width != self.size:
            raise UserError(f"amp: obs_group {self.group!r} has {self.size} components, clips have {width}")
        pose = torch.tensor(motion.pose or tuple(range(self.size)), device=device)
        self.pose = nn.Buffer(pose, persistent=False)
        self.reference = nn.Buffer(observed[:POSE_FRAMES].index_select(-1, self.pose), persistent=False)
        self.begins = nn.Buffer(begins[:POSE_FRAMES], persistent=False)

    def _observe(self, frames: Frames) -> Tensor:
        """Return the observations `[..., D]` of frames of clips."""
        if not self.motion.observe:
            return torch.stack([column(frames, self.motions, name) for name in self.config.columns or ()], -1)
        try:
            return self.motion.observe[self.group](frames)
        except KeyError as error:
            raise UserError(
                f"amp: the environment asks clips for {error}, and they have {', '.join(frames)}"
            ) from error

    def demonstrations(self, count: int) -> Tensor:
        """Return random transitions `[count, W]` of clips, the earliest frame first."""
        if not self.config.motions and self.motion.demonstrations is not None:
            rows = self.motion.demonstrations()
            share = draw_for_rank(torch.rand, (count,), generator=self.generator, device=rows.device)
            return rows[(share * len(rows)).long().clamp(max=len(rows) - 1)]
        clip, time = self.motions.sample(count, self.generator, self.span)
        back = self.motion.time_step * torch.arange(self.config.frames - 1, -1, -1, device=time.device)
        times = time.unsqueeze(-1) - back
        return self._observe(self.motions.at(clip.unsqueeze(-1).expand_as(times), times)).flatten(1)

    def transitions(self, rollout: Rollout[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the transitions of a rollout `[T, N, W]`, their validity and the age of episodes.

        A transition is valid if all its frames are of one episode; the age counts steps since its
        start.
        """
        pairs = rollout.transitions([self.group])
        obs = pairs.obs[self.group].flatten(2)
        next_obs = pairs.next_obs[self.group].flatten(2)
        horizon = len(obs)
        numbers = torch.arange(horizon, device=obs.device).unsqueeze(-1)
        start = torch.where(rollout.reset[:-1], numbers, -self.age).cummax(0).values
        frames = torch.cat((self.past, obs))
        earlier = [frames[k : k + horizon] for k in range(self.frames - 1)]
        age = numbers - start
        valid = pairs.valid & (age >= self.frames - 2)
        return torch.cat((*earlier, next_obs), -1), valid, age

    def style_reward(self, transitions: Tensor) -> Tensor:
        """Return the unscaled reward of transitions, `-log(max(1 - sigmoid(d), 1e-4))`."""
        return F.softplus(self.discriminate(self.normalizer(transitions))).clamp(max=MAX_STYLE)

    def discriminate(self, transitions: Tensor) -> Tensor:
        """Return the logits `[...]` of standardised transitions `[..., W]`, high for clips."""
        return self.logit(self.trunk(transitions)).squeeze(-1)

    def reward(self, rollout: Rollout[Any]) -> Tensor:
        """Update the normaliser and return the weighted sum of task and style reward."""
        config = self.config
        transitions, valid, _ = self.transitions(rollout)
        self.normalizer.update(transitions, valid)
        demo = self.demonstrations(valid.numel())
        self.normalizer.update(demo, torch.ones_like(demo[:, 0], dtype=torch.bool))
        style = torch.where(valid, config.reward_scale * self.style_reward(transitions), 0.0)
        self.told[0] = moments(style, valid)[1]
        if config.motions:
            poses = rollout.obs[self.group].flatten(2)[:-1][-POSE_STEPS:, :POSE_ENVS].index_select(-1, self.pose)
            resets = rollout.reset[:-1][-POSE_STEPS:, :POSE_ENVS]
            self.told[1] = pose_error(poses, resets, self.reference, self.begins).mean()
        return config.task_weight * rollout.reward + config.style_weight * style

    @torch.no_grad()
    def draw(self, rollout: Rollout[Any]) -> AMPBatch:
        """Sample training data for all updates; store transitions and the state of episodes."""
        config = self.config
        count = config.batch_size * config.updates
        transitions, valid, age = self.transitions(rollout)
        transitions = transitions.flatten(0, 1)
        valid = valid.flatten()
        any_valid = valid.any()
        agent = transitions[self._sample_valid(valid, count)]
        before = agent
        if config.replay:
            slots = (self.written + torch.arange(config.replay_rows, device=valid.device)) % config.replay
            new = transitions[self._sample_valid(valid, config.replay_rows)]
            self.ring.index_copy_(0, slots, torch.where(any_valid, new, self.ring[slots]))
            self.written += config.replay_rows * any_valid
            share = draw_for_rank(torch.rand, (count,), generator=self.generator, device=valid.device)
            before = self.ring[(share * self.written.clamp(max=config.replay)).long().clamp(max=config.replay - 1)]
        self.past.copy_(torch.cat((self.past, rollout.obs[self.group][:-1].flatten(2)))[rollout.horizon :])
        self.age.copy_(age[-1] + 1)
        demo = self.demonstrations(count)  # draws random numbers before the noise does
        return AMPBatch(
            self._discriminator_input(agent),
            self._discriminator_input(before),
            self._discriminator_input(demo),
            any_valid.expand(1, count),
        )

    def _discriminator_input(self, transitions: Tensor) -> Tensor:
        """Return transitions `[S, W]` standardised and with noise, as sequences `[1, S, W]`."""
        inputs = self.normalizer(transitions)
        if self.config.input_noise:
            noise = draw_for_rank(torch.randn, inputs.shape, generator=self.generator, device=inputs.device)
            inputs = inputs + self.config.input_noise * noise
        return inputs.unsqueeze(0)

    def _sample_valid(self, valid: Tensor, count: int) -> Tensor:
        """Return random indices `[count]` of valid samples; any index if none is valid."""
        ranks = valid.cumsum(0)
        share = draw_for_rank(torch.rand, (count,), generator=self.generator, device=valid.device, dtype=torch.float64)
        return torch.searchsorted(ranks, (share * ranks[-1]).long() + 1).clamp(max=len(valid) - 1)

    def discriminator_loss(self, batch: AMPBatch) -> LossOutput:
        """Return the cross-entropy of classifying policy and clips, with its penalties."""
        config = self.config
        demo = batch.demo.detach().requires_grad_()
        demo_logit = self.discriminate(demo)
        agent_logit = self.discriminate(batch.agent)
        agent_loss = F.softplus(agent_logit)
        if config.replay:
            agent_loss = 0.5 * (agent_loss + F.softplus(self.discriminate(batch.before)))
        cross_entropy = 0.5 * (masked_mean(agent_loss, batch.valid) + F.softplus(-demo_logit).mean())
        (gradient,) = torch.autograd.grad(demo_logit.sum(), demo, create_graph=True)
        penalty = gradient.square().sum(-1).mean()
        weights = [layer.weight for layer in (*self.trunk, self.logit) if isinstance(layer, nn.Linear)]
        squares = [weight.square().sum() for weight in weights]
        loss = (
            cross_entropy
            + config.gradient_penalty * penalty
            + config.logit_regularization * squares[-1]
            + config.weight_regularization * torch.stack(squares).sum()
        )
        metrics = {
            "loss/amp": loss,
            "amp/accuracy_agent": masked_mean((agent_logit < 0).float(), batch.valid),
            "amp/accuracy_demo": (demo_logit > 0).float().mean(),
            "amp/logit_agent": masked_mean(agent_logit, batch.valid),
            "amp/logit_demo": demo_logit.mean(),
            "amp/gradient_penalty": penalty,
            "amp/style_reward": self.told[0],
        }
        if config.motions:
            metrics["amp/pose_error"] = self.told[1]
        return LossOutput(loss, metrics)

    def phases(self) -> dict[str, Phase[Any]]:
        """Return the discriminator's phase."""
        return {"amp": self.phase}

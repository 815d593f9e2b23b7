"""Settings of PPO, the checks that refuse impossible ones, and how consoles and reports show PPO."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from canter.algorithms.base import Headline, ReportSpec, RolloutPlan, UnusedIf, algorithms, symmetries_of, unused_lines
from canter.algorithms.doctor.amp import AMP_RULES
from canter.algorithms.doctor.ppo import PPO_RULES
from canter.algorithms.extension import AnyExtensionConfig
from canter.algorithms.ppo.advantages import AverageReward, BonusValueConfig, CentralValueConfig, Discounted, Objective
from canter.algorithms.ppo.ppo import PPO
from canter.algorithms.ppo.rewards import RewardConfig
from canter.core.declarations import Symmetry
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import Continuous, EnvSpec
from canter.engines.base import BoundLossConfig, PPOLoss
from canter.functional.optimization import Shuffle
from canter.nn.actor_critic import ModelConfig
from canter.nn.distributions import DiagGaussian, Distribution, TanhGaussian
from canter.nn.heads import BOUNDED
from canter.nn.network import NetworkConfig, select_groups
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, AnySchedule, Constant

HEADLINES = (
    Headline(
        "policy/clip_fraction",
        "clip fraction",
        "policy",
        "Clip fraction",
        "samples whose ratio left the clip range",
        percent=True,
        block="mean_clipped_ratio",
    ),
    Headline(
        "policy/kl", "KL", "policy", "KL divergence", "change of the policy by an update", line="KL", block="approx_kl"
    ),
    Headline("policy/entropy", "entropy", "policy", "Entropy", "randomness of the actions", line="entropy"),
    Headline("policy/std", "std", "policy", "Standard deviation", "of the actions, before any rescaling"),
    Headline("loss/policy", "policy loss", "learning", "Policy loss", "the surrogate, to be minimised"),
    Headline("loss/value", "value loss", "learning", "Value loss", "error of the critic, in normalised units"),
    Headline(
        "value/explained_variance",
        "explained var.",
        "learning",
        "Explained variance",
        "1: the critic predicts all returns; 0: none; below 0: worse than their mean; cut off at -1",
        floor=-1.0,
        line="explained variance",
    ),
    Headline("optim/learning_rate", "learning rate", "learning", "Learning rate", "step size of the optimiser"),
    Headline("optim/grad_norm", "gradient norm", "", "Gradient norm", "before clipping"),
    Headline("value/mean_absolute_error", "value error", "", "Error of values", "mean absolute, in units of returns"),
    Headline("value/mean", "mean value", "", "Mean value", "return that the critic expects"),
)

PPO_REPORT = ReportSpec(
    headlines=HEADLINES,
    settings={"clip_range": "clip_ratio"},
    optimizer_steps="optim/minibatch_updates",
    counters={"optim/nonfinite_steps": "Steps skipped for NaN or infinity"},
    rules=(PPO_RULES, AMP_RULES),
)


@algorithms.register("ppo")
@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO; A2C is `surrogate="vanilla", epochs=1, num_minibatches=1`."""

    horizon: int = 128
    """Steps per rollout in each environment; independent of the length of episodes."""
    epochs: int = 10
    """Passes over each rollout."""
    num_minibatches: int = 8
    """Minibatches per pass; must divide `horizon * num_envs`, or the number of sequences if
    recurrent."""
    uneven_minibatches: Literal["refuse", "drop"] = "refuse"
    """If `num_minibatches` does not divide the samples: refuse, or drop the last samples of each
    pass."""
    shuffle: Shuffle = "epoch"
    """Shuffle the samples for each pass, once for a rollout, or never (environment by
    environment)."""
    shuffle_blocks: int | None = None
    """Blocks of environments that are shuffled separately, with an equal share in every minibatch;
    null for one per rank. One process with as many blocks as ranks learns exactly what the ranks
    learn."""
    sequence_length: int = 16
    """Steps of backpropagation through time; must divide `horizon`. It has no effect without
    recurrent networks."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Transforms of the reward before learning from it; reports always show the raw reward."""
    objective: Literal["discounted", "average"] = "discounted"
    """Maximise the discounted sum of rewards or, for tasks that never end, the average reward per
    unit of time."""
    gamma: float = 0.99
    """Discount; with `objective="average"` only of the returns that `reward.normalize` uses."""
    discount_per: Literal["step", "time"] = "step"
    """Apply `gamma` per step, or per unit of time for steps of varying duration."""
    average_step: float = 0.1
    """With `objective="average"`: weight of a new rollout in the reward rate and in the centre of
    the values."""
    gae_lambda: float = 0.95
    """Bias-variance trade-off of the advantage estimate; 1 is Monte Carlo, 0 one-step TD."""
    surrogate: Literal["clipped", "smooth_clipped", "vanilla"] = "clipped"
    """Policy objective."""
    clip_ratio: float = 0.2
    """Clip range of the probability ratio around 1."""
    value_loss: Literal["mse", "clipped", "huber"] = "mse"
    """Error of the critic: half the square, the pessimistic clipped half square, or Huber's."""
    value_clip: float = 0.2
    """With `value_loss="clipped"`: clip range of the value, in its (normalised) units."""
    value_coef: float = 1.0
    """Weight of the value loss."""
    entropy_coef: AnySchedule = field(default_factory=lambda: Constant(0.0))
    """Weight of the entropy bonus."""
    bound_loss: BoundLossConfig | None = None
    """Keep the mean of a Gaussian policy near the bounds of the action."""
    advantage_normalization: Literal["rollout", "minibatch", "none"] = "rollout"
    """Standardise advantages over the rollout, over each minibatch, or not at all."""
    advantage_std: Literal["population", "sample"] = "population"
    """Divide advantages by the standard deviation with n, or by the unbiased one with n - 1."""
    bootstrap_truncated: bool = True
    """Bootstrap the value of truncated episodes; False treats a truncation as a termination."""
    recompute_advantage: bool = False
    """Recompute values, advantages and returns with the current critic before each pass after the
    first; a clipped value loss is then measured from these values."""
    kl: Literal["exact", "rl_games"] = "exact"
    """KL for `target_kl` and adaptive learning rates: KL(old || new), or as in rl_games KL(new ||
    the policy when the sample was last used) with small constants added, for discrete actions half
    the squared change of the log-probability."""
    target_kl: float | None = None
    """Stop an update early once the KL of a minibatch exceeds this; null never stops."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser of the policy, and of the critic unless `critic_optimizer` is set."""
    critic_optimizer: OptimizerConfig | None = None
    """Separate optimiser for the critic, with its own learning rate and schedule."""
    central_value: CentralValueConfig | None = None
    """Train the critic separately from the policy, with its own passes and minibatches."""
    bonus_value: BonusValueConfig | None = None
    """A second value head for the bonuses of an extension such as `rnd`; null adds them to the
    reward."""
    gradient_clipping: Literal["joint", "per_network"] = "joint"
    """Clip the gradient norm over both networks together or of each network separately."""
    obs_statistics: Literal["update", "minibatch", "first_epoch"] = "update"
    """Update the observation statistics once after each update, so that the first ratio is exactly
    1, or, as in rl_games, with every minibatch before its forward pass. first_epoch, as in rl_games
    up to 1.6.1, does so in the policy's first pass only; a central value's in all passes."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Networks, distribution and normalisation."""
    policy_average: float = 0.0
    """Evaluate, show and save a policy with the running mean of the weights; the value is the share
    of the mean that remains after an iteration: 0.995 averages over some 200. 0 turns it off."""
    extensions: tuple[AnyExtensionConfig, ...] = ()
    """Additions to the algorithm: further rewards, losses and phases, in this order."""

    report_spec: ClassVar[ReportSpec] = PPO_REPORT
    search_space: ClassVar[Mapping[str, str]] = {
        "optimizer.learning_rate": "0.1x..10x:log",
        "gamma": "0.3x..3x:log1m",
        "gae_lambda": "0.3x..3x:log1m",
        "clip_ratio": "0.1..0.4",
        "entropy_coef": "1e-5..0.03:log",
        "epochs": "0.5x..2x",
    }

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        counts = ("horizon", "epochs", "num_minibatches", "sequence_length", "shuffle_blocks")
        check_range(self, "must be at least 1", *counts)
        check_range(self, "must lie in 0..1", "gamma", "gae_lambda")
        check_range(self, "must lie in 0..1, without 1", "policy_average")
        check_range(self, "must lie above 0 and up to 1", "average_step")
        check_range(self, "must be above 0", "clip_ratio", "value_clip", "target_kl", "value_coef")
        if isinstance(self.entropy_coef, AdaptiveKL):
            raise UserError("entropy_coef: adaptive_kl is for learning rates; use a number, linear or constant")
        if self.central_value and (self.critic_optimizer or self.model.shared_trunk):
            rival = "critic_optimizer" if self.critic_optimizer else "model.shared_trunk"
            raise UserError(f"central_value has its own network and optimizer and excludes {rival}; set one of them")
        if self.recompute_advantage and self.obs_statistics == "first_epoch":
            raise UserError("obs_statistics=first_epoch excludes recompute_advantage: use update or minibatch")
        if self.bonus_value and not self.extensions:
            raise UserError("bonus_value has no bonus to evaluate: add an extension that pays one, such as rnd")

    def build_objective(self) -> Objective:
        """Return the objective that values, advantages and returns express."""
        if self.objective == "average":
            return AverageReward(self.average_step, self.gae_lambda)
        return Discounted(self.gamma, self.discount_per, self.gae_lambda)

    def build_loss(self, distribution: Distribution, device: torch.device) -> PPOLoss:
        """Return the loss that these settings describe, without additions of extensions."""
        standardized = "minibatch" if self.advantage_std == "population" else "minibatch_sample"
        return PPOLoss(
            surrogate=self.surrogate,
            clip_ratio=self.clip_ratio,
            value_loss=self.value_loss,
            value_clip=self.value_clip,
            value_coef=self.value_coef,
            advantage=standardized if self.advantage_normalization == "minibatch" else "given",
            bound=self.bound_loss and self.bound_loss.build(distribution, device),
            moving_kl=self.kl == "rl_games" or None,
            update_obs_stats_per_minibatch=None if self.obs_statistics == "update" else self.obs_statistics,
            bonus_coef=self.bonus_value and self.bonus_value.value_coef,
        )

    def build(self, spec: EnvSpec, seed: int) -> PPO:
        """Return PPO for an environment, on the environment's device."""
        if self.objective == "discounted" and self.bootstrap_truncated:
            check_discount(self.gamma, spec)
        return PPO(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """Return how PPO uses a rollout; an average reward is not discounted."""
        return RolloutPlan(
            horizon=self.horizon,
            epochs=self.epochs,
            num_minibatches=self.num_minibatches,
            gamma=1.0 if self.objective == "average" else self.gamma,
            gae_lambda=self.gae_lambda,
        )

    def symmetries(self, spec: EnvSpec) -> tuple[Symmetry, ...]:
        """Return the symmetries that extensions rely on."""
        return tuple(symmetry for extension in self.extensions for symmetry in symmetries_of(extension, spec))

    def unused(self, spec: EnvSpec) -> list[str]:
        """Return a line for each changed setting that has no effect, such as an unused `value_clip`."""
        lines = unused_lines(self, [*_loss_rules(self, spec), *_model_rules(self, spec)])
        for role, network in (("policy", self.model.policy), ("critic", self.model.critic)):
            if isinstance(network, NetworkConfig):
                lines += unused_lines(self, _network_rules(role, network, spec), f"model.{role}.")
        return lines


def check_discount(gamma: float, spec: EnvSpec) -> None:
    """Refuse gamma = 1 where values have no fixed point, warn where they might not."""
    if gamma < 1 or spec.truncates is False:
        return
    reason = (
        "with gamma=1 a value is the whole future reward; where episodes are truncated and bootstrapped from that "
        "value, it has no fixed point and drifts without end"
    )
    if spec.truncates:
        raise UserError(
            f"gamma=1 on {spec.env_id or 'this environment'}, whose episodes are truncated: {reason}. "
            "Use gamma < 1, or declare finite_horizon=True if the deadline is part of the task and the observation "
            "tells the time"
        )
    warnings.warn(f"gamma=1: {reason}. This is fine only if every episode terminates by itself", stacklevel=3)


def _loss_rules(config: PPOConfig, spec: EnvSpec) -> list[UnusedIf]:
    central = config.central_value
    bound = config.bound_loss
    networks = (config.model.policy, config.model.critic or config.model.policy)
    feed_forward = all(isinstance(network, NetworkConfig) and network.rnn is None for network in networks)
    sequences = config.horizon * spec.num_envs // (1 if feed_forward else config.sequence_length)
    central_even = central is None or sequences // central.stride(spec) % central.num_minibatches == 0
    even = central_even and sequences % config.num_minibatches == 0
    average = config.objective == "average"
    undiscounted = average and not config.reward.normalize
    central_unclipped = central and (central.value_loss or config.value_loss) != "clipped"
    central_alone = central is not None and not central.actor_value
    return [
        (feed_forward, "sequence_length", "no network is recurrent"),
        (not average, "average_step", "objective=discounted estimates no average"),
        (undiscounted, "gamma discount_per", "objective=average discounts nothing, and reward.normalize is off"),
        (spec.durations is False, "discount_per reward.time", "every step of this environment takes one unit of time"),
        (config.surrogate == "vanilla", "clip_ratio", "surrogate=vanilla has no ratio to clip"),
        (config.value_loss != "clipped", "value_clip", f"value_loss={config.value_loss} clips nothing"),
        (central_unclipped, "central_value.value_clip", "its value_loss clips nothing"),
        *(
            (central_alone and getattr(central, key) is not None, key, f"central_value.{key} takes its place")
            for key in ("value_loss", "value_clip", "value_coef")
        ),
        (bound and bound.form == "regularisation", "bound_loss.limit", "form=regularisation pulls at every mean"),
        (config.advantage_normalization == "none", "advantage_std", "advantages are not standardised"),
        (even, "uneven_minibatches", "the minibatches are even"),
        (spec.truncates is False, "bootstrap_truncated", "episodes of this environment are never truncated"),
        (config.epochs == 1, "recompute_advantage", "with epochs=1 there is no later pass"),
        (central and spec.num_agents == 1, "central_value.agents", "the worlds have one agent"),
        (central and feed_forward, "central_value.recurrence", "no network is recurrent"),
        (central, "gradient_clipping", "with central_value each network has its own optimizer, and so its own norm"),
    ]


def _model_rules(config: PPOConfig, spec: EnvSpec) -> list[UnusedIf]:
    model = config.model
    action = spec.action
    distribution = model.distribution_for(action)
    name = type(distribution).__name__
    clips = isinstance(distribution, DiagGaussian)
    continuous = isinstance(action, Continuous)
    unbounded = continuous and model.action_range is None and all(map(math.isinf, (*action.low, *action.high)))
    has_std = isinstance(distribution, DiagGaussian | TanhGaussian)
    form = model.std.form
    return [
        (not model.normalize_value, "model.value_normalizer", "normalize_value is off"),
        (not clips, "model.bounds", f"{name} is always within the bounds"),
        (clips and unbounded, "model.bounds", "the action has none"),
        (not continuous, "model.action_range", "discrete actions have no bounds"),
        (clips and model.bounds == "none", "model.action_range", "with bounds=none samples are not mapped to bounds"),
        (not has_std, "model.std", f"{name} has no standard deviation to set"),
        (has_std and form not in BOUNDED, "model.std.minimum model.std.maximum", f"form={form} has no bounds"),
    ]


def _network_rules(role: str, network: NetworkConfig, spec: EnvSpec) -> list[UnusedIf]:
    shapes = [group.shape for group in select_groups(network.obs_groups, spec.obs, role).values()]
    images = [shape for shape in shapes if len(shape) == 3]
    sequences = [shape for shape in shapes if len(shape) == 2]
    convolved = bool(images or (sequences and network.cnn.sequences))
    only_images = len(images) == len(shapes)
    kind = network.cnn.kind
    depth = len(network.hidden)
    convolution_keys = "cnn.kind cnn.layers cnn.depths cnn.features cnn.activation cnn.layout"
    other_kind_key = "cnn.layers" if kind == "impala" else "cnn.depths"
    return [
        (not sequences, "cnn.sequences", "it reads no groups of two axes"),
        (not convolved, convolution_keys, "it reads no images"),
        (convolved, other_kind_key, f"kind={kind} does not read it"),
        (only_images, "normalize_obs", "images are not standardised"),
        (only_images or not network.normalize_obs, "normalizer", "nothing is standardised"),
        (depth < 2, "d2rl", "it has no second hidden layer"),
        (not network.layer_norm, "layer_norm_position layer_norm_layers", "it has no layer norm"),
        (network.layer_norm and depth < 2, "layer_norm_layers", "it has no second hidden layer"),
        (depth == 0, "layer_norm", "it has no hidden layers"),
        (depth == 0 and not convolved, "activation init_gain", "it has no hidden layers"),
    ]

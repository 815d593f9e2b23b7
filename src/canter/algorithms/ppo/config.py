"""Settings of PPO.

Settings that have no part in a configuration, and why: said when a run starts and by `canter check`.

What PPO tells about itself to consoles, reports, the check before a run and the run folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from canter.algorithms.base import Declared, Headline, Rule, unused_lines
from canter.algorithms.extension import AnyExtensionConfig
from canter.algorithms.ppo.advantages import AverageReward, BonusValueConfig, Discounted, Objective
from canter.algorithms.ppo.rewards import RewardConfig
from canter.core.plain import check_range
from canter.core.specs import Continuous, EnvSpec
from canter.engines.base import BoundLossConfig, PPOLoss, ValueLoss
from canter.functional.minibatches import Shuffle
from canter.nn.actor_critic import ModelConfig, make_distribution
from canter.nn.distributions import DiagGaussian, Distribution, TanhGaussian
from canter.nn.heads import BOUNDED
from canter.nn.network import NetworkConfig, select_groups
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, AnySchedule, Constant


@dataclass(frozen=True, kw_only=True)
class CentralValueConfig:
    """A critic that is trained in a phase of its own; its network is the model's `critic`."""

    epochs: int = 5
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide the number of rows, with memory of sequences."""
    value_loss: ValueLoss | None = None
    """Its error; null takes PPO's."""
    value_clip: float | None = None
    """How far a value may move; null takes PPO's."""
    value_coef: float | None = None
    """Weight of its loss; null takes PPO's."""
    actor_value: bool = False
    """Train a value head on the policy's own features too, by PPO's value loss and towards the same returns. Nothing is
    judged by it; it shapes the features."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimiser. An adaptive learning rate follows the KL that the policy's phase found."""

    def __post_init__(self) -> None:
        """Refuse phases that do nothing."""
        check_range(self, "must be at least 1", "epochs", "num_minibatches")
        check_range(self, "must be above 0", "value_clip", "value_coef")

    def loss_of(self, loss: PPOLoss) -> PPOLoss:
        """The critic's part of PPO's loss, with what is set otherwise here."""
        own = {name: getattr(self, name) for name in ("value_loss", "value_clip", "value_coef")}
        changed = {name: value for name, value in own.items() if value is not None}
        return replace(loss, surrogate=None, bound=None, advantage="given", moving_kl=None, **changed)


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """Settings of PPO; A2C is `surrogate="vanilla", epochs=1, num_minibatches=1`."""

    horizon: int = 128
    """Steps per rollout in each environment; independent of how long episodes are."""
    epochs: int = 10
    """Passes over each rollout."""
    num_minibatches: int = 8
    """Minibatches per pass; must divide `horizon * num_envs`, with memory the number of sequences."""
    uneven_minibatches: Literal["refuse", "drop"] = "refuse"
    """Where they do not divide it: refuse, or leave the last rows of each pass out."""
    shuffle: Shuffle = "epoch"
    """Order of the rows: drawn anew for each pass, once for a rollout, or never: environment by environment."""
    shuffle_blocks: int | None = None
    """Blocks of environments that are shuffled apart, with an equal share in every minibatch; null for one on each
    rank. One process with as many blocks as there were ranks learns what they learned."""
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
    advantage_std: Literal["population", "sample"] = "population"
    """What they are divided by: the standard deviation of these n rows, or the unbiased one with n - 1."""
    bootstrap_truncated: bool = True
    """Where an episode is cut off, count on the value of what would follow; False takes it for a termination."""
    recompute_advantage: bool = False
    """Judge the rollout anew, by the critic as it is then, before each pass after the first; a clipped value loss then
    measures from there."""
    kl: Literal["exact", "rl_games"] = "exact"
    """What `target_kl` and adaptive learning rates look at: KL(old || new), or as rl_games measures it, KL(new || the
    policy when the row was last learned from) with small constants added, and for choices half the squared change of
    the log-probability."""
    target_kl: float | None = None
    """Stop an update early once a minibatch finds the policy further than this from the one that acted."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser of the policy, and of the critic unless that has its own."""
    critic_optimizer: OptimizerConfig | None = None
    """Separate optimiser for the critic, with its own learning rate and schedule."""
    central_value: CentralValueConfig | None = None
    """Train the critic apart from the policy, in passes and minibatches of its own."""
    bonus_value: BonusValueConfig | None = None
    """A second value head for the bonuses of an extension such as `rnd`; without it they are added to the reward."""
    gradient_clipping: Literal["joint", "per_network"] = "joint"
    """Whether one gradient norm covers both networks or each has its own."""
    obs_statistics: Literal["update", "minibatch"] = "update"
    """When the statistics of observations move: once after each update, so that the first ratio is exactly 1, or, as in
    rl_games, with every minibatch before it is evaluated."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Networks, distribution and normalisation."""
    policy_average: float = 0.0
    """The policy that is judged, shown and saved has the running mean of the weights that act in training; this much of
    it stays in an iteration: with 0.995 it is that of some 200. 0: no mean."""
    extensions: tuple[AnyExtensionConfig, ...] = ()
    """What is added to the algorithm: further rewards, losses and phases, in this order."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        counts = ("horizon", "epochs", "num_minibatches", "sequence_length", "shuffle_blocks")
        check_range(self, "must be at least 1", *counts)
        check_range(self, "must lie in 0..1", "gamma", "gae_lambda")
        check_range(self, "must lie in 0..1, without 1", "policy_average")
        check_range(self, "must lie above 0 and up to 1", "average_step")
        check_range(self, "must be above 0", "clip_ratio", "value_clip", "target_kl", "value_coef")
        if isinstance(self.entropy_coef, AdaptiveKL):
            raise ValueError("entropy_coef: adaptive_kl moves learning rates; use a number, linear or constant")
        if self.central_value and (self.critic_optimizer or self.model.shared_trunk):
            rival = "critic_optimizer" if self.critic_optimizer else "model.shared_trunk"
            raise ValueError(f"central_value has a network and an optimizer of its own: it leaves no room for {rival}")
        if self.bonus_value and not self.extensions:
            raise ValueError("bonus_value has no bonus to judge: add an extension that gives one, such as rnd")

    def build_objective(self) -> Objective:
        """What values, advantages and returns are of."""
        if self.objective == "average":
            return AverageReward(self.average_step, self.gae_lambda)
        return Discounted(self.gamma, self.discount_per, self.gae_lambda)

    def build_loss(self, distribution: Distribution, device: torch.device) -> PPOLoss:
        """The loss that these settings describe, without what extensions add."""
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
            moves_statistics=self.obs_statistics == "minibatch" or None,
            bonus_coef=self.bonus_value and self.bonus_value.value_coef,
        )


def unused_settings(config: PPOSettings, spec: EnvSpec) -> list[str]:
    """A line for each setting that was changed and has no effect, such as a `value_clip` without a clipped loss."""
    lines = unused_lines(config, [*_of_loss(config, spec), *_of_model(config, spec)])
    for role, network in (("policy", config.model.policy), ("critic", config.model.critic)):
        if isinstance(network, NetworkConfig):
            lines += unused_lines(config, _of_network(role, network, spec), f"model.{role}.")
    return lines


def _of_loss(config: PPOSettings, spec: EnvSpec) -> list[Rule]:
    model, central, bound = config.model, config.central_value, config.bound_loss
    networks = [model.policy, model.critic or model.policy]
    plain = all(isinstance(network, NetworkConfig) and network.memory is None for network in networks)
    rows = config.horizon * spec.num_envs // (1 if plain else config.sequence_length)
    even = rows % config.num_minibatches == 0 and rows % (central or config).num_minibatches == 0
    average, alone = config.objective == "average", central is not None and not central.actor_value
    undiscounted = average and not config.reward.normalize
    unclipped = central and (central.value_loss or config.value_loss) != "clipped"
    return [
        (plain, "sequence_length", "no network has memory"),
        (not average, "average_step", "objective=discounted estimates no average"),
        (undiscounted, "gamma discount_per", "objective=average discounts nothing, and reward.normalize is off"),
        (spec.durations is False, "discount_per reward.time", "every step of this environment takes one unit of time"),
        (config.surrogate == "vanilla", "clip_ratio", "surrogate=vanilla has no ratio to clip"),
        (config.value_loss != "clipped", "value_clip", f"value_loss={config.value_loss} clips nothing"),
        (unclipped, "central_value.value_clip", "its value_loss clips nothing"),
        *(
            (alone and getattr(central, key) is not None, key, f"central_value.{key} takes its place")
            for key in ("value_loss", "value_clip", "value_coef")
        ),
        (bound and bound.form == "regularisation", "bound_loss.limit", "form=regularisation pulls at every mean"),
        (config.advantage_normalization == "none", "advantage_std", "advantages are not standardised"),
        (even, "uneven_minibatches", "the minibatches come out even"),
        (spec.truncates is False, "bootstrap_truncated", "episodes of this environment are never cut off"),
        (config.epochs == 1, "recompute_advantage", "with epochs=1 there is no later pass"),
        (central, "gradient_clipping", "with central_value each network has an optimizer, and so a norm, of its own"),
    ]


def _of_model(config: PPOSettings, spec: EnvSpec) -> list[Rule]:
    model, action = config.model, spec.action
    distribution = make_distribution(action, model.distribution, model.bounds)
    name, clips = type(distribution).__name__, isinstance(distribution, DiagGaussian)
    unbounded = isinstance(action, Continuous) and all(map(math.isinf, (*action.low, *action.high)))
    has_std, form = isinstance(distribution, DiagGaussian | TanhGaussian), model.std.form
    return [
        (not model.normalize_value, "model.value_normalizer", "normalize_value is off"),
        (not clips, "model.bounds", f"{name} is always within the bounds"),
        (clips and unbounded, "model.bounds", "the action has none"),
        (not has_std, "model.std", f"{name} has no standard deviation to set"),
        (has_std and form not in BOUNDED, "model.std.minimum model.std.maximum", f"form={form} has no bounds"),
    ]


def _of_network(role: str, network: NetworkConfig, spec: EnvSpec) -> list[Rule]:
    shapes = [group.shape for group in select_groups(network.obs_groups, spec.obs, role).values()]
    images = [shape for shape in shapes if len(shape) == 3]
    sequences = [shape for shape in shapes if len(shape) == 2]
    convolved = bool(images or (sequences and network.cnn.sequences))
    only_images, kind, depth = len(images) == len(shapes), network.cnn.kind, len(network.hidden)
    of_images = "cnn.kind cnn.layers cnn.depths cnn.features cnn.activation cnn.layout"
    other = "cnn.layers" if kind == "impala" else "cnn.depths"
    return [
        (not sequences, "cnn.sequences", "it reads no groups of two axes"),
        (not convolved, of_images, "it reads no images"),
        (convolved, other, f"kind={kind} does not read it"),
        (only_images, "normalize_obs", "images are not standardised"),
        (only_images or not network.normalize_obs, "normalizer", "nothing is standardised"),
        (depth < 2, "d2rl", "it has no second hidden layer"),
        (not network.layer_norm, "layer_norm_position layer_norm_layers", "it has no layer norm"),
        (network.layer_norm and depth < 2, "layer_norm_layers", "it has no second hidden layer"),
        (depth == 0, "layer_norm", "it has no hidden layers"),
        (depth == 0 and not convolved, "activation init_gain", "it has no hidden layers"),
    ]


HEADLINES = (
    Headline(
        "policy/clip_fraction",
        "clip fraction",
        "policy",
        "Clip fraction",
        "rows whose ratio left the clip range",
        percent=True,
        block="mean_clipped_ratio",
    ),
    Headline(
        "policy/kl", "KL", "policy", "KL divergence", "how far an update moves the policy", line="KL", block="approx_kl"
    ),
    Headline(
        "policy/entropy", "entropy", "policy", "Entropy", "how much of the choice is left to chance", line="entropy"
    ),
    Headline("policy/std", "std", "policy", "Standard deviation", "of the actions, before any rescaling"),
    Headline("loss/policy", "policy loss", "learning", "Policy loss", "the surrogate, to be minimised"),
    Headline("loss/value", "value loss", "learning", "Value loss", "error of the critic, in the units it learns in"),
    Headline(
        "value/explained_variance",
        "explained var.",
        "learning",
        "Explained variance",
        "1: the critic foresees all returns; 0: none; below: worse than their mean, cut off at -1",
        floor=-1.0,
        line="explained variance",
    ),
    Headline("optim/learning_rate", "learning rate", "learning", "Learning rate", "step size of the optimiser"),
    Headline("optim/grad_norm", "gradient norm", "", "Gradient norm", "before clipping"),
    Headline("value/mean_absolute_error", "value error", "", "Error of values", "mean absolute, in units of returns"),
    Headline("value/mean", "mean value", "", "Mean value", "the return that the critic expects"),
)

DECLARED = Declared(
    headlines=HEADLINES,
    settings={"clip_range": "clip_ratio"},
    optimizer_steps="optim/minibatch_updates",
    counters={"optim/nonfinite_steps": "Steps skipped for NaN or infinity"},
)

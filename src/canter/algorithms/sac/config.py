"""Settings of SAC, the check that refuses environments it cannot learn, and how reports show SAC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from canter.algorithms.base import Headline, ReportSpec, RolloutPlan, UnusedIf, algorithms, unused_lines
from canter.algorithms.doctor.sac import SAC_RULES
from canter.algorithms.sac.sac import SAC
from canter.core.data.replay import ReplayConfig
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import Continuous, EnvSpec
from canter.functional.losses import entropy_of_std
from canter.nn.actor_critic import ModelConfig
from canter.nn.heads import StdConfig
from canter.nn.network import AnyNetworkConfig, NetworkConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, Constant
from canter.nn.stack import CriticConfig


def _adam() -> OptimizerConfig:
    return OptimizerConfig(learning_rate=Constant(3e-4), eps=1e-8, max_grad_norm=math.inf)


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """Weight of the entropy, in units of the reward."""

    initial: float = 1.0
    """Initial value."""
    learned: bool = True
    """Adjust the temperature so that the policy's entropy reaches a target; otherwise it is
    constant."""
    target_entropy: float | None = None
    """Target entropy of actions in -1..1, over all components; null takes that of `target_std`, or
    else minus one per component."""
    target_std: float | None = None
    """Target entropy given as the standard deviation of every component, for actions in -1..1."""
    optimizer: OptimizerConfig = field(default_factory=_adam)
    """Optimiser of the logarithm of the temperature."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and two targets."""
        check_range(self, "must be above 0", "initial", "target_std")
        if self.target_entropy is not None and self.target_std is not None:
            raise UserError(
                f"target_std={self.target_std} and target_entropy={self.target_entropy}: set only one of them"
            )

    def target(self, action_dim: int) -> float:
        """Return the target entropy."""
        if self.target_std is not None:
            return entropy_of_std(self.target_std, action_dim)
        return -float(action_dim) if self.target_entropy is None else self.target_entropy


def _policy() -> NetworkConfig:
    return NetworkConfig(hidden=(256, 256), activation="relu", init="default", normalize_obs=False)


SAC_REPORT = ReportSpec(
    headlines=(
        Headline("policy/entropy", "entropy", "policy", "Entropy", "of actions in -1..1", line="entropy"),
        Headline("policy/temperature", "temperature", "policy", "Temperature", "weight of the entropy", line="alpha"),
        Headline("policy/std", "std", "policy", "Standard deviation", "of the actions, before squashing"),
        Headline("loss/policy", "policy loss", "learning", "Policy loss", "temperature x log-probability - value"),
        Headline("loss/critic", "critic loss", "learning", "Critic loss", "error of the critics", line="critic loss"),
        Headline("value/mean", "mean value", "learning", "Mean value", "return that the critics expect", line="Q"),
        Headline("value/target_std", "target std", "", "Spread of the targets", "of the critics, in one batch"),
        Headline("reward/unit", "reward unit", "", "Unit of rewards", "divisor of the rewards"),
        Headline("optim/learning_rate", "learning rate", "learning", "Learning rate", "step size of the optimisers"),
        Headline("replay/rows", "replay", "", "Transitions in the replay buffer", "that may be sampled"),
    ),
    settings={"batch_size": "batch_size"},
    optimizer_steps="optim/minibatch_updates",
    counters={
        "optim/nonfinite_steps": "Steps skipped for NaN or infinity",
        "replay/lost": "Share of samples left out for a lost final observation",
    },
    rules=(SAC_RULES,),
)


@algorithms.register("sac")
@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """Settings of SAC; the defaults are the plain algorithm with two critics of 256 x 256."""

    horizon: int = 4
    """Steps per rollout in each environment; updates follow each rollout."""
    updates_per_transition: float = 1.0
    """Updates of the critics per transition, so that the number of environments does not change
    what is learned. Times `horizon` and the number of environments (of all ranks) it must be a
    whole number."""
    updates_per_step: float | None = None
    """Updates of the critics per vectorised step (one step of all environments), instead of
    `updates_per_transition`: for many environments, of which each step cannot be followed by an
    update per transition. Times `horizon` it must be a whole number."""
    batch_size: int = 256
    """Transitions per update."""
    warmup_steps: int = 5_000
    """Transitions to collect by random actions before the first update."""
    n_steps: int = 1
    """Steps of the n-step return before bootstrapping."""
    gamma: float = 0.99
    """Discount per step."""
    tau: float = 0.005
    """Step size of the target critics towards the critics in each update (Polyak averaging)."""
    pessimism: Literal["min", "mean"] = "min"
    """Take the lowest value of all critics, or their mean."""
    policy_delay: int = 1
    """Updates of the critics per update of policy and temperature."""
    noise_repeat: int = 1
    """Maximum number of steps for which an environment repeats its exploration noise, k steps with
    probability ~ k^-2. 1 draws new noise in each step."""
    scale_rewards: bool = False
    """Divide sampled rewards by the running standard deviation of the discounted return, or by more
    if its largest amount would exceed `return_limit`."""
    return_limit: float = 5.0
    """With `scale_rewards`: upper limit of the scaled discounted returns so far."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Weight of the entropy."""
    policy: AnyNetworkConfig = field(default_factory=_policy)
    """Network of the policy."""
    std: StdConfig = field(
        default_factory=lambda: StdConfig(kind="network", initial=1.0, minimum=math.exp(-5), maximum=math.exp(2))
    )
    """Standard deviation of the policy before squashing."""
    policy_gain: float = math.sqrt(2)
    """Initial gain of the policy's last layer, as in PPO; sqrt(2) is torch's default with `init:
    default`."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Networks of the critics."""
    optimizer: OptimizerConfig = field(default_factory=_adam)
    """Optimiser of the policy, and of the critics unless `critic_optimizer` is set."""
    critic_optimizer: OptimizerConfig | None = None
    """Separate optimiser for the critics."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay buffer."""

    report_spec: ClassVar[ReportSpec] = SAC_REPORT
    search_space: ClassVar[Mapping[str, str]] = {
        "optimizer.learning_rate": "0.1x..10x:log",
        "gamma": "0.3x..3x:log1m",
        "tau": "0.3x..3x:log",
        "batch_size": "0.5x,1x,2x",
    }

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        check_range(self, "must be at least 1", "horizon", "batch_size", "n_steps", "policy_delay", "noise_repeat")
        check_range(self, "must not be negative", "warmup_steps")
        check_range(self, "must lie in 0..1, without 1", "gamma")
        check_range(self, "must lie above 0 and up to 1", "tau")
        check_range(self, "must be above 0", "policy_gain", "return_limit")
        if self.warmup_steps > self.replay.capacity:
            raise UserError(
                f"warmup_steps={self.warmup_steps} never fit into replay.capacity={self.replay.capacity}: nothing "
                "would be learned; raise replay.capacity or lower warmup_steps"
            )
        check_range(self, "must be above 0", "updates_per_transition", "updates_per_step")
        if self.updates_per_step is not None:
            self.updates_after(self.horizon)
        for name in ("optimizer", "critic_optimizer"):
            if isinstance(getattr(getattr(self, name), "learning_rate", None), AdaptiveKL):
                raise UserError(f"{name}.learning_rate: adaptive_kl follows updates of PPO; use a number or linear")
        if getattr(self.policy, "rnn", None) is not None:
            raise UserError(
                "policy.rnn: sac learns from single transitions, so its policy cannot be recurrent; use ppo"
            )

    def updates_after(self, transitions: int) -> int:
        """Return the number of updates of the critics after a rollout of that many transitions.

        Raises UserError if it is not a whole number of at least 1.
        """
        name = "updates_per_transition"
        factor = transitions
        unit = f"{transitions} transitions of a rollout"
        if self.updates_per_step is not None:
            name = "updates_per_step"
            factor = self.horizon
            unit = f"horizon={self.horizon}"
        value = getattr(self, name)
        updates = value * factor
        whole = max(1, round(updates))
        if abs(updates - whole) >= 1e-6 * whole:
            raise UserError(
                f"{name}={value} times {unit} is {updates:g} updates, which must be a whole number of at least 1; "
                f"use {name}={whole / factor:g}, or another horizon"
            )
        return whole

    def model(self) -> ModelConfig:
        """Return the description of the policy for its file."""
        return ModelConfig(policy=self.policy, distribution="tanh_gaussian", std=self.std, policy_gain=self.policy_gain)

    def build(self, spec: EnvSpec, seed: int) -> SAC:
        """Return SAC for an environment, on the environment's device."""
        return SAC(self, spec, seed)

    def plan(self) -> RolloutPlan:
        """Return how SAC uses a rollout."""
        return RolloutPlan(
            horizon=self.horizon,
            num_minibatches=1 if self.updates_per_step is None else self.updates_after(self.horizon),
            updates_per_transition=self.updates_per_transition if self.updates_per_step is None else None,
            drawn=self.batch_size,
            warmup_steps=self.warmup_steps,
            gamma=self.gamma,
            gae_lambda=0.0,
        )

    def check(self, spec: EnvSpec) -> None:
        """Refuse actions that a squashed Gaussian cannot produce, and too small a replay buffer."""
        what = spec.env_id or "this environment"
        if not isinstance(spec.action, Continuous):
            raise UserError(f"sac needs continuous actions, and those of {what} are {spec.action}; use --algorithm ppo")
        if not spec.action.bounded:
            bounds = zip(spec.action.low, spec.action.high, strict=True)
            index, (low, high) = next((i, pair) for i, pair in enumerate(bounds) if not all(map(math.isfinite, pair)))
            raise UserError(
                f"sac squashes its actions into the bounds of the environment, and component {index} of {what} has "
                f"low={low}, high={high}: bound the action space to the range that the task needs (gymnasium.wrappers."
                "RescaleAction and a finite Box, or the limits of the joints), or use --algorithm ppo"
            )
        if self.horizon * spec.num_envs > self.replay.capacity:
            raise UserError(
                f"replay.capacity={self.replay.capacity} is less than a rollout, horizon * num_envs = "
                f"{self.horizon * spec.num_envs}"
            )

    def unused(self, spec: EnvSpec) -> list[str]:
        """Return a line for each changed setting that has no effect."""
        critic = self.critic
        policy = self.policy
        target_keys = "temperature.target_entropy temperature.target_std temperature.optimizer"
        no_images = all(len(group.shape) != 3 for group in spec.obs.values())
        by_step = "updates_per_step sets the number of updates"
        rules: list[UnusedIf] = [
            (self.updates_per_step is not None, "updates_per_transition", by_step),
            (not self.scale_rewards, "return_limit", "scale_rewards is off"),
            (critic.atoms == 1, "critic.support", "with critic.atoms=1 a critic predicts a mean, not a distribution"),
            (critic.members == 1, "pessimism", "there is one critic"),
            (critic.blocks == 0, "critic.expansion", "there are no residual blocks"),
            (not self.temperature.learned, target_keys, "temperature.learned is off"),
            (getattr(policy, "normalize_obs", None) is False, "policy.normalizer", "nothing is standardised"),
            (not critic.normalize_obs, "critic.normalizer", "nothing is standardised"),
            (no_images, "critic.cnn", "it reads no images"),
            (no_images and isinstance(policy, NetworkConfig), "policy.cnn", "it reads no images"),
        ]
        return unused_lines(self, rules)

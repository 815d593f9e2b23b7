"""Curiosity: a bonus for observations that a network cannot predict yet.

Random network distillation (Burda et al., 2018): a predictor learns the output of a random, fixed
target network. Its error is large for observations that are rare so far.

T steps, N environments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.algorithms.extension import Extension, extensions
from canter.algorithms.phase import Phase
from canter.core.data.rollout import Rollout, as_sequences
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.specs import EnvSpec
from canter.core.struct import Obs, TensorStruct
from canter.engines.autograd import LossGradients, LossOutput
from canter.functional.statistics import masked_mean, moments
from canter.nn.actor_critic import ActorCritic
from canter.nn.mlp import MLP, Activation, init_layer
from canter.nn.network import select_groups
from canter.nn.normalizer import IdentityNormalizer, Normalizer, add_returns_
from canter.nn.optimizer import Optimizer, OptimizerConfig
from canter.nn.schedules import AdaptiveKL, AnySchedule, Constant

CLIP = 5.0
"""Limit of standardised observations, as in the paper: far from the data the target is
arbitrary."""


@dataclass
class Samples(TensorStruct):
    """Observations that the predictor learns."""

    x: Tensor
    """`[T, N, width]`, or cut into sequences; standardised."""
    valid: Tensor
    """bool, without `width`."""


@extensions.register("rnd")
@dataclass(frozen=True, kw_only=True)
class RNDConfig:
    """Curiosity by random network distillation.

    With `algorithm.bonus_value` the bonus has its own value head and discount, as in the paper.
    Otherwise it is added to the reward.
    """

    weight: AnySchedule = field(default_factory=lambda: Constant(1.0))
    """Factor of the bonus: a number or a schedule."""
    obs_groups: tuple[str, ...] | None = None
    """Observation groups to be curious about; None takes "rnd" if there is one, else "policy"."""
    hidden: tuple[int, ...] = (128, 128)
    """Hidden layers of the predictor."""
    target_hidden: tuple[int, ...] | None = None
    """Hidden layers of the target; None takes the predictor's."""
    outputs: int = 32
    """Number of random features to predict."""
    activation: Activation = "elu"
    """Activation of both networks."""
    variant: Literal["paper", "rsl_rl"] = "paper"
    """Score and learn the observation that each step truly led to, by statistics that include it;
    or as RSL-RL: score the one after the step, also of a new episode, with bonus statistics of each
    step, learn the one before it, and update observation statistics after the update."""
    error: Literal["square", "norm"] = "square"
    """Bonus: the mean squared error of the features, or the norm of the error."""
    normalize_obs: bool = True
    """Standardise observations by running statistics, clipped at 5 standard deviations."""
    normalize_bonus: bool = True
    """Divide by the running standard deviation of the discounted sum of bonuses (`bonus_gamma`)."""
    bonus_gamma: float = 0.99
    """Discount of that sum, which continues across episode ends."""
    epochs: int = 1
    """Passes of the predictor over each rollout."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide `horizon * num_envs`."""
    share: float = 1.0
    """Random share of each minibatch that the predictor learns from; a smaller share keeps it
    curious longer."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=Constant(1e-3)))
    """Optimiser of the predictor."""

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        if isinstance(self.weight, AdaptiveKL):
            raise UserError("weight: adaptive_kl is for learning rates; use a number, linear or step")
        check_range(self, "must be at least 1", "outputs", "epochs", "num_minibatches")
        check_range(self, "must lie in 0..1, without 1", "bonus_gamma")
        check_range(self, "must lie above 0 and up to 1", "share")
        check_range(self, "must be widths of at least 1", "hidden", "target_hidden")

    def build(self, spec: EnvSpec, model: ActorCritic, generator: torch.Generator) -> RND:
        """Return target, predictor and normalisers for an environment."""
        return RND(self, spec, generator, separate=model.bonus_head is not None)


class RND(Extension):
    """Adds the bonus to the reward or returns it separately; trains the predictor in a phase."""

    def __init__(self, config: RNDConfig, spec: EnvSpec, generator: torch.Generator, *, separate: bool) -> None:
        super().__init__()
        self.config = config
        self.generator = generator
        self.separate = separate
        """Return the bonus separately from the reward, for the second value head."""
        self.groups = select_groups(config.obs_groups, spec.obs, "rnd")
        for name, group in self.groups.items():
            if not group.dtype.is_floating_point:
                raise UserError(f"rnd: obs_groups: {name!r} is {group.dtype}, and only real numbers can be predicted")
        width = sum(torch.Size(group.shape).numel() for group in self.groups.values())
        self.as_rsl_rl = config.variant == "rsl_rl"
        of_obs = Normalizer((width,), eps=0.01, eps_on_std=True) if self.as_rsl_rl else Normalizer((width,), CLIP)
        self.normalizer = of_obs if config.normalize_obs else IdentityNormalizer()
        target_hidden = config.hidden if config.target_hidden is None else config.target_hidden
        self.target = _network(width, target_hidden, config)
        self.predictor = _network(width, config.hidden, config)
        self.target.requires_grad_(False)
        self.bonus_statistics = Normalizer(eps=1e-30)  # only against a division by zero: bonuses may be small
        self.running = nn.Buffer(torch.zeros(spec.num_envs, dtype=torch.float64))
        self.weight = nn.Buffer(torch.tensor(config.weight.initial))
        self.paid = nn.Buffer(torch.zeros(()))
        """Mean bonus of the last rollout."""
        optimizer = Optimizer.single("predictor", self.predictor.parameters(), config.optimizer)
        source = LossGradients(self.prediction_loss, optimizer)
        self.phase: Phase[Samples] = Phase(
            source, config.epochs, config.num_minibatches, generator, name="rnd", num_envs=spec.num_envs, draw=self.draw
        )

    def reward(self, rollout: Rollout[Any]) -> Tensor | tuple[Tensor, Tensor]:
        """Update the statistics; return the reward with the bonus added, or both separately."""
        self.config.weight.set_(self.weight, self.progress)
        obs, valid = self.flat(rollout.obs)[1:], rollout.valid
        if not self.as_rsl_rl:
            transitions = rollout.transitions(self.groups)
            obs, valid = self.flat(transitions.next_obs), transitions.valid
            self.normalizer.update(obs, valid)
        raw = torch.where(valid, self.raw_bonus(self.normalizer(obs)), 0.0)
        steps = 1 if self.as_rsl_rl else len(raw)
        parts = zip(raw.split(steps), valid.split(steps), strict=True)
        bonus = self.weight * torch.cat([self.update_and_normalize(*part) for part in parts])
        self.paid.copy_(moments(bonus, valid)[1])
        if not self.separate:
            return rollout.reward + bonus
        return rollout.reward, bonus if rollout.bonus is None else rollout.bonus + bonus

    def flat(self, obs: Obs) -> Tensor:
        """Return the groups concatenated, `[..., width]`."""
        columns = [
            obs[name].flatten(-len(group.shape)) if group.shape else obs[name].unsqueeze(-1)
            for name, group in self.groups.items()
        ]
        return columns[0] if len(columns) == 1 else torch.cat(columns, -1)

    def errors(self, x: Tensor) -> Tensor:
        """Return predictor minus target `[..., outputs]`; only the predictor gets gradients."""
        return self.predictor(x) - self.target(x).detach()

    def raw_bonus(self, x: Tensor) -> Tensor:
        """Return the bonus `[...]` of standardised observations, before normalisation and weighting."""
        errors = self.errors(x)
        if self.config.error == "square":
            return errors.square().mean(-1)
        return torch.linalg.vector_norm(errors, dim=-1)

    def update_and_normalize(self, bonus: Tensor, valid: Tensor) -> Tensor:
        """Update the statistics with bonuses `[T, N]`; divide by the std of discounted sums."""
        if not self.config.normalize_bonus:
            return bonus
        never = torch.zeros_like(valid)
        add_returns_(self.bonus_statistics, self.running, bonus, never, valid, self.config.bonus_gamma)
        statistics = self.bonus_statistics
        return bonus * torch.where(statistics.m2 > 0, statistics.inverse_scale, 1.0)

    def draw(self, rollout: Rollout[Any]) -> Samples:
        """Return the observations of a rollout as sequences of length 1."""
        if self.as_rsl_rl:
            obs = self.flat(rollout.obs)[:-1]
            samples = Samples(self.normalizer(obs), rollout.valid)
            self.normalizer.update(obs, rollout.valid)
        else:
            transitions = rollout.transitions(self.groups)
            samples = Samples(self.normalizer(self.flat(transitions.next_obs)), transitions.valid)
        return as_sequences(samples, length=1)

    def prediction_loss(self, batch: Samples) -> LossOutput:
        """Return the predictor's mean squared error."""
        included = batch.valid
        if self.config.share < 1:
            share = torch.rand(included.shape, generator=self.generator, device=included.device)
            included = included & (share < self.config.share)
        loss = masked_mean(self.errors(batch.x).square().mean(-1), included)
        return LossOutput(loss, {"loss/rnd": loss, "rnd/bonus": self.paid, "rnd/weight": self.weight})

    def phases(self) -> dict[str, Phase[Any]]:
        """Return the predictor's phase."""
        return {"rnd": self.phase}


def _network(width: int, hidden: tuple[int, ...], config: RNDConfig) -> nn.Sequential:
    init = "orthogonal" if config.variant == "paper" else "default"
    layers = MLP(width, hidden, config.activation, init, 2**0.5)
    last_gain = 1.0 if config.variant == "paper" else 2**0.5
    return nn.Sequential(layers, init_layer(nn.Linear((width, *hidden)[-1], config.outputs), init, last_gain))

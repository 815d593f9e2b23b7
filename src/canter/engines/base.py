"""Interface between PPO's mathematics and its engines, and the check of their abilities.

`PPOLoss` describes the loss of one minibatch; an `Engine` acts, values states and writes the
gradients of that loss. `canter.engines.autograd` is the definition. Every other engine supports
some descriptions, listed in its `Capabilities`, and is tested against the definition; for the
others `unsupported_reason` names the setting that it does not support.

N environments, L sequence length (1 for feed-forward networks), S sequences, B sequences in a
minibatch, P distribution parameters, A action components.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.struct import Metrics, Obs, State, TensorStruct
from canter.functional.losses import BOUND_LOSSES
from canter.nn.actor_critic import ActorCritic
from canter.nn.describe import ABSENT, Feature, SACModel, describe
from canter.nn.distributions import DiagGaussian, Distribution
from canter.nn.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class BoundLossConfig:
    """Loss that keeps the mean of a Gaussian policy near the action bounds, here -1 and 1.

    Actions beyond the bounds are clipped, so the reward has no gradient there and the mean drifts
    away.
    """

    form: Literal["soft", "regularisation"] = "soft"
    """Squared distance beyond `limit`, or the squared mean."""
    coef: float = 1e-3
    """Weight of the loss."""
    limit: float = 1.1
    """For `form="soft"`: distance of the mean from the centre up to which the loss is zero."""

    def __post_init__(self) -> None:
        """Raise for values outside their range, by name."""
        check_range(self, "must not be negative", "coef")
        check_range(self, "must be above 0", "limit")

    def build(self, distribution: Distribution, device: torch.device) -> BoundLoss:
        """Return the loss for a distribution.

        Raise UserError for one whose actions cannot leave the bounds.
        """
        if not isinstance(distribution, DiagGaussian):
            raise UserError(
                f"bound_loss is for a Gaussian policy, whose mean can leave the bounds; {type(distribution).__name__} "
                "cannot: set bound_loss=null, or model.distribution=gaussian for a continuous action"
            )
        return BoundLoss(self, distribution, device)


class BoundLoss:
    """Distribution parameters `[..., 2A]` to a loss `[...]`."""

    def __init__(self, config: BoundLossConfig, distribution: DiagGaussian, device: torch.device) -> None:
        self.config = config
        self.distribution = distribution
        half = (1.0,) * distribution.dim
        centre = (0.0,) * distribution.dim
        if distribution.bounds != "rescale":  # otherwise the bounds are -1 and 1 already
            half, centre, *_ = replace(distribution, bounds="rescale").interval()
        self.half, self.centre = torch.tensor([half, centre], device=device)

    def __call__(self, params: Tensor) -> Tensor:
        """Return the loss of each sample."""
        mean = (self.distribution.mode(params) - self.centre) / self.half
        return BOUND_LOSSES[self.config.form](mean, self.config.limit)


@dataclass
class PPORecord(TensorStruct):
    """Tensors that PPO stores for each step, `[N, ...]`.

    Log-probabilities are computed from them for a whole rollout at once.
    """

    action: Tensor
    """The sample itself, neither clipped nor rescaled."""
    dist_params: Tensor


@dataclass
class PPOBatch(TensorStruct):
    """Samples to learn from, `[L, S, ...]`."""

    obs: Obs
    action: Tensor
    log_prob: Tensor
    dist_params: Tensor
    value: Tensor
    """Values before the update, in normalised units."""
    return_: Tensor
    """Targets of the critic, in the same units."""
    advantage: Tensor
    valid: Tensor
    reset: Tensor
    policy_state: State
    """`[1, S, ...]` recurrent state of the policy before each sequence; `()` for a feed-forward
    policy."""
    critic_state: State
    """`[1, S, ...]` recurrent state of the critic before each sequence."""
    bonus_value: Tensor | None = None
    """Values of a second head before the update, in its normalised units; None without one."""
    bonus_return: Tensor | None = None
    """Targets of that head, in the same units."""
    carried: dict[str, Any] = field(default_factory=dict)
    """Additional tensors of extensions, by name: trees of `[L, S, ...]` or `[1, S, ...]`."""
    original: Tensor | None = None
    """bool: True for samples that the policy collected, False for those that an extension added.
    KL, entropy, clip fraction and, through the KL, adaptive learning rates use the former only;
    None means that all are original."""


@dataclass(frozen=True)
class ModelOutput:
    """Outputs of the networks for a minibatch."""

    dist_params: Tensor | None
    """`[L, B, P]` parameters of the action distribution; None where only the critic is trained."""
    value: Tensor | None
    """`[L, B]` in normalised units; None where only the policy is trained."""
    bonus_value: Tensor | None = None
    """`[L, B]` by a second head, in its normalised units; None without one."""


Acted = tuple[Tensor, Tensor, Tensor, State]
"""Action for the environment, action as sampled, distribution parameters `[N, ...]`, and the next
state."""
Valued = tuple[Tensor, State]
"""Values, and the critic's states after each sample."""
ValueLoss = Literal["mse", "clipped", "huber"]
Augment = Callable[[PPOBatch], PPOBatch]
ExtensionLoss = Callable[[PPOBatch, ModelOutput], Metrics]
"""Minibatch and network outputs to further terms of the loss `[L, B]`, weights included, by
name."""


@dataclass(frozen=True, kw_only=True)
class PPOLoss:
    """Everything that the loss of one minibatch depends on, except its tensors and the `Coefs`.

    None and () mean that a part is absent. An engine refuses a loss with a part that is present and
    not in its list, so fields may be added here.
    """

    surrogate: Literal["clipped", "smooth_clipped", "vanilla"] | None
    """Policy objective; None for a loss of the critic alone."""
    clip_ratio: float
    value_loss: ValueLoss | None
    """Error of the critic; None for a loss of the policy alone."""
    value_clip: float
    value_coef: float
    advantage: Literal["given", "minibatch", "minibatch_sample"]
    """Advantages as they are, or standardised over the valid samples of the minibatch; "sample" is
    unbiased."""
    bound: BoundLoss | None = None
    trunk_value: Literal[True] | None = None
    """Train the value head on the policy's features; the critic has a separate phase."""
    moving_kl: Literal[True] | None = None
    """Measure the KL from the policy at the last visit of each sample, as rl_games does."""
    update_obs_stats_per_minibatch: Literal["minibatch", "first_epoch"] | None = None
    """Update the observation statistics of the trained networks with each minibatch, before the
    forward pass; or only with samples that no minibatch of this update had before."""
    bonus_coef: float | None = None
    """Weight of the error of a second value head; None without one."""
    augment: tuple[Augment, ...] = ()
    """Changes of a minibatch by extensions, before the forward pass."""
    terms: tuple[ExtensionLoss, ...] = ()
    """Further terms by extensions."""
    policy_terms: Callable[[PPOBatch, Tensor], Metrics] | None = None
    """A subclass's own version of `canter.engines.autograd.policy_terms`."""


@dataclass(frozen=True, kw_only=True)
class SACLoss:
    """Everything that the gradients of SAC depend on, except its networks and tensors."""

    pessimism: Literal["min", "mean"]
    """Combine the critics by their minimum or their mean."""
    learner: str | None = None
    """Name of a subclass that may have changed the losses; None for SAC's own learner."""


class Coefs(NamedTuple):
    """Weights that change during a run, 0-d tensors on the training device."""

    entropy: Tensor


class UpdateResult(NamedTuple):
    """Measurements of one minibatch, or of all minibatches of a phase."""

    metrics: Metrics
    """Means over the valid samples, for the log."""
    kl: Tensor | None = None
    """KL from the policy that collected the samples, 0-d, for early stopping and adaptive learning
    rates; None for a loss without a policy. It is not among the metrics: a phase logs it."""


class Engine(Protocol):
    """Computes everything PPO needs of its networks; chosen once, when the algorithm is built."""

    name: str
    optimizer: Optimizer
    """Receives the gradients."""

    def act(self, obs: Obs, state: State, reset: Tensor, rng: torch.Generator) -> Acted:
        """Sample actions.

        `reset` `[N]` marks environments that begin a new episode with this observation. The next
        call may overwrite the action as sampled and the parameters, but not the action for the
        environment.
        """
        ...

    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Return values `[L, B]` of observations `[L, B, ...]` and the states after each sample.

        With `needed` `[1, B]`, for single steps, the other values are undefined, and there are no
        states.
        """
        ...

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Return the log-probabilities `[...]` of stored actions.

        Rounded as in `gradients`, so that the first ratio is 1.
        """
        ...

    def begin(self, batch: PPOBatch) -> Any:
        """Take the samples `[L, S, ...]` to learn from.

        Return them in the engine's own form, for `gradients`.
        """
        ...

    def gradients(self, samples: Any, index: Tensor, coefs: Coefs) -> UpdateResult:
        """Write the gradients of the loss of sequences `index` `[B]` into the optimizer.

        Return metrics and KL.
        """
        ...


class Anything(Container[Any]):
    """Contains every value: an engine supports the property with any value."""

    def __contains__(self, value: object) -> bool:
        """Return True."""
        return True


ANYTHING = Anything()


class Numbers(Container[Any]):
    """Contains every Python number."""

    def __contains__(self, value: object) -> bool:
        """Return whether the value is a number, not a tensor or a schedule."""
        return isinstance(value, float | int)


NUMBERS = Numbers()
PLAIN_NETWORKS: Mapping[str, Any] = {
    "network": {"standard"},
    "precision": {"float32"},
    "observation groups": range(1, 17),
    "hidden layers": {"MLP", "empty"},
    "encoder": {"identity", "flatten"},
    "normalizer": {"running"},
    "observation dtype": {"torch.float32"},
    "layer": {"linear"},
    "actor": {"standard"},
    "policy head": {"standard"},
}
"""Features of networks of fully connected layers, by `canter.nn.describe`."""


@dataclass(frozen=True)
class Capabilities:
    """Losses and models that an engine supports, by the names of their features.

    A feature that is not listed must be absent from the loss or the model. New settings and modules
    of users are therefore refused until an engine lists them.
    """

    device: str
    """Type of device that the engine is for."""
    loss: Mapping[str, Container[Any]]
    """Supported values of each field of the loss."""
    model: Mapping[str, Container[Any]]
    """Supported values of each feature of `canter.nn.describe`."""
    runs_modules: bool = False
    """Run the modules themselves: features of the model that are not listed are supported."""
    requirement: Callable[[Any], str | None] = lambda model: None
    """Return why this machine cannot run the engine for a model, if so."""
    size_limit: Callable[[Any], str | None] = lambda model: None
    """Return why a model with supported features is too large for the engine, if so."""


LOSS_TEXTS = {
    "advantage": "advantage_normalization=minibatch",
    "bound": "bound_loss.form={}",
    "trunk_value": "central_value.actor_value=true",
    "moving_kl": "kl=rl_games",
    "update_obs_stats_per_minibatch": "obs_statistics={}",
    "bonus_coef": "bonus_value",
    "augment": "the hook augment of an extension",
    "terms": "the hook loss of an extension",
    "policy_terms": "the method policy_terms of a subclass",
    "learner": "{}, a subclass of the learner,",
}
"""Settings and code behind the fields of a loss, with {} for their value; other fields are settings
themselves."""


def describe_loss(loss: PPOLoss | SACLoss) -> list[Feature]:
    """Return every field of a loss as a feature; None and () are absent."""
    features: list[Feature] = []
    for each in fields(loss):
        value = getattr(loss, each.name)
        if isinstance(value, BoundLoss):
            value = value.config.form
        if value == ():
            value = None
        text = LOSS_TEXTS.get(each.name, each.name + "={}").format(value)
        features.append(Feature(each.name, value, text))
    if isinstance(loss, PPOLoss) and loss.bound is not None and loss.surrogate is None:
        features.append(Feature("bound alone", True, "bound_loss without a surrogate"))
    return features


def unsupported_reason(
    capabilities: Capabilities, loss: PPOLoss | SACLoss, model: ActorCritic | SACModel
) -> str | None:
    """Return why an engine cannot compute a loss of a model, naming the setting; None if it can."""
    reason = capabilities.requirement(model)
    if reason is not None:
        return reason
    reason = unsupported_feature(describe_loss(loss), capabilities.loss)
    if reason is not None:
        return reason
    features = [feature for layer in describe(model) for feature in layer.features]
    reason = unsupported_feature(features, capabilities.model, optional=capabilities.runs_modules)
    return reason or capabilities.size_limit(model)


def unsupported_feature(
    features: Iterable[Feature], supported: Mapping[str, Container[Any]], optional: bool = False
) -> str | None:
    """Return a sentence about the first feature that is not supported.

    `optional` accepts those that are not listed.
    """
    for feature in features:
        absent = feature.value == ABSENT or (feature.value is None and feature.name not in supported)
        listed = feature.value in supported.get(feature.name, ANYTHING if optional else ())
        if not (absent or listed):
            return f"{feature.text} is not supported"
    return None

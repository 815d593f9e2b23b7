"""A loss that keeps the mean of a Gaussian policy near the bounds of the action.

A sample outside is cut off, so beyond the bounds the reward says nothing about where the mean is, and it drifts away.

What PPO remembers of each step, the rows that it learns from, and what its networks make of them.

N environments, L sequence length (1 without memory), S sequences, B of them in a minibatch, P distribution parameters.

The seam between PPO's mathematics and speed: what the loss is, and what an engine does with it.

L sequence length (1 without memory), S sequences, B sequences in a minibatch, N environments.

`canter.engines.autograd` is the definition. Every other engine computes the same description and is held against it by
one table of parity tests. An engine takes a description only if it knows every part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from canter.core.plain import check_range
from canter.core.struct import Metrics, Obs, State, TensorStruct
from canter.functional.losses import BOUND_LOSSES
from canter.nn.distributions import DiagGaussian, Distribution
from canter.nn.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class BoundLossConfig:
    """A loss on the mean of a Gaussian policy, in units in which the bounds are -1 and 1."""

    form: Literal["soft", "regularisation"] = "soft"
    """The squared distance beyond `limit`, or the square of the mean."""
    coef: float = 1e-3
    """Weight of the loss."""
    limit: float = 1.1
    """For `form="soft"`: how far from the centre the mean may be without cost."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        check_range(self, "must not be negative", "coef")
        check_range(self, "must be above 0", "limit")

    def build(self, distribution: Distribution, device: torch.device) -> BoundLoss:
        """The loss for a distribution; raises ValueError for one whose actions cannot leave the bounds."""
        if not isinstance(distribution, DiagGaussian):
            raise ValueError(
                f"bound_loss is for a Gaussian policy, whose mean can leave the bounds; {type(distribution).__name__} "
                "cannot: set bound_loss=null, or model.distribution=gaussian for a continuous action"
            )
        return BoundLoss(self, distribution, device)


class BoundLoss:
    """Distribution parameters `[..., 2A]` to a loss `[...]`."""

    def __init__(self, config: BoundLossConfig, distribution: DiagGaussian, device: torch.device) -> None:
        self.config, self.distribution = config, distribution
        half, centre = (1.0,) * distribution.dim, (0.0,) * distribution.dim
        if distribution.bounds != "rescale":  # else the mean is in the right units already
            half, centre, *_ = replace(distribution, bounds="rescale").interval()
        self.half, self.centre = torch.tensor([half, centre], device=device)

    def __call__(self, params: Tensor) -> Tensor:
        """The loss of each row."""
        mean = (self.distribution.mode(params) - self.centre) / self.half
        return BOUND_LOSSES[self.config.form](mean, self.config.limit)


@dataclass
class PPORecord(TensorStruct):
    """What PPO remembers of each step, `[N, ...]`; log-probabilities follow from it, for a whole rollout at once."""

    action: Tensor
    """The sample itself, never clipped or rescaled."""
    dist_params: Tensor


@dataclass
class PPOBatch(TensorStruct):
    """Rows to learn from, `[L, S, ...]`."""

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
    """`[1, S, ...]` the policy's memory before each sequence; `()` without memory."""
    critic_state: State
    """`[1, S, ...]` the same of the critic."""
    bonus_value: Tensor | None = None
    """Values of a second head before the update, in its normalised units; None without one."""
    bonus_return: Tensor | None = None
    """Targets of that head, in the same units."""
    carried: dict[str, Any] = field(default_factory=dict)
    """What extensions asked to have beside the rows, by their names: trees of `[L, S, ...]` or `[1, S, ...]`."""
    original: Tensor | None = None
    """bool: rows that the policy acted on itself. KL, entropy and clip fraction, and with the KL the adaptive learning
    rates, are of these only; None says that all are."""


@dataclass(frozen=True)
class ModelOutput:
    """What the networks made of a minibatch."""

    dist_params: Tensor | None
    """`[L, B, P]` parameters of the action distribution; None in the phase of a critic of its own."""
    value: Tensor | None
    """`[L, B]` in normalised units; None where the critic has a phase of its own."""
    bonus_value: Tensor | None = None
    """`[L, B]` by a second head, in its normalised units; None without one."""


Acted = tuple[Tensor, Tensor, Tensor, State]
"""What the environment receives, the action as drawn, the distribution parameters `[N, ...]`, and the next state."""
Valued = tuple[Tensor, State]
"""Values, and the critic's states after each row."""
ValueLoss = Literal["mse", "clipped", "huber"]
Augment = Callable[[PPOBatch], PPOBatch]
Term = Callable[[PPOBatch, ModelOutput], Metrics]
"""From a minibatch and what the networks made of it to further terms `[L, B]`, weights included, by name."""


@dataclass(frozen=True, kw_only=True)
class PPOLoss:
    """Everything that the loss of one minibatch depends on besides its tensors and the `Coefs`.

    None and () say that a part is absent. An engine declines a loss with a part that it does not know and that is not
    absent, so fields may be added here.
    """

    surrogate: Literal["clipped", "smooth_clipped", "vanilla"] | None
    """Policy objective; None where the loss is the critic's alone."""
    clip_ratio: float
    value_loss: ValueLoss | None
    """Error of the critic; None where the loss is the policy's alone."""
    value_clip: float
    value_coef: float
    advantage: Literal["given", "minibatch", "minibatch_sample"]
    """Advantages as they are, or standardised over the valid rows of the minibatch; "sample" is the unbiased form."""
    bound: BoundLoss | None = None
    trunk_value: Literal[True] | None = None
    """The value is that of a head on the policy's features, while the critic has a phase of its own."""
    moving_kl: Literal[True] | None = None
    """Measure the KL from the policy as it was when a row was last learned from, as rl_games does."""
    moves_statistics: Literal[True] | None = None
    """Show each minibatch to the observation statistics of the networks that it trains, before their forward pass."""
    bonus_coef: float | None = None
    """Weight of the error of a second value head; None without one."""
    augment: tuple[Augment, ...] = ()
    """What extensions make of a minibatch on its way to the loss."""
    terms: tuple[Term, ...] = ()
    """What extensions add to the loss."""
    policy_terms: Callable[[PPOBatch, Tensor], Metrics] | None = None
    """A subclass's own terms of the policy."""


class Coefs(NamedTuple):
    """Weights that change during a run, 0-d tensors on the training device."""

    entropy: Tensor


class Engine(Protocol):
    """Computes what PPO needs of its networks; chosen once, when the algorithm is built."""

    name: str
    optimizer: Optimizer
    """Where gradients go."""

    def act(self, obs: Obs, state: State, reset: Tensor, rng: torch.Generator) -> Acted:
        """Sample actions; `reset` `[N]` marks environments that begin a new episode with this observation.

        The next call may write over the action as drawn and the parameters, not over what the environment receives.
        """
        ...

    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Values `[L, B]` of observations `[L, B, ...]` in the units of the reward, and the states after each row.

        With `needed` `[1, B]`, for single rows, values of the others may be anything, and there are no states.
        """
        ...

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities `[...]` of stored actions, rounded as `gradients` does: then the first ratio is 1."""
        ...

    def begin(self, batch: PPOBatch) -> Any:
        """Take the rows `[L, S, ...]` to learn from; what is given back is opaque and goes into `gradients`."""
        ...

    def gradients(self, rows: Any, index: Tensor, coefs: Coefs) -> Metrics:
        """Write the gradients of the loss of sequences `index` `[B]` into the optimiser; means over valid rows."""
        ...


def unknown_part(loss: PPOLoss, known: dict[str, Callable[[Any], bool]]) -> str | None:
    """Why an engine that knows only these parts of a loss declines it; None if it knows all.

    `known` has a test of the value for each field. A field that it does not have must be absent: None or ().
    """
    for part in fields(loss):
        value = getattr(loss, part.name)
        fits = known.get(part.name, lambda value: value is None or value == ())
        if not fits(value):
            shown = f"={value}" if isinstance(value, str | float | int) else ""
            return f"it does not know {part.name}{shown}"
    return None

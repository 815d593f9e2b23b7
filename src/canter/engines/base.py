"""The seam between PPO's mathematics and speed: what the loss is, and what an engine does with it.

L sequence length (1 without memory), S sequences, B sequences in a minibatch, N environments.

`canter.engines.autograd` is the definition. Every other engine computes the same description and is held against it by
one table of parity tests. An engine takes a description only if it knows every part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from canter.engines.batch import ModelOutput, PPOBatch
from canter.engines.bound import BoundLoss
from canter.optim import Optimizer
from canter.struct import Metrics, Obs, State

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
    for field in fields(loss):
        value = getattr(loss, field.name)
        fits = known.get(field.name, lambda value: value is None or value == ())
        if not fits(value):
            shown = f"={value}" if isinstance(value, str | float | int) else ""
            return f"it does not know {field.name}{shown}"
    return None

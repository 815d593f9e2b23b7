"""What PPO remembers of each step, the rows that it learns from, and what its networks make of them.

N environments, L sequence length (1 without memory), S sequences, B of them in a minibatch, P distribution parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from canter.struct import Obs, State, TensorStruct


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

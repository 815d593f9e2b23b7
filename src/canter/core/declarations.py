"""Optional declarations of an environment.

The NumPy arrays of its original spaces, for users that act with them; its symmetries; its view of
motion clips; metrics that it gathers on the host; and programs for whole rollouts. T steps, N
environments, A action components, or K discrete actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from canter.core.registry import UserError


@runtime_checkable
class MetricSource(Protocol):
    """Optional for an environment that gathers metrics on the host, unlike `Step.metrics`."""

    def read_metrics(self) -> dict[str, float]:
        """Return finite means since the last call, by name; logged as `env/<name>`."""
        ...


@runtime_checkable
class CompilesRollouts(Protocol):
    """Optional for an environment that steps whole rollouts in one program, with the policy in it."""

    def compile_rollout(self, act: Callable[..., Any]) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
        """Return a function of weights, observations `[N, ...]` and noise `[T, N, ...]` that steps T times.

        `act(weights, obs, noise)`, in the simulator's language, returns the actions and what to record
        of a step. The function returns the records and the `Step`, all `[T, N, ...]`.
        """
        ...


@dataclass(frozen=True)
class Mirror:
    """A signed permutation of a vector: component i becomes `sign[i]` times component `order[i]`.

    For discrete actions it permutes all options: every `sign` is 1, and option i takes the place of
    option `order[i]`.
    """

    sign: tuple[int, ...]
    order: tuple[int, ...] = ()
    """Source component of each component; empty for the identity."""

    def __post_init__(self) -> None:
        """Raise UserError, naming the component, if this is not a signed permutation."""
        object.__setattr__(self, "order", tuple(self.order) or tuple(range(len(self.sign))))
        if wrong := [i for i, sign in enumerate(self.sign) if sign not in (1, -1)]:
            raise UserError(f"sign[{wrong[0]}]={self.sign[wrong[0]]} must be 1 or -1")
        if sorted(self.order) != list(range(len(self.sign))):
            missing = sorted(set(range(len(self.sign))) - set(self.order))
            which = f"component {missing[0]} is missing" if missing else f"there are {len(self.sign)} signs"
            raise UserError(f"order={self.order} must name each component once: {which}")

    @staticmethod
    def of(signs: str, order: tuple[int, ...] = ()) -> Mirror:
        """Build a mirror from a string of + and -; blanks are ignored."""
        return Mirror(tuple(1 if sign == "+" else -1 for sign in signs if sign in "+-"), order)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mirrored vectors `[..., D]`.

        Meant for inspection: the constants are copied from the host at every call.
        """
        return x[..., list(self.order)] * x.new_tensor(self.sign)


AnyMirror = Mirror | Callable[[Tensor], Tensor]
"""A signed permutation, or any function of tensors `[..., D]` that is its own inverse."""


@dataclass(frozen=True)
class Symmetry:
    """A mirror image of the world with equal dynamics and rewards."""

    name: str
    obs: Mapping[str, AnyMirror]
    """Mirror of each observation group."""
    action: AnyMirror
    """Mirror of an action, as the environment receives it."""
    state: Mapping[str, AnyMirror] = field(default_factory=dict)
    """Mirror of each tensor `[N, D]` of the environment's state; `canter check` needs it to verify
    the symmetry."""


@dataclass(frozen=True)
class MotionSpec:
    """Observations that correspond to frames of a motion clip."""

    time_step: float
    """Seconds from one observation to the next."""
    observe: Mapping[str, Callable[[dict[str, Tensor]], Tensor]]
    """Per observation group: the function from frames (fields of `canter.core.data.motion` by name)
    to observations `[..., D]`."""
    joints: tuple[str, ...] = ()
    """Names of the joints in the order that `observe` expects; empty for the clip's order."""
    bodies: tuple[str, ...] = ()
    """Names of the bodies in the order that `observe` expects; empty for the clip's order."""
    pose: tuple[int, ...] = ()
    """Components of the observation that are joint angles, for the pose error; empty for all
    components."""
    demonstrations: Callable[[], Tensor] | None = None
    """Returns transitions of clips `[K, W]` that the environment keeps, if no files name clips. Its
    group `amp` is then the transition that a step ended, not a frame."""


@dataclass(frozen=True)
class ActionArray:
    """Shape and dtype of one environment's action in its own space."""

    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...] = (0,)
    """First value of each discrete action in the space, or one for all; Canter counts from 0."""

    def __post_init__(self) -> None:
        """Raise UserError if the dtype is not numeric."""
        if np.dtype(self.dtype).kind not in "biuf":
            raise UserError(f"dtype={self.dtype!r} is not a numeric dtype")

    @cached_property
    def _start(self) -> np.ndarray:
        return np.array(self.start)

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Return a policy's action `[N, A]`, `[N]` or `[N, K]` as a new array `[N, *shape]`.

        Nothing is clipped.
        """
        if action.dtype.kind != "f":
            action = action + self._start
        elif not self.dtype.startswith("float"):
            # A cast alone would truncate towards zero: twice as many values would become 0 as any
            # other.
            action = np.rint(action)
        # astype copies even if nothing changes, so no environment keeps memory that is overwritten.
        return action.reshape(len(action), *self.shape).astype(self.dtype)


@dataclass(frozen=True)
class OneHotGroup:
    """An observation group of concatenated one-hot vectors, which are integers in the own array."""

    group: str
    shape: tuple[int, ...]
    """Shape of one environment's array."""
    options: tuple[int, ...]
    """Number of options of each integer."""
    start: tuple[int, ...]
    """Value of the first option of each integer."""

    def __call__(self, raw: np.ndarray) -> np.ndarray:
        """Return integers `[M, ...]` as one-hot vectors, float32 `[M, sum(options)]`."""
        hot = np.zeros((len(raw), sum(self.options)), np.float32)
        np.put_along_axis(hot, raw.reshape(len(raw), -1).astype(np.int64) + self._offset, 1.0, axis=1)
        return hot

    @cached_property
    def _offset(self) -> np.ndarray:
        return np.cumsum(self.options) - self.options - np.array(self.start)


@dataclass(frozen=True)
class OwnArrays:
    """Differences between Canter's tensors and the arrays of the environment's own spaces."""

    action: ActionArray | None = None
    """None if actions are as in the action spec."""
    choices: tuple[OneHotGroup, ...] = ()

"""Declarations of an environment for extensions: its symmetries and its view of motion clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from canter.core.registry import UserError


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

"""Names, units and scaling of observations and actions, as far as an environment declares them.

A policy file keeps them, and an export writes them to the policy's contract. None means unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from canter.core.registry import UserError

UNKNOWN = "unknown"
"""None in plain data."""
Floats = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Consecutive components of an observation group or of the action.

    An observation is `clip(measured) * scale + offset`; a command to the robot is
    `clip(action * scale + offset)`. Numbers are one for all components, or one each.
    """

    name: str
    """Name of the term, such as joint_pos."""
    size: int
    """Components in the group, all frames of a history included; the options of a discrete action."""
    components: tuple[str, ...] | None = None
    """Name of each component of one frame, such as joints."""
    unit: str | None = None
    """Unit of the measured value, or of the command."""
    scale: Floats | None = None
    offset: Floats | None = None
    low: Floats | None = None
    """Lower bound of the clipping; minus infinity for none."""
    high: Floats | None = None
    """Upper bound of the clipping; infinity for none."""
    history: int | None = None
    """Frames, the oldest first; 1 for the present one alone."""
    source: str | None = None
    """Origin of an observation: a function of mjlab and Isaac Lab such as joint_pos_rel,
    `sensor NAME` or `command NAME`."""

    def __post_init__(self) -> None:
        """Raise UserError for a number of names or values that does not fit the size."""
        frame = self.size // (self.history or 1)
        if self.size < 1 or (self.history is not None and not 1 <= self.history <= self.size):
            raise UserError(f"interface: {self.name}: size={self.size}, history={self.history} must be at least 1")
        if self.size % (self.history or 1):
            raise UserError(f"interface: {self.name}: size={self.size} is no multiple of history={self.history}")
        if self.components is not None and len(self.components) != frame:
            raise UserError(f"interface: {self.name}: {len(self.components)} components, expected {frame}")
        for name in ("scale", "offset", "low", "high"):
            values = vars(self)[name]
            if values is not None and len(values) not in (1, frame):
                raise UserError(f"interface: {self.name}: {name} has {len(values)} values, expected 1 or {frame}")


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A joint of the robot, in the simulator's order."""

    name: str
    default_position: float | None = None
    """Position that observations and actions are relative to, in rad or m."""
    stiffness: float | None = None
    """Position gain of its motor."""
    damping: float | None = None
    """Velocity gain of its motor."""
    effort_limit: float | None = None
    """Largest torque or force of its motor, in N m or N."""
    armature: float | None = None
    """Inertia of its rotor, seen from the joint, in kg m^2 or kg."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Everything that an environment declares about its observations, actions and robot."""

    obs: Mapping[str, tuple[Signal, ...]] = field(default_factory=dict)
    """Terms of each observation group in order; groups without an entry are unknown."""
    action: tuple[Signal, ...] | None = None
    """Terms of the action in order."""
    clip_actions: float | None = None
    """Bound of actions on both sides before they are scaled; infinity for none."""
    clip_observations: float | None = None
    """Bound of every observed number on both sides; infinity for none."""
    control_period: float | None = None
    """Seconds from one action to the next."""
    decimation: int | None = None
    """Physics steps in a control period."""
    joints: tuple[Joint, ...] | None = None
    """Joints of the robot."""

    def check(self, sizes: Mapping[str, int], actions: int) -> None:
        """Raise UserError unless the terms have the sizes of the groups and of the action."""
        terms: dict[str, tuple[Signal, ...]] = {f"obs.{group}": signals for group, signals in self.obs.items()}
        expected = {f"obs.{group}": size for group, size in sizes.items()}
        if self.action is not None:
            terms["action"] = self.action
            expected["action"] = actions
        for name, signals in terms.items():
            total = sum(signal.size for signal in signals)
            if name not in expected:
                raise UserError(f"interface: {name}: no such observation group; there are {', '.join(sizes)}")
            if total != expected[name]:
                raise UserError(f"interface: {name}: terms of {total} components, expected {expected[name]}")

    def to_plain(self) -> dict[str, Any]:
        """Return plain data; None becomes "unknown", infinity "inf"."""
        return encode(self)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Interface:
        """Return the interface of plain data; raise TypeError or ValueError for another form."""
        values = decode(plain)
        values["obs"] = {group: signals_from_plain(signals) for group, signals in plain["obs"].items()}
        if values["action"] is not None:
            values["action"] = signals_from_plain(plain["action"])
        if values["joints"] is not None:
            values["joints"] = tuple(Joint(**decode(joint)) for joint in plain["joints"])
        return Interface(**values)


def signals_from_plain(plain: list[dict[str, Any]]) -> tuple[Signal, ...]:
    """Return the terms of plain data."""
    return tuple(Signal(**decode(signal)) for signal in plain)


def encode(value: Any) -> Any:
    """Return plain data of declarations."""
    if isinstance(value, Interface | Signal | Joint):
        return {name: encode(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, float) and abs(value) == float("inf"):
        return str(value)
    return UNKNOWN if value is None else value


def decode(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one mapping that `encode` wrote."""

    def number(value: Any) -> Any:
        return float(value) if value in ("inf", "-inf") else value

    values = {name: None if value == UNKNOWN else number(value) for name, value in plain.items()}
    return {name: tuple(map(number, value)) if isinstance(value, list) else value for name, value in values.items()}


def name_differences(saved: Interface, here: Interface) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, saved and present value where two interfaces have known and different names."""
    pairs = {f"obs.{group}": (saved.obs[group], here.obs[group]) for group in saved.obs if group in here.obs}
    if saved.action is not None and here.action is not None:
        pairs["action"] = (saved.action, here.action)
    for place, (old, new) in pairs.items():
        if [signal.name for signal in old] != [signal.name for signal in new]:
            yield f"{place} terms", [signal.name for signal in old], [signal.name for signal in new]
            continue
        for before, after in zip(old, new, strict=True):
            if None not in (before.components, after.components) and before.components != after.components:
                yield f"{place}.{before.name} components", before.components, after.components

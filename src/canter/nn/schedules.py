"""Numbers that change during a run.

A schedule is a frozen description; the number itself is a 0-d tensor on the training device that the schedule edits in
place. So a captured graph sees every change, and a checkpoint needs to keep nothing but the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from canter.core.dispatch import has_kernels
from canter.core.plain import check_range, check_settings
from canter.core.registry import Registry, UserError

Event = Literal["minibatch", "step", "epoch", "update"]


class Schedule(Protocol):
    """How one number moves.

    One that does not look at `progress` may say so by a class attribute, `follows_progress = False`; then it also fits
    a run whose length is not known.
    """

    @property
    def initial(self) -> float:
        """The number at the start of the run."""
        ...

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """At the start of an iteration: set `value` for `progress`, the fraction 0..1 of the run that is done."""
        ...

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """After a minibatch's loss, its step, an epoch or an update: react to the measured KL."""
        ...


schedules: Registry[type[Schedule]] = Registry("schedule", check_settings)
"""Schedules by the name that `kind` has in settings."""

AnySchedule = Annotated[Schedule, schedules]


@schedules.register("constant")
@dataclass(frozen=True)
class Constant:
    """Stays at `value`."""

    value: float
    """The number."""
    follows_progress: ClassVar[bool] = False

    @property
    def initial(self) -> float:
        """The value."""
        return self.value

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Nothing to do."""

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Nothing to do."""


class _FromStart:
    """What schedules have in common that begin at `start`; nothing moves the number unless one of them says how."""

    start: float

    @property
    def initial(self) -> float:
        """The start."""
        return self.start

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Nothing to do."""

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Nothing to do."""


@schedules.register("linear")
@dataclass(frozen=True)
class Linear(_FromStart):
    """Moves in a straight line from `start` to `end` over the run."""

    start: float
    """The number at the start of the run."""
    end: float = 0.0
    """The number at its end."""

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """A function of absolute progress, so that a resumed run continues on the same line."""
        value.copy_(self.start + (self.end - self.start) * progress.clamp(0, 1))


@schedules.register("step")
@dataclass(frozen=True)
class StepAt(_FromStart):
    """Stays at `start`, and at `end` from the share `at` of the run on."""

    start: float
    """The number at first."""
    end: float
    """The number afterwards."""
    at: float = 0.5
    """The share 0..1 of the run after which it changes."""

    def __post_init__(self) -> None:
        """Refuse a change that never comes."""
        if not 0 < self.at < 1:
            raise UserError(f"at={self.at} must lie between 0 and 1")

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """A function of absolute progress, so that a resumed run changes at the same moment."""
        value.copy_(torch.where(progress < self.at, self.start, self.end))


@has_kernels
def follow_kl_(value: Tensor, kl: Tensor, target: float, factor: float, minimum: float, maximum: float) -> None:
    """Multiply 0-d `value` by `factor` below half the target KL, divide it above twice the target; within bounds.

    A KL of exactly 0 means that no step was taken, which is no reason to speed up; however small it is otherwise, it
    must be one, or a number that has fallen very low would stay there. NaN counts as too large.
    """
    too_near = (kl != 0.0) & (kl < target / 2)
    unless_too_far = torch.where(too_near, factor, 1.0)
    value.mul_(torch.where(kl <= 2 * target, unless_too_far, 1.0 / factor))
    value.clamp_(minimum, maximum)


@schedules.register("adaptive_kl")
@dataclass(frozen=True)
class AdaptiveKL(_FromStart):
    """Keeps the policy's step size near a target: lower above `2 * target_kl`, higher below `target_kl / 2`."""

    start: float
    """The number at the start of the run."""
    target_kl: float = 0.01
    """KL(old || new) to aim at, summed over action components, mean over samples."""
    every: Event = "epoch"
    """When to react: on each minibatch's own KL before its step (minibatch) or after it (step), or after each epoch or
    update on the epoch's mean."""
    factor: float = 1.5
    """How much one reaction changes the number."""
    minimum: float = 1e-6
    """Never lower than this."""
    maximum: float = 1e-2
    """Never higher than this."""
    follows_progress: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a start outside the bounds, and a factor that would change nothing."""
        if not self.factor > 1:
            raise UserError(f"factor={self.factor} must be above 1")
        check_range(self, "must be above 0", "target_kl")
        if not 0 < self.minimum <= self.start <= self.maximum:
            raise UserError(
                f"AdaptiveKL: start={self.start} must lie in minimum..maximum = {self.minimum}..{self.maximum}"
            )

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Change the number once, at the event that was chosen."""
        if event == self.every:
            follow_kl_(value, kl, self.target_kl, self.factor, self.minimum, self.maximum)

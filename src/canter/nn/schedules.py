"""Schedules: values that change during a run, such as a learning rate.

A schedule is a frozen description; the value itself is a 0-d tensor on the training device that the
schedule edits in place. So a captured graph sees every change, and a checkpoint stores only the
tensor.
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
    """Interface of a schedule of one value.

    A schedule that ignores `progress` may declare it by the class attribute
    `follows_progress = False`; then it also works in a run of unknown length.
    """

    @property
    def initial(self) -> float:
        """Value at the start of the run."""
        ...

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Set `value` at the start of an iteration; `progress` is the fraction of the run done."""
        ...

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Adapt `value` to the KL measured at an event: a loss, a step, an epoch or an update."""
        ...


schedules: Registry[type[Schedule]] = Registry("schedule", check_settings)
"""Schedules by the `kind` of config files."""

AnySchedule = Annotated[Schedule, schedules]


@schedules.register("constant")
@dataclass(frozen=True)
class Constant:
    """Constant `value`."""

    value: float
    """Constant value."""
    follows_progress: ClassVar[bool] = False

    @property
    def initial(self) -> float:
        """Value at the start of the run."""
        return self.value

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Set the constant: a run may be resumed with another one."""
        value.fill_(self.value)

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Do nothing."""


class _FromStart:
    """Base of schedules that begin at `start`; by default the value does not change."""

    start: float

    @property
    def initial(self) -> float:
        """Value at the start of the run."""
        return self.start

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Do nothing."""

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Do nothing."""


@schedules.register("linear")
@dataclass(frozen=True)
class Linear(_FromStart):
    """Linear change from `start` to `end` over the run, or over a part of it."""

    start: float
    """Value at the start of the run."""
    end: float = 0.0
    """Value at the end of the run."""
    begin_at: float = 0.0
    """Fraction 0..1 of the run at which the change begins."""
    end_at: float = 1.0
    """Fraction of the run at which `end` is reached."""

    def __post_init__(self) -> None:
        """Raise UserError if the change would end before it begins."""
        if not 0 <= self.begin_at < self.end_at <= 1:
            raise UserError(f"begin_at={self.begin_at}, end_at={self.end_at}: expected 0 <= begin_at < end_at <= 1")

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Set a function of absolute progress, so that a resumed run continues on the same line."""
        share = ((progress - self.begin_at) / (self.end_at - self.begin_at)).clamp(0, 1)
        value.copy_(self.start + (self.end - self.start) * share)


@schedules.register("step")
@dataclass(frozen=True)
class StepAt(_FromStart):
    """Step change: `start` until the fraction `at` of the run, then `end`."""

    start: float
    """Value before the change."""
    end: float
    """Value after the change."""
    at: float = 0.5
    """Fraction 0..1 of the run after which the value changes."""

    def __post_init__(self) -> None:
        """Raise UserError if the value would never change."""
        if not 0 < self.at < 1:
            raise UserError(f"at={self.at} must lie between 0 and 1")

    def set_(self, value: Tensor, progress: Tensor) -> None:
        """Set a function of absolute progress, so that a resumed run changes at the same step."""
        value.copy_(torch.where(progress < self.at, self.start, self.end))


@has_kernels
def follow_kl_(value: Tensor, kl: Tensor, target: float, factor: float, minimum: float, maximum: float) -> None:
    """Multiply 0-d `value` by `factor` below half the target KL, divide it above twice the target.

    The value stays within minimum..maximum. A KL of exactly 0 means that no step was taken, so the
    value is not increased; any other small KL increases it, or a very low value would never
    recover. NaN counts as too large.
    """
    too_small = (kl != 0.0) & (kl < target / 2)
    change = torch.where(too_small, factor, 1.0)
    value.mul_(torch.where(kl <= 2 * target, change, 1.0 / factor))
    value.clamp_(minimum, maximum)


@schedules.register("adaptive_kl")
@dataclass(frozen=True)
class AdaptiveKL(_FromStart):
    """Adapts to the KL: decreases above `2 * target_kl`, increases below `target_kl / 2`."""

    start: float
    """Value at the start of the run."""
    target_kl: float = 0.01
    """Target KL(old || new), summed over action components, mean over samples."""
    every: Event = "epoch"
    """Time of the adaptation: for each minibatch, by its KL before its step (minibatch) or after it
    (step), or after each epoch or update, by the epoch's mean."""
    factor: float = 1.5
    """Factor of one change of the value."""
    minimum: float = 1e-6
    """Lower bound of the value."""
    maximum: float = 1e-2
    """Upper bound of the value."""
    follows_progress: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise UserError for a start outside the bounds, and for a factor without effect."""
        if not self.factor > 1:
            raise UserError(f"factor={self.factor} must be above 1")
        check_range(self, "must be above 0", "target_kl")
        if not 0 < self.minimum <= self.start <= self.maximum:
            raise UserError(
                f"AdaptiveKL: start={self.start} must lie in minimum..maximum = {self.minimum}..{self.maximum}"
            )

    def observe_(self, value: Tensor, kl: Tensor, event: Event) -> None:
        """Change the value at the event `every`."""
        if event == self.every:
            follow_kl_(value, kl, self.target_kl, self.factor, self.minimum, self.maximum)

"""Callbacks: what a user's program does during a run, and the metrics that it adds to the log."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor

from canter.core.registry import UserError
from canter.training.progress import COLUMNS, Report

STOP = "stop"
"""Return value of `on_iteration` that ends the run; `False` does too."""
RESERVED = {"iteration", "wall_time", *(name.rstrip("_") for name in COLUMNS)}
"""Columns of the log that no metric may have the name of."""


class Callback:
    """Follows a run; override the methods that you need.

        class Watch(canter.Callback):
            def on_rollout_end(self, rollout, trainer):
                trainer.log_metric("reward/largest", rollout.reward.max())

        canter.train("CartPole-v1", callbacks=[Watch()])

    With several ranks every rank calls them, but `on_evaluation` on the first rank only, which
    also writes the log. An error in a callback ends the run; its training state is saved.
    """

    def on_training_start(self, trainer: Any) -> None:
        """`Trainer.learn` begins."""

    def on_rollout_start(self, trainer: Any) -> None:
        """The environments are about to be stepped."""

    def on_rollout_end(self, rollout: Any, trainer: Any) -> None:
        """The `rollout` of T steps of N environments is complete, and not learned from yet.

        Its tensors (`obs`, `reward` `[T, N]`, ...) are overwritten by the next one. On a GPU,
        reading a number from them waits for the device.
        """

    def on_evaluation(self, metrics: dict[str, float], trainer: Any) -> None:
        """An evaluation during training (`evaluate.every`) returned metrics such as `eval/return`."""

    def on_iteration(self, report: Report, policy: Any, trainer: Any) -> Any:
        """A row of the log is about to be written.

        A returned dict of numbers is added to the row. `canter.STOP` or False ends the run.
        """

    def on_training_end(self, trainer: Any) -> None:
        """`Trainer.learn` returns or raises; the last row is written."""


class Callbacks:
    """The callbacks of a run, called one after the other, and the metrics that they log."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        if not isinstance(callbacks, list | tuple):
            raise UserError(f"callbacks: {callbacks!r} is no list; expected one such as [MyCallback()]")
        for callback in callbacks:
            if isinstance(callback, type) and issubclass(callback, Callback):
                raise UserError(f"callbacks: {callback.__name__} is a class; pass an instance, {callback.__name__}()")
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks: {callback!r} is no canter.Callback; pass a function as on_iteration instead"
                )
        self.callbacks = list(callbacks)
        self.metrics: dict[str, float] = {}
        """Metrics for the next row."""

    @contextmanager
    def training(self, trainer: Any) -> Iterator[None]:
        """Call the methods of each callback at the start and the end of the block."""
        self.call("on_training_start", trainer)
        try:
            yield
        finally:
            self.call("on_training_end", trainer)

    def call(self, method: str, *args: Any) -> None:
        """Call a method of each callback."""
        for callback in self.callbacks:
            getattr(callback, method)(*args)

    def on_iteration(self, function: Callable[..., Any], report: Report, policy: Any, trainer: Any) -> bool:
        """Call the user's function and the method of each callback; return whether one of them ends the run.

        Their metrics are added to the report.
        """
        known = set(report.metrics)
        answers = [function(*(report, policy, trainer)[: count_arguments(function)])]
        answers += [callback.on_iteration(report, policy, trainer) for callback in self.callbacks]
        for answer in answers:
            if isinstance(answer, Mapping):
                for name, value in answer.items():
                    self.log("on_iteration", name, value)
        for name in [name for name in report.metrics if name not in known]:
            self.log("report.metrics", name, report.metrics.pop(name))
        taken = sorted(known & self.metrics.keys())
        if taken:
            raise UserError(f"a callback logs {taken[0]!r}, which this run logs itself: choose another name")
        report.metrics.update(self.metrics)
        report.custom.extend(self.metrics)
        self.metrics = {}
        return any(answer is False or (isinstance(answer, str) and answer == STOP) for answer in answers)

    def log(self, source: str, name: Any, value: Any) -> None:
        """Keep a metric for the next row; raise UserError for a name or value that the log cannot have."""
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UserError(f"{source}: {name!r} is no name of a metric, it must be text")
        if name in RESERVED or name.startswith("time/"):
            raise UserError(f"{source}: the log has a column {name!r} already; choose another name, such as my/{name}")
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            self.metrics[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            kind = type(value).__name__
            raise UserError(
                f"{source}: {name}={reprlib.repr(value)} ({kind}) is no number; log one number under a name"
            ) from None


def count_arguments(callback: Callable[..., Any]) -> int:
    """Return how many of its three arguments a callback takes by position, at least one.

    The signature decides, so that `lambda report: ...` needs no unused parameters. Raises UserError
    for something that takes none of them, or needs more.
    """
    if not callable(callback):
        raise UserError(f"on_iteration: {callback!r} is no function")
    try:
        parameters = signature(callback).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return 1
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A default is the user's own: `lambda report, rows=rows: ...` binds a name.
    required = [p for p in positional if p.default is p.empty]
    if not positional or len(required) > 3:
        expected = "expected a function of report, of report and policy, or of report, policy and trainer"
        raise UserError(f"on_iteration: the function takes {len(required)} arguments; {expected}")
    return max(len(required), 1)


def ignore(report: Report) -> None:
    """Do nothing: the callback of a run without one."""

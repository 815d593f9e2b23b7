"""Failures and stops of training: signals, errors on other ranks, rollback, rescue, black box.

The loop itself is in `canter.training.trainer`. It runs inside these blocks:

    with guard.running():                  # errors save the last good state; signals are noted
        while ...:
            with guard.iteration():        # commits the iteration if it succeeds
                with guard.collecting():   # an error on one rank becomes an error on all ranks
                    ...
                with guard.updating():     # so does NaN or infinity
                    ...
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

from canter.core import distributed
from canter.core.specs import EnvFailed, EnvSpec
from canter.core.struct import to_dicts
from canter.envs.failures import EnvironmentFailed, error_chain, place_of, text_of
from canter.runs.ranks import NullRunFolder
from canter.runs.run_folder import RunFolder
from canter.runs.state import TrainState, broadcast_tree
from canter.training.black_box import spec_to_box
from canter.training.episodes import NonFinite, NonFiniteElsewhere, NonFiniteUpdate
from canter.training.progress import Report, RunProgress
from canter.training.rollback import Rollback

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunStopped(KeyboardInterrupt):
    """A signal ended the run early; the training state is saved if the run has a folder."""

    def __init__(self, received: signal.Signals, env_steps: int) -> None:
        super().__init__(f"stopped by {received.name} after {env_steps:,} steps")
        self.received = received


class RunFailed(RuntimeError):
    """An environment or NaN ended the run; the last good state is saved if there is a folder.

    With several ranks all of them raise it.
    """

    def __init__(self, what: str, kept: str, rank: int = 0) -> None:
        super().__init__(f"{what}. {kept}")
        self.what = what
        """Description of the failure."""
        self.kept = kept
        """Description of the saved state."""
        self.rank = rank
        """The rank that it failed on."""


class RankFailed(RuntimeError):
    """An error on one rank, as every rank raises it."""

    def __init__(self, rank: int, what: str, trace: str) -> None:
        super().__init__(what)
        self.rank = rank
        self.trace = trace
        """That rank's traceback."""
        self.where = f"on rank {rank}"


class RankNonFinite(RankFailed, NonFinite):
    """NaN or infinity on one rank, as every rank raises it."""


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; the second ends the program.

    Python delivers signals to the main thread only, so nothing changes in other threads. A shell
    starts a background job with SIGINT ignored; a user who sends it anyway means it, so the second
    one still ends the program.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


@dataclass
class Guard:
    """Keeps the state of a run safe while it trains."""

    state: TrainState
    progress: RunProgress
    rollback: Rollback
    folder: RunFolder | NullRunFolder
    spec: EnvSpec
    write_last_row: Callable[[], None]
    """Writes a row about the iterations that are not in the log yet; called before a rescue."""
    signals: StopSignals = field(default_factory=StopSignals, init=False)
    stop_signal: signal.Signals | None = field(default=None, init=False)
    """The signal that stops the run after this iteration, on whichever rank it arrived."""
    uncommitted: bool = field(default=False, init=False)
    """An iteration was started and is not committed yet."""
    _has_explained_metrics: bool = field(default=False, init=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Save the last good state if the block raises an error, and note stop signals."""
        self.rollback.reset()
        with self.signals:
            self.stop_signal = None
            try:
                yield
            except Exception as error:
                self._rescue(error)
                raise

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Commit the iteration in the block if it succeeds; otherwise `running` rolls back."""
        yield
        self.uncommitted = False
        self.rollback.commit()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Stage the state and run the block; an error on one rank is raised on all ranks."""
        with self._sync_errors(Exception):
            self.rollback.stage(self.progress.fraction)
            self.uncommitted = True
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Run the block; NaN or infinity on one rank is raised on all ranks.

        No other error is: an update has exchanges between ranks, in which the others would wait for
        the failed one.
        """
        with self._sync_errors(NonFinite):
            yield

    @contextmanager
    def _sync_errors(self, kind: type[Exception]) -> Iterator[None]:
        """Run the block on every rank, then raise on all ranks if it raised a `kind` on any.

        Stop signals are exchanged too. Inside the block there must be no exchange between ranks
        that such an error would skip.
        """
        failure: Exception | None = None
        try:
            yield
        except kind as error:
            if distributed.world_size() == 1 or isinstance(error, distributed.RankLost):
                raise
            failure = error
        if self.sync_stop_signal(failure is not None):
            self.uncommitted = True  # on every rank, even if the failed one had not staged anything
            raise first_error_of_ranks(failure) from None

    def sync_stop_signal(self, failed: bool = False) -> bool:
        """Exchange stop signals between ranks, so that all stop after the same iteration.

        Returns whether `failed` is true on any rank.
        """
        number, failures = distributed.largest_each(self.signals.received or 0, failed)
        self.stop_signal = signal.Signals(int(number)) if number else None
        return failures > 0

    def _rescue(self, error: Exception) -> None:
        """Save the last good state and add that to the error; raise RunFailed for failed runs."""
        if distributed.world_size() > 1 and not isinstance(error, RankFailed):
            error.add_note("Training state since the last checkpoint is lost")  # the other ranks have no such error
            return
        if self.uncommitted:
            saved = self._save_last_good(error)
        elif isinstance(error, NonFinite):
            saved = self._save_last_good(error, error.before)  # on a GPU it is found some iterations later
        else:
            tree = {name: part.state_dict() for name, part in self.state.components().items()}
            saved = self.folder.rescue(self.state, tree, error)
        if isinstance(error, EnvironmentFailed | NonFinite | RankFailed):
            rank = error.rank if isinstance(error, RankFailed) else 0
            raise RunFailed(str(error), saved, rank) from error
        error.add_note(saved)

    def _save_last_good(self, error: Exception, good: int | None = None) -> str:
        """Roll back to the state after `good` iterations since the host read last, and save it.

        None means all committed ones. Returns what was saved.
        """
        if good is None:
            good = self.progress.iteration - self.rollback.iteration
        rollout = to_dicts(self.rollback.rollout_after(good))
        tree = self.rollback.restore(good)
        if isinstance(error, NonFinite):
            rank = error.rank if isinstance(error, RankFailed) else None
            self._write_black_box(str(error), tree, rollout, rank)
        self.progress.forget_after(good)
        self.uncommitted = False
        try:
            self.write_last_row()
        except NonFinite as earlier:
            return self._save_last_good(earlier, earlier.before)
        except Exception as failure:  # from a console or writer: no reason to lose the state as well
            if distributed.world_size() > 1:  # the other ranks do not have this error
                raise
            logger.warning("the last row of the log was lost: %s: %s", type(failure).__name__, failure)
        return self.folder.rescue(self.state, tree | {"run": self.progress.state_dict()}, error)

    def check_metrics(self, report: Report) -> None:
        """Write a black box about the run's first nonfinite metric, whose steps were skipped."""
        collector = self.rollback.collector
        good = collector.tracker.unclean
        if good is None:
            self.rollback.mark_read()
            return
        if not self._has_explained_metrics:
            self._has_explained_metrics = True
            names = [name for name, value in report.metrics.items() if not math.isfinite(value)]
            what = f"not finite after iteration {report.iteration}: {', '.join(names[:5]) or 'a metric before that'}"
            unread = len(self.rollback.random)
            steps = collector.steps_before - (unread - good) * collector.algorithm.horizon
            tree = {"collector": {"steps_before": steps}} | self.rollback.state_before_nonfinite_metric(good)
            self._write_black_box(what, tree, to_dicts(self.rollback.rollout_after(good)))
            logger.warning("%s; the optimizer skips such steps. To find the cause: canter explain", what)
        self.rollback.reset()

    def _write_black_box(
        self, what: str, tree: dict[str, Any], rollout: dict[str, Any] | None, rank: int | None = None
    ) -> None:
        """Save the state before the failure and the rollout after it, for `canter explain`.

        `rank` is the one that found it, if all ranks call this.
        """
        about = {
            "what": what,
            "env_spec": spec_to_box(self.spec),
            "progress": float(self.rollback.fraction),
            "rank": distributed.rank(),
            "ranks": distributed.world_size(),
        }
        box = {"about": about, "rollout": rollout} | tree
        if rank is not None:
            box = broadcast_tree(box, rank) or box
        self.folder.black_box(box)


def first_error_of_ranks(error: Exception | None) -> RankFailed:
    """Return the error of the first rank that has one; all ranks must call it together.

    An environment's error comes before what other ranks learned from its data in the same
    iteration.
    """
    messages = distributed.gather_bytes(json.dumps(_error_message(error)).encode())
    errors = [(rank, message) for rank, message in enumerate(map(json.loads, messages)) if message]
    rank, message = min(errors, key=lambda item: (item[1]["from_update"], item[0]))
    if message["before"] is None:
        return RankFailed(rank, message["what"], message["trace"])
    failed = RankNonFinite(rank, message["what"], message["trace"])
    failed.before = message["before"]
    return failed


def _error_message(error: Exception | None) -> dict[str, Any]:
    """Return what the other ranks need to know of an error; {} if it is another rank's."""
    if error is None or isinstance(error, NonFiniteElsewhere):
        return {}
    what = text_of(error)
    if not isinstance(error, EnvFailed | NonFinite):  # their own text says what they are
        what = f"{type(error).__name__}: {what} ({place_of(error)})"
    inner = [trace for link in error_chain(error) if (trace := getattr(link, "trace", ""))]
    return {
        "what": what,
        "trace": "\n".join(["".join(traceback.format_exception(error)), *inner]),
        "before": error.before if isinstance(error, NonFinite) else None,
        "from_update": isinstance(error, NonFiniteUpdate),
    }

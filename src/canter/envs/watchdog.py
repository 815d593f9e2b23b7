"""Notices that something takes too long, from another thread, while that something cannot say so itself."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from canter.envs.contract import row_of

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds after which a line says that an environment takes long."""


class Watchdog:
    """Calls `late(seconds)` once for each `begin` that no other `begin` or `end` followed within `seconds`.

    Announcing costs a reading of the clock; the thread looks every quarter of the time, or second. It begins with the
    first announcement and ends with `close`.
    """

    def __init__(self, seconds: float, late: Callable[[float], None]) -> None:
        self.seconds, self.late = seconds, late
        self._since: float | None = None
        self._told: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Something begins that should not take long."""
        self._since = time.monotonic()
        # What nobody closed is closed when Python ends, where a thread would never start, nor one that runs ever end.
        if self._thread is None and not sys.is_finalizing():
            pause, own = min(self.seconds / 4, 1.0), weakref.ref(self)  # or the thread would keep it for ever
            self._thread = threading.Thread(
                target=_watch, args=(own, self._closed, pause), name="canter-watchdog", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """It is over."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None and not sys.is_finalizing():
            self._thread.join()

    def look(self) -> None:
        """Say so if what began last takes too long."""
        since = self._since
        if since is not None and since != self._told and time.monotonic() - since > self.seconds:
            self._told = since
            self.late(time.monotonic() - since)


def _watch(own: weakref.ref[Watchdog], closed: threading.Event, pause: float) -> None:
    """Look from time to time, until it is closed or nobody has it any more."""
    while not closed.wait(pause):
        watchdog = own()
        if watchdog is None:
            return
        watchdog.look()
        del watchdog


def where_it_hangs(thread: int) -> str:
    """What a thread of this process does now: the number of the environment that is in a call, and `file:line`."""
    names = {t.ident: t.name for t in threading.enumerate()}
    now = sys._current_frames()
    # Where several threads step environments, the one that waits for them tells nothing.
    frames = [frame for ident, frame in now.items() if names.get(ident, "").startswith("canter-env")]
    frames += [now[thread]] if thread in now else []
    rows = {row: frame for frame in reversed(frames) if (row := row_of(frame)) is not None}
    row, frame = next(iter(rows.items()), (None, frames[-1] if frames else None))
    who = "the environment" if row is None else f"environment {row}"
    if frame is None:
        return who
    last = traceback.extract_stack(frame)[-1]
    return f"{who}, in {last.name} ({last.filename}:{last.lineno})"


def warn_of_hanging(thread: int, seconds: float) -> None:
    """Say that a call of an environment has not come back."""
    _log.warning("waiting for %s, which has not come back for %.0f s", where_it_hangs(thread), seconds)


@contextmanager
def watched(seconds: float = math.inf) -> Iterator[Watchdog]:
    """Says so where a call of an environment takes longer, of this thread and from now or the last `begin` on."""
    watchdog = Watchdog(min(PATIENCE, seconds), partial(warn_of_hanging, threading.get_ident()))
    watchdog.begin()
    try:
        yield watchdog
    finally:
        watchdog.close()

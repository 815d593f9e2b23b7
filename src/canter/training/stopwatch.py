"""Where the time of a run goes."""

from __future__ import annotations

import time

PARTS: tuple[str, ...] = ("env", "policy", "update", "other")
"""Stepping environments, choosing actions and recording them, learning, and the rest: logs, console, checkpoints."""


class Stopwatch:
    """Divides the time between readings among the `PARTS`; no moment is counted twice or lost.

    This is the host's time, as asking a GPU when it is done would slow it down. There `env` and `policy` are the time
    it takes to queue the work, and `update`, which ends when its metrics are read, includes the wait for all of it. A
    collection that is replayed as one CUDA graph has no laps of its own, and counts as `update` too.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.last = time.perf_counter()

    def restart(self) -> None:
        """Leave out the time since the last lap."""
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

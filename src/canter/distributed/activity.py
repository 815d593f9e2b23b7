"""What this rank is doing, for whoever has to say later what it did last."""

from __future__ import annotations

import time
from collections.abc import Callable


class Activity:
    """A word on what is being done, since when, and whether that is waiting for other ranks."""

    def __init__(self) -> None:
        self.doing, self.since, self.waits = "starting", time.monotonic(), ""
        self.on_loss: Callable[[], None] | None = None
        """Called where an exchange fails."""

    def begin(self, doing: str) -> None:
        """Something else begins."""
        self.doing, self.since = doing, time.monotonic()

    def begin_waiting(self, what: str) -> None:
        """What comes now needs all ranks; the time of waiting for them is not this one's."""
        self.waits = what

    def end_waiting(self) -> None:
        """All ranks have done their part."""
        self.waits, self.since = "", time.monotonic()

    def in_words(self) -> str:
        """Such as `collecting iteration 7`."""
        return f"{self.doing}, {self.waits} with the other ranks" if self.waits else self.doing


activity = Activity()

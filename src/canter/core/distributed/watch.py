"""What this rank is doing, for whoever has to say later what it did last.

Each rank watches the next one, so that a rank that hangs or has gone is named, with the last thing that it did.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


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


SECONDS = 0.5
"""Between two signs of life."""
TRIES = 6
"""Signs of life that the store may miss before the agent, which keeps it, is taken for dead."""
GRACE = 0.5
"""Seconds in which a rank that has an error of its own may say so before others speak of it."""
EXIT_CODE = 70


class Watch(threading.Thread):
    """Tells the store twice a second what this rank does, and looks at what the next rank tells."""

    def __init__(self, store: Store, rank: int, size: int, attempt: int) -> None:
        super().__init__(name="rank watch", daemon=True)
        self.store, self.rank, self.size, self.attempt = store, rank, size, attempt
        self.timeout = 600.0
        self.ended = threading.Event()
        self.count = 0
        self.seen: tuple[int, float] = (-1, time.monotonic())
        """The last sign of life of the next rank, and when it came."""

    def run(self) -> None:
        """Until `stop`; ends the process where it cannot go on."""
        missed = 0
        while not self.ended.wait(SECONDS):
            try:
                self.beat()
                self.look()
                missed = 0
            except (dist.DistError, RuntimeError):
                missed += 1
                if missed >= TRIES and not self.ended.is_set():
                    self.leave("torchrun's agent does not answer any more, so the ranks of this machine end", None)

    def stop(self) -> None:
        """No more signs of life."""
        self.ended.set()

    def beat(self) -> None:
        """Give a sign of life."""
        self.count += 1
        idle = 0.0 if activity.waits else time.monotonic() - activity.since
        about = {"count": self.count, "doing": activity.in_words(), "busy": idle}
        about |= {"pid": os.getpid(), "host": socket.gethostname()}
        self.store.set(f"beat/{self.attempt}/{self.rank}", json.dumps(about))

    def look(self) -> None:
        """End everything if the next rank hangs; torchrun then restarts all ranks, or gives up."""
        other = (self.rank + 1) % self.size
        about = self.about(other)
        if other == self.rank or about is None:
            return
        now = time.monotonic()
        if about["count"] != self.seen[0]:
            self.seen = (about["count"], now)
        silent, busy = now - self.seen[1], about["busy"]
        if silent > self.timeout or busy > self.timeout:
            manner = "has given no sign of life" if silent > self.timeout else "has kept the others waiting"
            limit = f"execution.rank_timeout={self.timeout:g}"
            text = f"{who(other, about)} {manner} for {max(silent, busy):.0f} s ({limit}); it was {about['doing']}"
            self.leave(text, about)

    def about(self, rank: int) -> dict[str, Any] | None:
        """What a rank told last."""
        key = f"beat/{self.attempt}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def leave(self, text: str, hung: dict[str, Any] | None) -> None:
        """Say why, and end this process, and the hanging one, which would not hear torchrun's signal."""
        if hung is None or self.is_first_report(text):
            print(f"canter: {text}", file=sys.stderr, flush=True)
        if hung is not None and hung["host"] == socket.gethostname():
            os.kill(hung["pid"], signal.SIGKILL)
        os._exit(EXIT_CODE)

    def is_first_report(self, text: str) -> bool:
        """Whether nobody has reported an error in this attempt, nor this very one before."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            return self.store.add(f"errors/{self.attempt}", 1) == 1 and self.store.add(f"said/{digest}", 1) == 1
        except (dist.DistError, RuntimeError):
            return True  # nobody is left to ask

    def report_loss(self) -> None:
        """Say which rank has gone, unless one has said already why."""
        time.sleep(GRACE)
        try:
            gone = {rank: about for rank in range(self.size) if (about := self.about(rank)) and is_gone(about)}
        except (dist.DistError, RuntimeError):
            gone = {}
        texts = [f"{who(rank, about)} has gone; it was {about['doing']}" for rank, about in gone.items()]
        text = "; ".join(texts) or "the connection to another rank is lost"
        if self.is_first_report(text):
            print(f"canter: {text}", file=sys.stderr, flush=True)


def who(rank: int, about: dict[str, Any]) -> str:
    """Such as `rank 3 (process 1234 on node7)`."""
    return f"rank {rank} (process {about['pid']} on {about['host']})"


def is_gone(about: dict[str, Any]) -> bool:
    """Whether a rank of this machine has ended."""
    if about["host"] != socket.gethostname():
        return False
    try:
        return Path(f"/proc/{about['pid']}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

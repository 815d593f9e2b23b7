"""Detection of ranks that hang or have ended.

Each rank records its current activity and watches the next rank, so that an error message can name
the rank at fault and its last activity.
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
    """The current activity of this rank, its start, and whether it waits for other ranks."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.since = time.monotonic()
        self.waits = ""
        """Exchange that this rank waits for; empty if none."""
        self.on_loss: Callable[[], None] | None = None
        """Called if an exchange fails."""

    def begin(self, doing: str) -> None:
        """Record that another activity begins."""
        self.doing = doing
        self.since = time.monotonic()

    def begin_waiting(self, what: str) -> None:
        """Record that an exchange begins; waiting for other ranks is not counted as being busy."""
        self.waits = what

    def end_waiting(self) -> None:
        """Record that the exchange is complete."""
        self.waits = ""
        self.since = time.monotonic()

    def describe(self) -> str:
        """Return a text such as `collecting iteration 7`."""
        return f"{self.doing}, {self.waits} with the other ranks" if self.waits else self.doing


activity = Activity()


SECONDS = 0.5
"""Interval of heartbeats."""
TRIES = 6
"""Failed heartbeats in a row after which torchrun's agent, which keeps the store, counts as
dead."""
GRACE = 0.5
"""Seconds in which a rank with an error can report it before other ranks report its loss."""
EXIT_CODE = 70


class Watch(threading.Thread):
    """Writes this rank's heartbeat to the store twice a second, and checks the next rank's."""

    def __init__(self, store: Store, rank: int, size: int, attempt: int) -> None:
        super().__init__(name="rank watch", daemon=True)
        self.store = store
        self.rank = rank
        self.size = size
        self.attempt = attempt
        self.timeout = 600.0
        self.stopped = threading.Event()
        self.count = 0
        self.last_seen: tuple[int, float] = (-1, time.monotonic())
        """Number and time of the last heartbeat of the next rank."""

    def run(self) -> None:
        """Run until `stop`; end the process if the next rank hangs or the store is lost."""
        missed = 0
        while not self.stopped.wait(SECONDS):
            try:
                self.beat()
                self.check_next_rank()
                missed = 0
            except (dist.DistError, RuntimeError):
                missed += 1
                if missed >= TRIES and not self.stopped.is_set():
                    self.exit_process(
                        "torchrun's agent does not answer any more, so the ranks of this machine end", None
                    )

    def stop(self) -> None:
        """Stop the heartbeats."""
        self.stopped.set()

    def beat(self) -> None:
        """Write a heartbeat."""
        self.count += 1
        busy = 0.0 if activity.waits else time.monotonic() - activity.since
        heartbeat = {
            "count": self.count,
            "doing": activity.describe(),
            "busy": busy,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self.store.set(f"beat/{self.attempt}/{self.rank}", json.dumps(heartbeat))

    def check_next_rank(self) -> None:
        """End this process if the next rank hangs; torchrun then restarts all ranks or gives up."""
        other = (self.rank + 1) % self.size
        heartbeat = self.read_heartbeat(other)
        if other == self.rank or heartbeat is None:
            return
        now = time.monotonic()
        if heartbeat["count"] != self.last_seen[0]:
            self.last_seen = (heartbeat["count"], now)
        silent = now - self.last_seen[1]
        busy = heartbeat["busy"]
        if silent > self.timeout or busy > self.timeout:
            manner = "has given no sign of life" if silent > self.timeout else "has kept the others waiting"
            limit = f"execution.rank_timeout={self.timeout:g}"
            place = format_rank(other, heartbeat)
            text = f"{place} {manner} for {max(silent, busy):.0f} s ({limit}); it was {heartbeat['doing']}"
            self.exit_process(text, heartbeat)

    def read_heartbeat(self, rank: int) -> dict[str, Any] | None:
        """Return the last heartbeat of a rank, or None."""
        key = f"beat/{self.attempt}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def exit_process(self, text: str, hung: dict[str, Any] | None) -> None:
        """Print the reason; end this process and the hanging one, if it is on this machine.

        The hanging one would not react to torchrun's signal.
        """
        if hung is None or self.is_first_report(text):
            print(f"canter: {text}", file=sys.stderr, flush=True)
        if hung is not None and hung["host"] == socket.gethostname():
            os.kill(hung["pid"], signal.SIGKILL)
        os._exit(EXIT_CODE)

    def is_first_report(self, text: str) -> bool:
        """Return whether this is the first error of this attempt, and its text is new."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            is_first = self.store.add(f"errors/{self.attempt}", 1) == 1
            return is_first and self.store.add(f"said/{digest}", 1) == 1
        except (dist.DistError, RuntimeError):
            return True  # the store is lost, so no other rank can report it

    def report_loss(self) -> None:
        """Print which ranks have ended, unless one has reported an error itself."""
        time.sleep(GRACE)
        try:
            heartbeats = {rank: self.read_heartbeat(rank) for rank in range(self.size)}
        except (dist.DistError, RuntimeError):
            heartbeats = {}
        texts = [
            f"{format_rank(rank, heartbeat)} has gone; it was {heartbeat['doing']}"
            for rank, heartbeat in heartbeats.items()
            if heartbeat and has_ended(heartbeat)
        ]
        text = "; ".join(texts) or "the connection to another rank is lost"
        if self.is_first_report(text):
            print(f"canter: {text}", file=sys.stderr, flush=True)


def format_rank(rank: int, heartbeat: dict[str, Any]) -> str:
    """Return a text such as `rank 3 (process 1234 on node7)`."""
    return f"rank {rank} (process {heartbeat['pid']} on {heartbeat['host']})"


def has_ended(heartbeat: dict[str, Any]) -> bool:
    """Return whether a rank's process has ended; False for processes of other machines."""
    if heartbeat["host"] != socket.gethostname():
        return False
    try:
        os.kill(heartbeat["pid"], 0)
        state = Path(f"/proc/{heartbeat['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # only Linux has /proc, which also tells a process that nobody has waited for
        return False
    return state in "ZX"

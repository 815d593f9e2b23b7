"""What the operating system is told about the threads of a rank: on which cores they run, and whom they interrupt.

Starting and ending the group of ranks that torchrun launched, and what ranks tell each other beside it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from canter.core import distributed
from canter.core.distributed.shared_memory import share_memory
from canter.core.distributed.watch import Watch, activity
from canter.core.registry import UserError


def pin_cores(notes: Store) -> set[int]:
    """Keep this thread, and those it starts, to a part of the cores that all ranks of this machine were given.

    A rank's threads then never wait for those of another rank. Ranks that were started with different cores keep them.
    Gives the cores from before, none where the system does not let them be chosen.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    rank, local, count = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    given = " ".join(map(str, sorted(before)))
    notes.set(f"cores/{rank}", given)
    if all(notes.get(f"cores/{rank - local + place}").decode() == given for place in range(count)) and count > 1:
        each = max(1, len(before) // count)
        start = local * each % len(before)  # where there are more ranks than cores, some have the same
        try:
            os.sched_setaffinity(0, sorted(before)[start : start + each])
        except OSError:  # a container may forbid it
            return set()
    return before


@contextmanager
def batch_scheduling() -> Iterator[None]:
    """Threads that are started meanwhile do not interrupt another one when they wake up, where the system has a way.

    gloo's thread for sockets tries again and again to get the lock of a connection. If it has pushed the thread that
    has the lock off their core, it goes on so until the next tick of the scheduler: 4 ms for an exchange of 0.3 ms.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process."""
START_TIMEOUT = timedelta(seconds=300)
NEVER = timedelta(days=7)
"""Time-out of torch's own exchanges: who keeps others waiting is found, and named, by `Watch`."""


class World:
    """The ranks of this run; there are none until `start` finds that torchrun launched this process."""

    def __init__(self) -> None:
        self.notes: Store | None = None
        """What outlives ranks: torchrun keeps it while it restarts them."""
        self.watch: Watch | None = None
        self.attempt = 0
        """How often torchrun has restarted the ranks."""
        self.joined = 0
        """How many groups this process has been in: one for each `Trainer` after another."""
        self.cores_before: set[int] = set()
        """Those of this process outside the group."""

    def start(self) -> bool:
        """Join the group of ranks, if there is one to join; False where there is none, or it was joined before."""
        if distributed.active() or not dist.is_available() or any(name not in os.environ for name in VARIABLES):
            return False
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        prefix = f"canter/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        self.notes = PrefixStore(prefix, _connect(server=rank == 0))
        self.joined += 1  # a later group of the same processes must not find what the first one left there
        here = PrefixStore(f"group/{self.attempt}/{self.joined}", self.notes)
        # The watch has a connection of its own: the first may be kept busy by a group that is being made.
        self.watch = Watch(PrefixStore(prefix, _connect(server=False)), rank, size, self.attempt)
        self.watch.beat()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        self.cores_before = pin_cores(here)
        with batch_scheduling():
            dist.init_process_group(backend, store=here, rank=rank, world_size=size, timeout=NEVER)
        distributed.shared = share_memory(here, distributed.largest)
        activity.on_loss = self._tell_loss
        self.watch.start()
        return True

    def end(self) -> None:
        """Leave the group, once all ranks do."""
        if self.watch is None or not distributed.active():
            return
        activity.begin("ending")
        distributed.largest(0.0)
        self.watch.stop()
        activity.on_loss = None
        if distributed.shared is not None:
            distributed.shared.close()
            distributed.shared = None
        dist.destroy_process_group()
        if self.cores_before:
            os.sched_setaffinity(0, self.cores_before)

    def end_except_first(self) -> bool:
        """Leave the group; whether this process is the one that goes on with what is left to do."""
        first = distributed.rank() == 0
        self.end()
        return first

    def limit(self, seconds: float) -> None:
        """From now on a rank may keep the others waiting for so long."""
        if self.watch is not None:
            self.watch.timeout = seconds

    def is_first_report(self, text: str) -> bool:
        """Whether no other rank has reported an error before, nor this very one in an earlier attempt."""
        return self.watch is None or self.watch.is_first_report(text)

    def keep(self, name: str, value: str) -> None:
        """Note something for a later attempt of the same run."""
        if self.notes is not None and distributed.rank() == 0:
            self.notes.set(name, value)

    def kept(self, name: str) -> str | None:
        """What an earlier attempt has noted."""
        if self.notes is None or self.attempt == 0 or not self.notes.check([name]):
            return None
        return self.notes.get(name).decode()

    def _tell_loss(self) -> None:
        """Say which rank has gone, unless it said why itself."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is about to end all ranks; first say why
        if self.watch is not None:
            self.watch.stop()
            self.watch.report_loss()


def _connect(server: bool) -> TCPStore:
    """The store of torchrun's agent or, without one, of rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = server and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != str(True)
    try:
        return TCPStore(address, port, is_master=server, timeout=START_TIMEOUT, wait_for_workers=False)
    except dist.DistError as error:
        what = "is in use" if "EADDRINUSE" in str(error) else "does not answer"
        text = f"MASTER_PORT={port} at MASTER_ADDR={address} {what}; choose another port for the ranks"
        raise UserError(text) from error


def require_equal_on_ranks(what: dict[str, str]) -> None:
    """Refuse to go on where ranks have different settings or versions; names the first that differs."""
    told = [json.loads(data) for data in distributed.gather_bytes(json.dumps(what).encode())]
    for other, theirs in enumerate(told):
        for key in {**told[0], **theirs}:
            ours, other_value = told[0].get(key, "(absent)"), theirs.get(key, "(absent)")
            if ours != other_value:
                raise UserError(
                    f"ranks differ: {key} is {ours} on rank 0 and {other_value} on rank {other}; start all with the "
                    "same command, in the same environment"
                )


def broadcast_value(value: Any) -> Any:
    """Rank 0's plain value, on every rank."""
    return json.loads(distributed.broadcast_bytes(json.dumps(value).encode()))


world = World()

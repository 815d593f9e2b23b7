"""The group of ranks that torchrun launched: joining, leaving, and settings of its threads."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from canter.core import distributed
from canter.core.distributed.shared_memory import share_memory
from canter.core.distributed.watch import SECONDS, TRIES, Watch, activity
from canter.core.registry import UserError


def pin_cores(store: Store) -> set[int]:
    """Pin this thread, and those it starts, to this rank's part of the cores of the machine.

    The threads of one rank then never wait for those of another. Ranks that were started with
    different cores keep them. Returns the previous cores, empty if the system cannot pin threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    rank = int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    own = " ".join(map(str, sorted(before)))
    store.set(f"cores/{rank}", own)
    if all(store.get(f"cores/{rank - local + index}").decode() == own for index in range(count)) and count > 1:
        each = max(1, len(before) // count)
        start = local * each % len(before)  # with more ranks than cores, some ranks share a core
        try:
            os.sched_setaffinity(0, sorted(before)[start : start + each])
        except OSError:  # a container may forbid it
            return set()
    return before


@contextmanager
def batch_scheduling() -> Iterator[None]:
    """Start threads in the block under SCHED_BATCH, which does not preempt others.

    gloo's socket thread spins on the lock of a connection. If it has preempted the thread that
    holds the lock, it spins until the next scheduler tick: 4 ms for an exchange of 0.3 ms.
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
"""Environment variables that torchrun sets for each process."""
START_TIMEOUT = timedelta(seconds=300)
NEVER = timedelta(days=7)
"""Time-out of torch's own exchanges; `Watch` detects and names a rank that hangs."""


class World:
    """The ranks of this run; none before `start`, or without torchrun."""

    def __init__(self) -> None:
        self.store: Store | None = None
        """torchrun's key-value store, which outlives restarts of the ranks."""
        self.watch: Watch | None = None
        self.attempt = 0
        """Number of times that torchrun has restarted the ranks."""
        self.joined = 0
        """Number of groups that this process has joined, one per `Trainer`."""
        self.cores_before: set[int] = set()
        """Cores of this process before it joined the group."""

    def start(self) -> bool:
        """Join the group of ranks; return False if there is none, or it has been joined before."""
        if distributed.active() or not dist.is_available() or any(name not in os.environ for name in VARIABLES):
            return False
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        prefix = f"canter/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        self.store = PrefixStore(prefix, _connect(server=rank == 0))
        self.joined += 1  # part of the prefix, so that a later group does not read keys of an earlier one
        group = PrefixStore(f"group/{self.attempt}/{self.joined}", self.store)
        # The watch has its own connection, because creating the group may block the first one.
        self.watch = Watch(PrefixStore(prefix, _connect(server=False)), rank, size, self.attempt)
        self.watch.beat()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        self.cores_before = pin_cores(group)
        self.watch.start()  # before the first exchange, in which torchrun's agent may die
        with batch_scheduling():
            dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=NEVER)
        distributed.shared = share_memory(group, distributed.largest)
        activity.on_loss = self._report_loss
        return True

    def end(self) -> None:
        """Leave the group; all ranks must call it."""
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
        """Leave the group; return whether this process, rank 0, does the remaining work alone."""
        first = distributed.rank() == 0
        self.end()
        return first

    def set_timeout(self, seconds: float) -> None:
        """Set the time for which a rank may keep the others waiting."""
        if self.watch is not None:
            self.watch.timeout = seconds

    def is_first_report(self, text: str) -> bool:
        """Return whether this is the first report of an error; see `Watch.is_first_report`."""
        return self.watch is None or self.watch.is_first_report(text)

    def store_value(self, name: str, value: str) -> None:
        """Store a value for a later attempt of the same run; only rank 0 does."""
        if self.store is not None and distributed.rank() == 0:
            self.store.set(name, value)

    def load_value(self, name: str) -> str | None:
        """Return a value stored by an earlier attempt, or None."""
        if self.store is None or self.attempt == 0 or not self.store.check([name]):
            return None
        return self.store.get(name).decode()

    def _report_loss(self) -> None:
        """Report which rank has ended, unless it reported its error itself."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is about to end all ranks; report first
        if self.watch is not None:
            self.watch.stop()
            self.watch.report_loss()


def _connect(server: bool) -> TCPStore:
    """Connect to the store of torchrun's agent or, without one, of rank 0."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == str(True):
        _require_agent(address, port)
        server = False
    try:
        return TCPStore(address, port, is_master=server, timeout=START_TIMEOUT, wait_for_workers=False)
    except dist.DistError as error:
        what = "is in use" if "EADDRINUSE" in str(error) else "does not answer"
        text = f"MASTER_PORT={port} at MASTER_ADDR={address} {what}; choose another port for the ranks"
        raise UserError(text) from error


def _require_agent(address: str, port: int) -> None:
    """Raise UserError if torchrun's agent, which started this rank and keeps the store, has ended.

    `TCPStore` would wait for it until `START_TIMEOUT`, and say so in pages.
    """
    for _ in range(TRIES):
        try:
            socket.create_connection((address, port), START_TIMEOUT.total_seconds()).close()
        except ConnectionRefusedError:
            time.sleep(SECONDS)
        except OSError:  # no network or no such address, which `TCPStore` reports
            return
        else:
            return
    raise UserError(
        f"torchrun's agent at MASTER_ADDR={address}, MASTER_PORT={port} has ended, so this rank ends; "
        "start torchrun again"
    )


def require_equal_on_ranks(values: dict[str, str]) -> None:
    """Raise UserError at the first setting or version that differs between ranks."""
    of_ranks = [json.loads(data) for data in distributed.gather_bytes(json.dumps(values).encode())]
    first = of_ranks[0]
    for other, theirs in enumerate(of_ranks):
        for key in {**first, **theirs}:
            first_value = first.get(key, "(absent)")
            other_value = theirs.get(key, "(absent)")
            if first_value != other_value:
                raise UserError(
                    f"ranks differ: {key} is {first_value} on rank 0 and {other_value} on rank {other}; "
                    "start all with the same command, in the same environment"
                )


def broadcast_value(value: Any) -> Any:
    """Return rank 0's plain value on every rank."""
    return json.loads(distributed.broadcast_bytes(json.dumps(value).encode()))


world = World()

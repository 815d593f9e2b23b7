"""What the operating system is told about the threads of a rank: on which cores they run, and whom they interrupt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


def share_cores(notes: Store) -> set[int]:
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
def patient_threads() -> Iterator[None]:
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

"""Sums over the ranks of one machine, by way of memory that they share.

gloo hands numbers to threads and sockets, which takes as long as a small minibatch. Here each rank writes its numbers
to a place of its own, sends the others a byte, and adds up what all have written: in the same order everywhere, so to
the same bits.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

BYTES = 1 << 20
"""What a rank writes at once; longer tensors go in pieces."""
EAGER = 0.002
"""Seconds of asking again and again before a rank lets itself be woken up, which takes as long as an exchange."""
SMALLEST = 1e-12
"""What a mean without any weight is divided by."""
QUICK = "/dev/shm"
"""Where files are memory, on Linux."""


class SharedMemory:
    """Places for the numbers of every rank, and a connection to each of the others.

    There are two places for each, used in turn: a rank that is done with an exchange may write for the next one while
    others still read. It cannot be two ahead, for it hears from all in between.

    Tensors are on the CPU and contiguous. Where another rank is not there any more, there is a `RuntimeError`.
    """

    def __init__(self, file: Path, rank: int, size: int, *, eager: bool) -> None:
        self.rank, self.size, self.turn = rank, size, 0
        self.eager = EAGER if eager else 0.0
        self.others: list[socket.socket] = []
        self.views: dict[tuple[int, np.dtype, int], list[np.ndarray]] = {}
        with file.open("r+b") as opened:
            memory = mmap.mmap(opened.fileno(), 2 * size * BYTES)
        self.places = np.frombuffer(memory, np.uint8).reshape(2, size, BYTES)
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(str(file.parent / str(rank)))
        self.door.listen(size)

    def connect(self, folder: Path) -> None:
        """Find the other ranks, all of which have bound their address in the folder."""
        found: dict[int, socket.socket] = {}
        for lower in range(self.rank):
            found[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found[lower].connect(str(folder / str(lower)))
            found[lower].sendall(self.rank.to_bytes(2))
        for _ in range(self.rank + 1, self.size):
            connection, _ = self.door.accept()
            found[int.from_bytes(connection.recv(2, socket.MSG_WAITALL))] = connection
        self.door.close()
        self.others = list(found.values())

    @np.errstate(all="ignore")  # who gets a NaN finds it, as with torch's own exchange
    def sum_(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        array = tensor.detach().numpy().reshape(-1)
        most = BYTES // array.itemsize
        for start in range(0, max(array.size, 1), most):
            piece = array[start : start + most]
            parts = self._parts(piece.dtype, piece.size)
            parts[self.rank][:] = piece
            self._add(parts, piece)

    @np.errstate(all="ignore")
    def weighted_mean_(self, tensors: list[Tensor], weight: Tensor) -> None:
        """Mean over ranks of each of some tensors of one dtype, in place; a rank counts by its 0-d `weight`."""
        arrays, own = [tensor.detach().numpy().reshape(-1) for tensor in tensors], weight.item()
        ends = list(accumulate(array.size for array in arrays))
        parts, flat = self._parts(arrays[0].dtype, ends[-1] + 1), np.empty(ends[-1] + 1, arrays[0].dtype)
        mine = parts[self.rank]
        mine[-1] = own
        for array, end in zip(arrays, ends, strict=True):
            np.multiply(array, own, out=mine[end - array.size : end])
        self._add(parts, flat)
        total = max(flat[-1], SMALLEST)
        for array, end in zip(arrays, ends, strict=True):
            np.divide(flat[end - array.size : end], total, out=array)

    def _parts(self, dtype: np.dtype, count: int) -> list[np.ndarray]:
        """The places of all ranks for the next exchange, as so many numbers."""
        self.turn = 1 - self.turn
        key = self.turn, dtype, count
        if key not in self.views:
            self.views[key] = [place[: count * dtype.itemsize].view(dtype) for place in self.places[self.turn]]
        return self.views[key]

    def _add(self, parts: list[np.ndarray], out: np.ndarray) -> None:
        """The sum of all parts, once every rank has written its own."""
        try:
            for other in self.others:
                other.send(b"\0")
            for other in self.others:
                self._hear(other)
        except OSError as error:
            raise RuntimeError(f"the connection to another rank is lost: {error}") from error
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part

    def _hear(self, other: socket.socket) -> None:
        """Wait for the byte of another rank."""
        until, byte = time.perf_counter() + self.eager, None
        while byte is None and time.perf_counter() < until:
            with suppress(BlockingIOError):
                byte = other.recv(1, socket.MSG_DONTWAIT)
        if (other.recv(1) if byte is None else byte) == b"":
            raise ConnectionResetError("it has ended")

    def close(self) -> None:
        """Leave the others."""
        for connection in self.others:
            connection.close()


def share_memory(store: Store, largest: Callable[[float], float]) -> SharedMemory | None:
    """Memory of all ranks, where one Linux machine has them all and can give it; otherwise None, on every rank.

    `largest` gives the largest of the ranks' numbers; `scheduling.pin_cores` has told the store each rank's cores.
    Nothing of it stays in the file system, unless a rank is killed meanwhile.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1 or os.environ.get("LOCAL_WORLD_SIZE") != str(size) or not hasattr(os, "sched_setaffinity"):
        return None
    cores = {core for place in range(size) for core in store.get(f"cores/{place}").split()}
    if rank == 0:
        store.set("memory", _make_file(2 * size * BYTES))
    file, made = Path(store.get("memory").decode()), None
    with suppress(OSError):
        made = SharedMemory(file, rank, size, eager=size <= len(cores))
    usable = largest(float(made is None)) == 0
    if made is not None and usable:
        made.connect(file.parent)
    largest(0.0)  # all have connected
    if rank == 0:
        shutil.rmtree(file.parent, ignore_errors=True)
    return made if usable else None


def _make_file(size: int) -> str:
    """Its path, in a folder that only this user can open; where there is no room for it, one that is not there."""
    folder = Path(tempfile.mkdtemp(prefix="canter-", dir=QUICK if os.access(QUICK, os.W_OK) else None))
    with suppress(OSError), (folder / "memory").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a file in memory that cannot grow would kill whoever writes to it
        return str(file.name)
    return str(folder / "nothing")

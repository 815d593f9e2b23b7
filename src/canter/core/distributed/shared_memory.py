"""Sums over the ranks of one machine through shared memory.

gloo passes tensors through threads and sockets, which takes as long as a small minibatch. Here each
rank writes its numbers to its own buffer, sends the other ranks a byte, and adds up all buffers: in
the same order on every rank, so the bits are equal.
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
"""Size of a buffer; longer tensors are exchanged in pieces."""
EAGER = 0.002
"""Seconds of busy waiting before a blocking read, whose wake-up takes as long as an exchange."""
SMALLEST = 1e-12
"""Lower bound of the divisor of a mean, for the case that all weights are zero."""
QUICK = "/dev/shm"
"""Folder of files in memory, on Linux."""


class SharedMemory:
    """Buffers for the numbers of every rank, and a connection to each other rank.

    Every rank has two buffers, used in turn: a rank that has finished an exchange may write the
    next one while others still read. It cannot be two exchanges ahead, because each one waits for
    all.

    Tensors are on the CPU and contiguous. Methods raise RuntimeError if another rank has ended.
    """

    def __init__(self, file: Path, rank: int, size: int, *, eager: bool) -> None:
        self.rank = rank
        self.size = size
        self.turn = 0
        """Buffer of the current exchange, 0 or 1."""
        self.eager = EAGER if eager else 0.0
        self.others: list[socket.socket] = []
        self.views: dict[tuple[int, np.dtype, int], list[np.ndarray]] = {}
        with file.open("r+b") as opened:
            memory = mmap.mmap(opened.fileno(), 2 * size * BYTES)
        self.buffers = np.frombuffer(memory, np.uint8).reshape(2, size, BYTES)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(file.parent / str(rank)))
        self.listener.listen(size)

    def connect(self, folder: Path) -> None:
        """Connect to the other ranks, which have all bound their addresses in the folder."""
        connections: dict[int, socket.socket] = {}
        for lower in range(self.rank):
            connections[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connections[lower].connect(str(folder / str(lower)))
            connections[lower].sendall(self.rank.to_bytes(2))
        for _ in range(self.rank + 1, self.size):
            connection, _ = self.listener.accept()
            higher = int.from_bytes(connection.recv(2, socket.MSG_WAITALL))
            connections[higher] = connection
        self.listener.close()
        self.others = list(connections.values())

    @np.errstate(all="ignore")  # NaN and infinity are detected later, as with torch's own exchange
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
        """Replace tensors of one dtype by their means over ranks, weighted by 0-d `weight`."""
        arrays = [tensor.detach().numpy().reshape(-1) for tensor in tensors]
        own_weight = weight.item()
        ends = list(accumulate(array.size for array in arrays))
        count = ends[-1] + 1
        parts = self._parts(arrays[0].dtype, count)
        flat = np.empty(count, arrays[0].dtype)
        own = parts[self.rank]
        own[-1] = own_weight
        for array, end in zip(arrays, ends, strict=True):
            np.multiply(array, own_weight, out=own[end - array.size : end])
        self._add(parts, flat)
        total = max(flat[-1], SMALLEST)
        for array, end in zip(arrays, ends, strict=True):
            np.divide(flat[end - array.size : end], total, out=array)

    def _parts(self, dtype: np.dtype, count: int) -> list[np.ndarray]:
        """Return the buffers of all ranks for the next exchange, as arrays of `count` numbers."""
        self.turn = 1 - self.turn
        key = self.turn, dtype, count
        if key not in self.views:
            self.views[key] = [buffer[: count * dtype.itemsize].view(dtype) for buffer in self.buffers[self.turn]]
        return self.views[key]

    def _add(self, parts: list[np.ndarray], out: np.ndarray) -> None:
        """Write the sum of all parts to `out` once every rank has written its part."""
        try:
            for other in self.others:
                other.send(b"\0")
            for other in self.others:
                self._wait_for(other)
        except OSError as error:
            raise RuntimeError(f"the connection to another rank is lost: {error}") from error
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part

    def _wait_for(self, other: socket.socket) -> None:
        """Wait for the byte of another rank."""
        deadline = time.perf_counter() + self.eager
        byte = None
        while byte is None and time.perf_counter() < deadline:
            with suppress(BlockingIOError):
                byte = other.recv(1, socket.MSG_DONTWAIT)
        if byte is None:
            byte = other.recv(1)
        if byte == b"":
            raise ConnectionResetError("it has ended")

    def close(self) -> None:
        """Close the connections."""
        for connection in self.others:
            connection.close()


def share_memory(store: Store, largest: Callable[[float], float]) -> SharedMemory | None:
    """Return memory that all ranks share, or None on every rank.

    It needs Linux, and all ranks on one machine. `largest` returns the maximum over ranks;
    `world.pin_cores` has put each rank's cores into the store. The file is removed once all ranks
    are connected, so it stays only if a rank is killed.
    """
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    if size == 1 or os.environ.get("LOCAL_WORLD_SIZE") != str(size) or not hasattr(os, "sched_setaffinity"):
        return None
    cores = {core for index in range(size) for core in store.get(f"cores/{index}").split()}
    if rank == 0:
        store.set("memory", _make_file(2 * size * BYTES))
    file = Path(store.get("memory").decode())
    memory = None
    with suppress(OSError):
        memory = SharedMemory(file, rank, size, eager=size <= len(cores))
    usable = largest(float(memory is None)) == 0
    if memory is not None and usable:
        memory.connect(file.parent)
    largest(0.0)  # wait until all have connected
    if rank == 0:
        shutil.rmtree(file.parent, ignore_errors=True)
    return memory if usable else None


def _make_file(size: int) -> str:
    """Create a file in a private folder; return a path without a file if that fails."""
    folder = Path(tempfile.mkdtemp(prefix="canter-", dir=QUICK if os.access(QUICK, os.W_OK) else None))
    with suppress(OSError), (folder / "memory").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # without it, a process that writes to a full memory would be killed
        return str(file.name)
    return str(folder / "nothing")

"""Ranks of one run, and the cores of this one. In a world of one reductions do nothing, so callers never ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canter.core.distributed.shared_memory import BYTES, SMALLEST, SharedMemory
from canter.core.distributed.watch import activity
from canter.core.registry import UserError

NUMBERS = {torch.float32, torch.float64, torch.int64}
shared: SharedMemory | None = None
"""What sums of numbers on the host go through where one machine has all ranks; else torch's group."""


class RankLost(RuntimeError):
    """Another rank has gone, so nothing can be exchanged any more; whoever knows why says so."""


def cores() -> int:
    """How many cores this process may use; the ranks of a machine share what it has (`scheduling.pin_cores`)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def active() -> bool:
    """Whether there is a group of ranks; it may have one only."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if active() else 1


def rank() -> int:
    """This process's number, 0 for the one that talks and saves."""
    return dist.get_rank() if active() else 0


def share(total: int, key: str) -> int:
    """How many of `total` fall to each rank; refuses, by the setting's `key`, a number that cannot be shared."""
    ranks = world_size()
    if total % ranks:
        near = [n for n in (total // ranks * ranks, -(-total // ranks) * ranks) if n]
        raise UserError(
            f"{key}={total} is the number over all ranks and cannot be shared by {ranks}; "
            f"use {key}={' or '.join(map(str, near))}"
        )
    return total // ranks


def rank_slice(rows: int) -> slice:
    """Where the `rows` of this rank are among those of all ranks."""
    return slice(rank() * rows, (rank() + 1) * rows)


def rank_device(device: str) -> str:
    """The device of this rank: "cuda" is that of its number on its machine."""
    if device != "cuda" or not active():
        return device
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise UserError(
            f"device: rank {rank()} needs cuda:{local}, but torch finds {count} CUDA devices there; start at most "
            f"{count} ranks on a machine, or use cpu"
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def exchange(what: str, collective: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Run a collective, which all ranks take part in; raises `RankLost` where one is not there any more."""
    activity.begin_waiting(what)
    try:
        collective(*args, **how)
    except RuntimeError as error:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if activity.on_loss is not None and not capturing:
            activity.on_loss()
        raise RankLost(f"while {what}: {str(error).splitlines()[0]}") from error
    finally:
        activity.end_waiting()


def sum_(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if active():
        exchange("adding up", shared.sum_ if shared is not None and _plain(tensor) else dist.all_reduce, tensor)
    return tensor


def _plain(tensor: Tensor) -> bool:
    """Whether its numbers may be exchanged through memory; the answer is the same on all ranks."""
    return tensor.is_cpu and tensor.dtype in NUMBERS and tensor.is_contiguous()


def weighted_mean_(tensors: list[Tensor], weight: Tensor) -> None:
    """Mean over ranks of each of some tensors of one dtype, in place; a rank counts by its 0-d `weight`.

    One exchange for all of them, after which every rank has the same numbers.
    """
    if not active():
        return
    size = sum(tensor.numel() for tensor in tensors) + 1
    if shared is not None and all(map(_plain, tensors)) and size * tensors[0].element_size() <= BYTES:
        exchange("adding up", shared.weighted_mean_, tensors, weight)
        return
    parts = [tensor.reshape(-1) for tensor in tensors]
    flat = torch.cat([*parts, weight.to(parts[0]).view(1)])
    flat[:-1].mul_(weight)
    total = sum_(flat)[-1].clamp(min=SMALLEST)
    for tensor, added in zip(tensors, flat[:-1].split([tensor.numel() for tensor in tensors]), strict=True):
        torch.div(added.view(tensor.shape), total, out=tensor)


def max_(tensor: Tensor) -> Tensor:
    """Largest over ranks, in place."""
    if active():
        exchange("comparing", dist.all_reduce, tensor, dist.ReduceOp.MAX)
    return tensor


def mean(tensor: Tensor) -> Tensor:
    """Mean over ranks; in a world of one the tensor itself."""
    return sum_(tensor.clone()).div_(world_size()) if active() else tensor


def largest(number: float) -> float:
    """The largest of the ranks' numbers on the host."""
    return largest_each(number)[0]


def largest_each(*numbers: float) -> list[float]:
    """The largest of the ranks' numbers on the host, of each; one exchange for all."""
    return max_(torch.tensor(numbers, dtype=torch.float64)).tolist() if active() else list(numbers)


def broadcast_(tensor: Tensor, source: int = 0) -> Tensor:
    """One rank's value on every rank, in place."""
    if active():
        exchange(f"hearing from rank {source}", dist.broadcast, tensor, src=source)
    return tensor


def all_gather(rows: Tensor) -> Tensor:
    """Rows `[n, ...]` of all ranks one after the other, on the CPU of each; how many may differ."""
    if not active():
        return rows
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    exchange("counting rows", dist.all_gather, counts, torch.tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = torch.cat([rows, rows.new_zeros((most - len(rows), *rows.shape[1:]))])
    parts = [torch.empty_like(padded) for _ in counts]
    exchange("gathering rows", dist.all_gather, parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def gather_bytes(data: bytes) -> list[bytes]:
    """The bytes of every rank, on each."""
    if not active():
        return [data]
    lengths = all_gather(torch.tensor([len(data)])).tolist()
    flat = all_gather(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)])
    return [part.numpy().tobytes() for part in flat.split(lengths)]


def broadcast_bytes(data: bytes, source: int = 0) -> bytes:
    """One rank's bytes on every rank, whatever the others give."""
    if not active():
        return data
    length = int(broadcast_(torch.tensor([len(data)]), source))
    flat = torch.zeros(length, dtype=torch.uint8)
    if rank() == source:
        flat = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[:length].clone()
    return broadcast_(flat, source).numpy().tobytes()

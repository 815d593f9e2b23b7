"""Ranks of a run and reductions over them. In a world of one, reductions do nothing."""

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
"""Exchange of CPU tensors if one machine has all ranks; otherwise None, and torch's group is
used."""


class RankLost(RuntimeError):
    """Another rank has ended, so ranks cannot exchange data any more; `Watch` reports the cause."""


def cores() -> int:
    """Return the number of cores that this process may use; see `world.pin_cores`."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def active() -> bool:
    """Return whether this process is in a group of ranks, even of one."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if active() else 1


def rank() -> int:
    """Return the index of this process; rank 0 logs and saves."""
    return dist.get_rank() if active() else 0


def share(total: int, key: str) -> int:
    """Return `total` per rank; raise UserError if it cannot be split evenly.

    `key` is the setting that the message names.
    """
    ranks = world_size()
    if total % ranks:
        near = [n for n in (total // ranks * ranks, -(-total // ranks) * ranks) if n]
        raise UserError(
            f"{key}={total} is the number over all ranks and cannot be split evenly over {ranks}; "
            f"use {key}={' or '.join(map(str, near))}"
        )
    return total // ranks


def rank_slice(count: int) -> slice:
    """Return the slice of this rank if each rank has `count` items, in the order of ranks."""
    return slice(rank() * count, (rank() + 1) * count)


def rank_device(device: str) -> str:
    """Return the device of this rank: "cuda" becomes the GPU of its local rank."""
    if device != "cuda" or not active():
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if local >= count:
        raise UserError(
            f"device: rank {rank()} needs cuda:{local}, but torch finds {count} CUDA devices; start at most "
            f"{count} ranks on a machine, or use cpu"
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def exchange(what: str, collective: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Run a collective, which all ranks must call; raise RankLost if another rank has ended.

    `what` describes the exchange for error messages.
    """
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
    """Return whether a tensor can go through shared memory; the same on all ranks."""
    return tensor.is_cpu and tensor.dtype in NUMBERS and tensor.is_contiguous()


def weighted_mean_(tensors: list[Tensor], weight: Tensor) -> None:
    """Replace tensors of one dtype by their means over ranks, weighted by each rank's 0-d `weight`.

    Takes one exchange for all tensors, after which every rank has the same bits.
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
    for tensor, weighted_sum in zip(tensors, flat[:-1].split([tensor.numel() for tensor in tensors]), strict=True):
        torch.div(weighted_sum.view(tensor.shape), total, out=tensor)


def max_(tensor: Tensor) -> Tensor:
    """Maximum over ranks, in place."""
    if active():
        exchange("comparing", dist.all_reduce, tensor, dist.ReduceOp.MAX)
    return tensor


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over ranks; in a world of one, the tensor itself."""
    return sum_(tensor.clone()).div_(world_size()) if active() else tensor


def largest(number: float) -> float:
    """Return the maximum over ranks of a number on the host."""
    return largest_each(number)[0]


def largest_each(*numbers: float) -> list[float]:
    """Return the maximum over ranks of each number on the host, with one exchange for all."""
    return max_(torch.tensor(numbers, dtype=torch.float64)).tolist() if active() else list(numbers)


def broadcast_(tensor: Tensor, source: int = 0) -> Tensor:
    """Copy one rank's tensor to every rank, in place."""
    if active():
        exchange(f"receiving from rank {source}", dist.broadcast, tensor, src=source)
    return tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Return the CPU tensors `[n, ...]` of all ranks, concatenated; n may differ between ranks."""
    if not active():
        return tensor
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    exchange("gathering sizes", dist.all_gather, counts, torch.tensor([len(tensor)]))
    most = max(int(count) for count in counts)
    padded = torch.cat([tensor, tensor.new_zeros((most - len(tensor), *tensor.shape[1:]))])
    parts = [torch.empty_like(padded) for _ in counts]
    exchange("gathering", dist.all_gather, parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank, on each rank."""
    if not active():
        return [data]
    lengths = all_gather(torch.tensor([len(data)])).tolist()
    flat = all_gather(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)])
    return [part.numpy().tobytes() for part in flat.split(lengths)]


def broadcast_bytes(data: bytes, source: int = 0) -> bytes:
    """Return one rank's bytes on every rank; the other ranks' `data` is ignored."""
    if not active():
        return data
    length = int(broadcast_(torch.tensor([len(data)]), source))
    flat = torch.zeros(length, dtype=torch.uint8)
    if rank() == source:
        flat = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[:length].clone()
    return broadcast_(flat, source).numpy().tobytes()

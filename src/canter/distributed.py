"""Ranks of one run, and the cores of this one. In a world of one reductions do nothing, so callers never ask."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, 0 for the one that talks and saves."""
    return dist.get_rank() if world_size() > 1 else 0


def sum_(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def mean_(tensor: Tensor) -> Tensor:
    """Mean over ranks, in place."""
    return sum_(tensor).div_(world_size()) if world_size() > 1 else tensor


def max_(tensor: Tensor) -> Tensor:
    """Largest over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def mean(tensor: Tensor) -> Tensor:
    """Mean over ranks; in a world of one the tensor itself."""
    return mean_(tensor.clone()) if world_size() > 1 else tensor


def mean_number(number: float) -> float:
    """Mean over ranks of a number on the host."""
    return float(mean_(torch.tensor(number, dtype=torch.float64)).numpy()) if world_size() > 1 else number


def broadcast_(tensor: Tensor) -> Tensor:
    """Rank 0's value on every rank, in place."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0)
    return tensor

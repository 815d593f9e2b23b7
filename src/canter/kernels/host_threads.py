"""Rows shared among the threads of a process.

NumPy leaves Python's lock while it computes, so plain threads can each do everything for some of the rows. They meet
once, at the end; the threads inside torch or a BLAS meet after every operation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

Result = TypeVar("Result")
MUCH = 2**23
"""Multiplications in the largest product below which one thread does everything: threads wait for each other's Python
between the operations, so these must be long."""


def parts(rows: int, largest: int) -> list[slice]:
    """Rows in as many parts as torch has threads, if that pays; `largest` is the size of the largest weight matrix.

    How rows are cut decides how sums are rounded, so it depends on nothing else.
    """
    if rows * largest < MUCH:
        return [slice(0, rows)]
    count = torch.get_num_threads()
    edges = [rows * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def share(work: Callable[[int, slice], Result], among: list[slice]) -> list[Result]:
    """`work(number, rows)` for each part, all at the same time."""
    others = [_pool().submit(work, number, rows) for number, rows in enumerate(among) if number > 0]
    first = work(0, among[0])
    return [first, *(other.result() for other in others)]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="canter-rows")

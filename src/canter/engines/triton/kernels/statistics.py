"""Moments of many samples, and the running moments of a normaliser.

R samples (rows), F features. In torch each takes about ten passes over the samples and forty
launches on single numbers, together as long as several minibatches. All sums are float64, in a
fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.core.dispatch import kernel, on_gpu
from canter.functional import statistics

ROWS = 512
"""Rows that one block reads."""


@triton.jit
def _combine(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Merge moments as `canter.functional.statistics.merge_moments` does."""
    count = count_a + count_b
    share = count_b / tl.where(count > 0, count, 1.0)
    delta = mean_b - mean_a
    return count, mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share


@triton.jit
def _block_moments(
    x_ptr, mask_ptr, out_ptr, R, F, ROWS: tl.constexpr, TILE_R: tl.constexpr, TILE_F: tl.constexpr
):  # fmt: skip
    """Store count, mean and squared differences `[blocks, 3, F]` of each block of rows."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * TILE_F + tl.arange(0, TILE_F)
    count = tl.zeros((TILE_F,), tl.float64)
    mean = tl.zeros((TILE_F,), tl.float64)
    m2 = tl.zeros((TILE_F,), tl.float64)
    for start in range(0, ROWS, TILE_R):
        rows = block * ROWS + start + tl.arange(0, TILE_R)
        counted = tl.load(mask_ptr + rows, mask=rows < R, other=0) != 0
        inside = counted[:, None] & (columns < F)[None, :]
        x = tl.load(x_ptr + rows[:, None].to(tl.int64) * F + columns[None, :], mask=inside, other=0.0).to(tl.float64)
        some = tl.zeros((TILE_F,), tl.float64) + tl.sum(counted.to(tl.float64), 0)
        middle = tl.sum(x, 0) / tl.maximum(some, 1.0)
        apart = tl.where(inside, x - middle[None, :], 0.0)
        count, mean, m2 = _combine(count, mean, m2, some, middle, tl.sum(apart * apart, 0))
    where = out_ptr + block * 3 * F + columns
    tl.store(where, count, mask=columns < F)
    tl.store(where + F, mean, mask=columns < F)
    tl.store(where + 2 * F, m2, mask=columns < F)


@triton.jit
def _all_moments(part_ptr, count_ptr, out_ptr, blocks, F, TILE_B: tl.constexpr, TILE_F: tl.constexpr):
    """Merge the moments `[2, F]` of all blocks, and their count."""
    columns = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    count = tl.zeros((TILE_F,), tl.float64)
    total = tl.zeros((TILE_F,), tl.float64)
    m2 = tl.zeros((TILE_F,), tl.float64)
    for start in range(0, blocks, TILE_B):
        block = start + tl.arange(0, TILE_B)
        inside = (block < blocks)[:, None] & (columns < F)[None, :]
        where = part_ptr + block[:, None] * 3 * F + columns[None, :]
        some = tl.load(where, mask=inside, other=0.0)
        count += tl.sum(some, 0)
        total += tl.sum(some * tl.load(where + F, mask=inside, other=0.0), 0)
    mean = total / tl.maximum(count, 1.0)
    for start in range(0, blocks, TILE_B):
        block = start + tl.arange(0, TILE_B)
        inside = (block < blocks)[:, None] & (columns < F)[None, :]
        where = part_ptr + block[:, None] * 3 * F + columns[None, :]
        apart = tl.load(where + F, mask=inside, other=0.0) - mean[None, :]
        weighted = tl.load(where, mask=inside, other=0.0) * apart * apart
        m2 += tl.sum(tl.load(where + 2 * F, mask=inside, other=0.0) + weighted, 0)
    tl.store(count_ptr + columns, count, mask=columns < 1)
    tl.store(out_ptr + columns, mean, mask=columns < F)
    tl.store(out_ptr + F + columns, m2, mask=columns < F)


def _supports(x: Tensor, mask: Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling()


@kernel(of=statistics.local_moments, accepts=_supports)
def local_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute moments over the leading axes that the mask covers."""
    shape = x.shape[mask.ndim :]
    rows = mask.numel()
    features = shape.numel()
    blocks = triton.cdiv(rows, ROWS)
    tile_f = min(16, triton.next_power_of_2(features))
    parts = torch.empty((blocks, 3, features), dtype=torch.float64, device=x.device)
    count = torch.empty((), dtype=torch.float64, device=x.device)
    out = torch.empty((2, *shape), dtype=torch.float64, device=x.device)
    columns = triton.cdiv(features, tile_f)
    marks = mask.contiguous().view(torch.uint8)
    _block_moments[(blocks, columns)](
        x.contiguous(), marks, parts, rows, features, ROWS=ROWS, TILE_R=min(ROWS, 2048 // tile_f), TILE_F=tile_f
    )
    _all_moments[(columns,)](parts, count, out, blocks, features, TILE_B=max(16, 512 // tile_f), TILE_F=tile_f)
    return count, out[0], out[1]


@triton.jit
def _merged(count, mean_ptr, m2_ptr, new_count, new_mean_ptr, new_m2_ptr, i, inside):
    mean = tl.load(mean_ptr + i, mask=inside, other=0.0)
    m2 = tl.load(m2_ptr + i, mask=inside, other=0.0)
    new_mean = tl.load(new_mean_ptr + i, mask=inside, other=0.0)
    new_m2 = tl.load(new_m2_ptr + i, mask=inside, other=0.0)
    return _combine(count, mean, m2, new_count, new_mean, new_m2)


@triton.jit
def _update_moments(
    count_ptr, mean_ptr, m2_ptr, new_count_ptr, new_mean_ptr, new_m2_ptr, shift_ptr, scale_ptr, inverse_ptr,
    F, eps, ON_STD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    old = tl.load(count_ptr)
    new = tl.load(new_count_ptr)
    strange = tl.zeros((TILE,), tl.int32)
    for start in range(0, F, TILE):
        i = start + tl.arange(0, TILE)
        count, mean, m2 = _merged(old, mean_ptr, m2_ptr, new, new_mean_ptr, new_m2_ptr, i, i < F)
        # Neither infinity nor NaN is below infinity; count and m2 are not negative.
        finite = (count + m2 < float("inf")) & (mean < float("inf")) & (mean > float("-inf"))
        strange += tl.where(finite, 0, 1)
    if tl.sum(strange, 0) == 0:
        for start in range(0, F, TILE):
            i = start + tl.arange(0, TILE)
            inside = i < F
            count, mean, m2 = _merged(old, mean_ptr, m2_ptr, new, new_mean_ptr, new_m2_ptr, i, inside)
            variance = tl.where(count > 0, m2 / tl.maximum(count, 1.0), 1.0)
            std = tl.sqrt(variance) + eps if ON_STD else tl.sqrt(variance + eps)
            tl.store(mean_ptr + i, mean, mask=inside)
            tl.store(m2_ptr + i, m2, mask=inside)
            tl.store(shift_ptr + i, mean.to(tl.float32), mask=inside)
            tl.store(scale_ptr + i, std.to(tl.float32), mask=inside)
            tl.store(inverse_ptr + i, (1.0 / std).to(tl.float32), mask=inside)
        tl.store(count_ptr, old + new)


def _on_gpu(
    moments: statistics.Tensors,
    new: statistics.Tensors,
    derived: statistics.Tensors,
    eps: float,
    eps_on_std: bool = False,
) -> bool:
    return on_gpu(derived[0])


@kernel(of=statistics.update_moments_, accepts=_on_gpu)
def update_moments_(
    moments: statistics.Tensors,
    new: statistics.Tensors,
    derived: statistics.Tensors,
    eps: float,
    eps_on_std: bool = False,
) -> None:
    """Merge moments and derive mean and scale in one launch."""
    _update_moments[(1,)](*moments, *new, *derived, moments[1].numel(), eps, ON_STD=eps_on_std, TILE=128)

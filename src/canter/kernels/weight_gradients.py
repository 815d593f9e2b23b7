"""Gradients of the weights and biases of several linear layers.

M rows, K inputs, N outputs. The products are small and long: a few tiles of the result, each a sum over tens of
thousands of rows. Left alone, cuBLAS cuts each into parts of its own choice and adds them up in a kernel of their own;
here the parts of all layers lie side by side, and one kernel adds them all up, always in the same order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 32
"""Into how many parts the rows are cut, where that divides them."""


@triton.jit
def _add_up(x_ptr, out_ptr, R, P, TILE_R: tl.constexpr, TILE_P: tl.constexpr):
    columns = tl.program_id(0) * TILE_P + tl.arange(0, TILE_P)
    total = tl.zeros((TILE_P,), tl.float32)
    for start in range(0, R, TILE_R):
        rows = start + tl.arange(0, TILE_R)
        inside = (rows < R)[:, None] & (columns < P)[None, :]
        total += tl.sum(tl.load(x_ptr + rows[:, None] * P + columns[None, :], mask=inside, other=0.0), 0)
    tl.store(out_ptr + columns, total, mask=columns < P)


def column_sums(x: Tensor) -> Tensor:
    """Sums `[P]` of few rows `[R, P]`, always in the same order."""
    rows, width = x.shape
    # Few columns are read by few blocks: short ones, then.
    tile = 64 if width > 4096 else 16
    out = x.new_empty(width)
    _add_up[(triton.cdiv(width, tile),)](x, out, rows, width, TILE_R=2048 // tile, TILE_P=tile)
    return out


def weight_gradients(deltas: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """`d.T @ x` in float32 for each layer's `d` `[M, N]` and `x` `[M, K]`."""
    parts = math.gcd(deltas[0].shape[0], PARTS)
    shapes = [(d.shape[1], x.shape[1]) for d, x in zip(deltas, inputs, strict=True)]
    sizes = [n * k for n, k in shapes]
    partial = torch.empty((parts, sum(sizes)), device=deltas[0].device)
    for place, shape, d, x in zip(partial.split(sizes, 1), shapes, deltas, inputs, strict=True):
        factors = d.view(parts, -1, shape[0]).mT, x.to(d.dtype).view(parts, -1, shape[1])
        into = place.view(parts, *shape)
        if d.dtype == into.dtype:
            torch.bmm(*factors, out=into)
        else:
            torch.bmm(*factors, out_dtype=into.dtype, out=into)
    return [flat.view(shape) for flat, shape in zip(column_sums(partial).split(sizes), shapes, strict=True)]

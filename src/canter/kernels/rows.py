"""Kernels that read whole rows: reordering them, and summing up a rollout backwards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather(x_ptr, order_ptr, out_ptr, S, F, TILE_S: tl.constexpr, TILE_F: tl.constexpr):
    rows = tl.program_id(0) * TILE_S + tl.arange(0, TILE_S)
    columns = tl.program_id(1) * TILE_F + tl.arange(0, TILE_F)
    plane = tl.program_id(2).to(tl.int64) * S * F
    inside = (rows < S)[:, None] & (columns < F)[None, :]
    source = tl.load(order_ptr + rows, mask=rows < S, other=0)
    values = tl.load(x_ptr + plane + source[:, None] * F + columns[None, :], mask=inside)
    tl.store(out_ptr + plane + rows[:, None] * F + columns[None, :], values, mask=inside)


def gather_sequences(x: Tensor, order: Tensor) -> Tensor:
    """`x.index_select(1, order)` for `x` `[L, S, ...]` and a permutation `order` `[S]`."""
    if x.dtype == torch.bool:
        return gather_sequences(x.view(torch.uint8), order).view(torch.bool)
    x = x.contiguous()
    length, sequences = x.shape[:2]
    features = x[0, 0].numel()
    out = torch.empty_like(x)
    tile_f = min(128, triton.next_power_of_2(features))
    tile_s = max(1, 2048 // tile_f)
    grid = (triton.cdiv(sequences, tile_s), triton.cdiv(features, tile_f), length)
    _gather[grid](x, order, out, sequences, features, TILE_S=tile_s, TILE_F=tile_f)
    return out


@triton.jit
def _standardize(x_ptr, shift_ptr, scale_ptr, out_ptr, count, F, clip, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside, column = i < count, i % F
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0)
    y = (tl.load(x_ptr + i, mask=inside, other=0.0) - shift) * scale
    # A NaN stays one, as in torch's clamp, or it would go unnoticed.
    tl.store(out_ptr + i, tl.where(y != y, y, tl.minimum(tl.maximum(y, -clip), clip)), mask=inside)


def standardize(x: Tensor, shift: Tensor, inverse_scale: Tensor, clip: float) -> Tensor:
    """`((x - shift) * inverse_scale).clamp(-clip, clip)` for `x` `[..., *shape]` and statistics of that shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    _standardize[grid](x, shift, inverse_scale, out, x.numel(), shift.numel(), clip, TILE=1024)
    return out


@triton.jit
def _accumulate(delta_ptr, decay_ptr, out_ptr, T, N, TILE: tl.constexpr):
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < N
    total = tl.zeros((TILE,), tl.float32)
    for back in range(T):
        where = (T - 1 - back) * N + columns
        delta = tl.load(delta_ptr + where, mask=inside, other=0.0)
        total = delta + tl.load(decay_ptr + where, mask=inside, other=0.0) * total
        tl.store(out_ptr + where, total, mask=inside)


def accumulate_backwards(delta: Tensor, decay: Tensor) -> Tensor:
    """`out[t] = delta[t] + decay[t] * out[t + 1]` for `[T, N]`, with nothing after the last row."""
    out = torch.empty_like(delta)
    steps, num_envs = delta.shape
    _accumulate[(triton.cdiv(num_envs, 128),)](
        delta.contiguous(), decay.contiguous(), out, steps, num_envs, TILE=128, num_warps=4
    )
    return out

"""Batch norm of several members and the projection of return distributions.

A launch that needs sums over all samples is cut into chunks of them, and the next launch adds up
the chunks in a fixed order. Shares of atoms are not added by scattered writes, whose rounding would
depend on chance.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.core.dispatch import double_backward, kernel, on_gpu
from canter.functional.layers import batch_norm
from canter.functional.losses import project_distribution

ROWS = 32
COLUMNS = 64
MOST_CHUNKS = 64
"""Largest number of chunks that the samples are cut into."""


@triton.jit
def _places(start, B, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return offsets of this program's rows from `start` on, and masks of those that exist."""
    member = tl.program_id(0).to(tl.int64)
    rows = start + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    where = (member * B + rows)[:, None] * D + columns[None, :]
    return where, (rows < B)[:, None] & (columns < D)[None, :], rows < B


@triton.jit
def _moments(x_ptr, part_ptr, B, D, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store mean and sum of squared differences of each chunk, `part[2, E, chunks, D]`."""
    count = 0.0
    mean = tl.zeros((COLUMNS,), tl.float32)
    m2 = tl.zeros((COLUMNS,), tl.float32)
    for start in range(tl.program_id(2) * CHUNK, tl.program_id(2) * CHUNK + CHUNK, ROWS):
        where, inside, valid = _places(start, B, D, ROWS, COLUMNS)
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        some = tl.sum(valid.to(tl.float32), 0)
        own = tl.sum(x, 0) / tl.maximum(some, 1.0)
        away = tl.where(inside, x - own[None, :], 0.0)
        share = some / tl.maximum(count + some, 1.0)
        m2 += tl.sum(away * away, 0) + (own - mean) * (own - mean) * count * share
        mean += (own - mean) * share
        count += some
    _store_parts(part_ptr, mean, m2, D, COLUMNS)


@triton.jit
def _store_parts(part_ptr, first, second, D, COLUMNS: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = (tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)) * D + columns
    half = tl.num_programs(0) * tl.num_programs(2) * D
    tl.store(part_ptr + place, first, mask=columns < D)
    tl.store(part_ptr + half + place, second, mask=columns < D)


@triton.jit
def _load_parts(part_ptr, D, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load both results of all chunks for this program's columns, `[CHUNKS, COLUMNS]` each."""
    chunks = tl.arange(0, CHUNKS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.num_programs(2)
    place = (tl.program_id(0) * count + chunks)[:, None] * D + columns[None, :]
    inside = (chunks < count)[:, None] & (columns < D)[None, :]
    half = tl.num_programs(0) * count * D
    first = tl.load(part_ptr + place, mask=inside, other=0.0)
    return first, tl.load(part_ptr + half + place, mask=inside, other=0.0)


@triton.jit
def _normalise(
    x_ptr, part_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, var_ptr, B, D, eps,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    means, squares = _load_parts(part_ptr, D, CHUNKS, COLUMNS)
    counts = tl.minimum(tl.maximum(B - tl.arange(0, CHUNKS) * CHUNK, 0), CHUNK).to(tl.float32)[:, None]
    mean = tl.sum(means * counts, 0) / B
    away = means - mean[None, :]
    var = tl.sum(squares + away * away * counts, 0) / B
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.program_id(0) * D + columns
    exists = columns < D
    if tl.program_id(2) == 0:
        tl.store(mean_ptr + place, mean, mask=exists)
        tl.store(var_ptr + place, var, mask=exists)
    scale = tl.load(w_ptr + place, mask=exists, other=0.0) / tl.sqrt_rn(var + eps)
    shift = tl.load(b_ptr + place, mask=exists, other=0.0)
    for start in range(tl.program_id(2) * CHUNK, tl.program_id(2) * CHUNK + CHUNK, ROWS):
        where, inside, _ = _places(start, B, D, ROWS, COLUMNS)
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + where, (x - mean[None, :]) * scale[None, :] + shift[None, :], mask=inside)


@triton.jit
def _gradient_sums(
    g_ptr, x_ptr, mean_ptr, var_ptr, part_ptr, B, D, eps,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store sums of the gradient and of its product with the normalised input, for each chunk."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.program_id(0) * D + columns
    exists = columns < D
    mean = tl.load(mean_ptr + place, mask=exists, other=0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.load(var_ptr + place, mask=exists, other=0.0) + eps)
    plain = tl.zeros((COLUMNS,), tl.float32)
    times = tl.zeros((COLUMNS,), tl.float32)
    for start in range(tl.program_id(2) * CHUNK, tl.program_id(2) * CHUNK + CHUNK, ROWS):
        where, inside, _ = _places(start, B, D, ROWS, COLUMNS)
        g = tl.load(g_ptr + where, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        plain += tl.sum(g, 0)
        times += tl.sum(g * (x - mean[None, :]) * inverse[None, :], 0)
    _store_parts(part_ptr, plain, times, D, COLUMNS)


@triton.jit
def _back(
    g_ptr, x_ptr, mean_ptr, var_ptr, w_ptr, part_ptr, out_ptr, of_w_ptr, of_b_ptr, B, D, eps,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    plains, products = _load_parts(part_ptr, D, CHUNKS, COLUMNS)
    plain = tl.sum(plains, 0)
    times = tl.sum(products, 0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.program_id(0) * D + columns
    exists = columns < D
    if tl.program_id(2) == 0:
        tl.store(of_w_ptr + place, times, mask=exists)
        tl.store(of_b_ptr + place, plain, mask=exists)
    mean = tl.load(mean_ptr + place, mask=exists, other=0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.load(var_ptr + place, mask=exists, other=0.0) + eps)
    scale = tl.load(w_ptr + place, mask=exists, other=0.0) * inverse
    plain = plain / B
    times = times / B
    for start in range(tl.program_id(2) * CHUNK, tl.program_id(2) * CHUNK + CHUNK, ROWS):
        where, inside, _ = _places(start, B, D, ROWS, COLUMNS)
        g = tl.load(g_ptr + where, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        out = (g - plain[None, :] - (x - mean[None, :]) * inverse[None, :] * times[None, :]) * scale[None, :]
        tl.store(out_ptr + where, out, mask=inside)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        grid, parts, tiles, chunks = _cut(x)
        y = torch.empty_like(x)
        mean = torch.empty_like(weight)
        var = torch.empty_like(weight)
        rows, columns = x.shape[1:]
        _moments[grid](x, parts, rows, columns, **tiles)
        _normalise[grid](x, parts, weight, bias, y, mean, var, rows, columns, eps, CHUNKS=chunks, **tiles)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = lambda *inputs: batch_norm.plain(*inputs, ctx.eps)[0]  # noqa: E731
            return *double_backward(plain, (x, weight, bias), gradients[0]), None
        gradient = gradients[0].contiguous()
        grid, parts, tiles, chunks = _cut(x)
        of_x = torch.empty_like(x)
        of_weight = torch.empty_like(weight)
        of_bias = torch.empty_like(weight)
        rows, columns = x.shape[1:]
        _gradient_sums[grid](gradient, x, mean, var, parts, rows, columns, ctx.eps, **tiles)
        _back[grid](
            gradient, x, mean, var, weight, parts, of_x, of_weight, of_bias, rows, columns, ctx.eps,
            CHUNKS=chunks, **tiles,
        )  # fmt: skip
        return of_x, of_weight, of_bias, None


def _cut(x: Tensor) -> tuple[tuple[int, int, int], Tensor, dict[str, int], int]:
    """Return grid, buffer for two results of each program, tiles, and padded number of chunks."""
    members, rows, columns = x.shape
    chunk = max(2 * ROWS, triton.next_power_of_2(triton.cdiv(rows, MOST_CHUNKS)))
    chunks = triton.cdiv(rows, chunk)
    parts = x.new_empty(2, members, chunks, columns, dtype=torch.float32)
    tiles = {"CHUNK": chunk, "ROWS": ROWS, "COLUMNS": COLUMNS}
    return (members, triton.cdiv(columns, COLUMNS), chunks), parts, tiles, triton.next_power_of_2(chunks)


@kernel(of=batch_norm, accepts=on_gpu)
def fused_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute batch norm in two launches."""
    return _BatchNorm.apply(x.contiguous(), weight, bias, eps)  # pyright: ignore[reportReturnType]


@triton.jit
def _project(p_ptr, a_ptr, out_ptr, K, low, scale, PLACES: tl.constexpr, STEP: tl.constexpr):
    """Sum every atom's share of every place of one row, in a fixed order."""
    row = tl.program_id(0)
    places = tl.arange(0, PLACES)
    total = tl.zeros((PLACES,), tl.float32)
    for start in range(0, K, STEP):
        atoms = start + tl.arange(0, STEP)
        p = tl.load(p_ptr + row * K + atoms, mask=atoms < K, other=0.0)
        atom = tl.load(a_ptr + row * K + atoms, mask=atoms < K, other=0.0)
        place = tl.minimum(tl.maximum((atom - low) * scale, 0.0), K - 1.0)
        share = tl.maximum(1.0 - tl.abs(place[None, :] - places[:, None]), 0.0)
        # A maximum drops a NaN, and a step that it must block would be taken.
        share = tl.where((atom == atom)[None, :], share, float("nan"))
        total += tl.sum(p[None, :] * share, 1)
    tl.store(out_ptr + row * K + places, total, mask=places < K)


@kernel(of=project_distribution, accepts=on_gpu)
def project_on_gpu(probs: Tensor, atoms: Tensor, low: float, high: float) -> Tensor:
    """Project with one program for each row."""
    count = probs.shape[-1]
    atoms = atoms.contiguous()
    probs = probs.contiguous()
    out = torch.empty_like(probs)
    scale = (count - 1) / (high - low)
    places = triton.next_power_of_2(count)
    _project[(probs.numel() // count,)](probs, atoms, out, count, low, scale, PLACES=places, STEP=16)
    return out

"""A linear layer with its activation in one kernel, forward and backward.

M rows, K inputs, N outputs. cuBLAS has no epilogue for ELU or tanh, and torch sums bias gradients over rows with few
threads; around the small matrices of a control policy that costs as much as the products themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = {"identity": 0, "elu": 1, "relu": 2, "tanh": 3}
"""Activations that the kernels know."""

TILE_M, TILE_K = 64, 32


def _tiles(n: int) -> dict[str, int]:
    """The shape of a block and who works on it.

    Fixed by measurement, not by a search at run time: another shape sums in another order, and a resumed run must give
    the same bits as one that never stopped.
    """
    tile_n = min(128, max(16, triton.next_power_of_2(n)))
    return {
        "TILE_M": TILE_M,
        "TILE_N": tile_n,
        "TILE_K": TILE_K,
        "num_warps": 4,
        "num_stages": 3,
    }


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == 1:
        x = tl.where(x > 0, x, tl.exp(tl.minimum(x, 0.0)) - 1.0)
    elif KIND == 2:
        x = tl.maximum(x, 0.0)
    elif KIND == 3:
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return x


@triton.jit
def _slope(y, KIND: tl.constexpr):
    """Derivative of the activation, from its value."""
    slope = tl.full(y.shape, 1.0, tl.float32)
    if KIND == 1:
        slope = tl.where(y > 0, 1.0, y + 1.0)
    elif KIND == 2:
        slope = tl.where(y > 0, 1.0, 0.0)
    elif KIND == 3:
        slope = 1.0 - y * y
    return slope


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, M, N, K,
    KIND: tl.constexpr, TF32: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """`y[M, N] = act(x[M, K] @ w[N, K].T + b)`."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        x = tl.load(
            x_ptr + rows[:, None] * K + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0
        )
        w = tl.load(
            w_ptr + columns[None, :] * K + inner[:, None], mask=(columns < N)[None, :] & (inner < K)[:, None], other=0.0
        )
        total = tl.dot(x, w, total, input_precision="tf32" if TF32 else "ieee")
    total += tl.load(b_ptr + columns, mask=columns < N, other=0.0)[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], _activate(total, KIND), mask=inside)


@triton.jit
def _input_gradient(
    d_ptr, w_ptr, h_ptr, out_ptr, sums_ptr, M, N, K,
    KIND: tl.constexpr, TF32: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """`out[M, N] = (d[M, K] @ w[N, K].T) * act'(h[M, N])`, and the column sums of each block of rows."""
    block = tl.program_id(0)
    rows = block * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        d = tl.load(
            d_ptr + rows[:, None] * K + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0
        )
        w = tl.load(
            w_ptr + columns[None, :] * K + inner[:, None], mask=(columns < N)[None, :] & (inner < K)[:, None], other=0.0
        )
        total = tl.dot(d, w, total, input_precision="tf32" if TF32 else "ieee")
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    where = rows[:, None] * N + columns[None, :]
    total *= _slope(tl.load(h_ptr + where, mask=inside, other=0.0), KIND)
    tl.store(out_ptr + where, total, mask=inside)
    sums = tl.sum(tl.where(inside, total, 0.0), 0)
    tl.store(sums_ptr + block * N + columns, sums, mask=columns < N)


def _tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


class _Layers(torch.autograd.Function):
    """Hidden layers `act(x @ w.T + b)`, one after the other; keeps each layer's output for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, *parameters: Tensor) -> Tensor:
        kind, outputs = ACTIVATIONS[activation], [x]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            outputs.append(_layer(outputs[-1], weight, bias, kind))
        ctx.kind = kind
        ctx.save_for_backward(*outputs, *parameters[::2])
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.saved_tensors) // 2
        outputs, weights = ctx.saved_tensors[: count + 1], ctx.saved_tensors[count + 1 :]
        delta, bias_gradient = _from_output(gradients[0].contiguous(), outputs[-1], ctx.kind)
        results: list[Tensor | None] = []
        for layer in range(count - 1, -1, -1):
            x, weight = outputs[layer], weights[layer]
            results[:0] = [torch.mm(delta.t(), x), bias_gradient]
            if layer > 0:
                delta, bias_gradient = _through(delta, weight, x, ctx.kind)
        grad_x = torch.mm(delta, weights[0]) if ctx.needs_input_grad[0] else None
        return grad_x, None, *results


@triton.jit
def _output_gradient(
    g_ptr, y_ptr, out_ptr, sums_ptr, M, N,
    KIND: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """`out[M, N] = g * act'(y)`, and the column sums of each block of rows."""
    block = tl.program_id(0)
    rows = block * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside, where = (rows < M)[:, None] & (columns < N)[None, :], rows[:, None] * N + columns[None, :]
    y = tl.load(y_ptr + where, mask=inside, other=0.0)
    total = tl.load(g_ptr + where, mask=inside, other=0.0) * _slope(y, KIND)
    tl.store(out_ptr + where, total, mask=inside)
    tl.store(sums_ptr + block * N + columns, tl.sum(total, 0), mask=columns < N)


@triton.jit
def _add_up(x_ptr, out_ptr, R, N, TILE_R: tl.constexpr, TILE_N: tl.constexpr):
    columns = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_N,), tl.float32)
    for start in range(0, R, TILE_R):
        rows = start + tl.arange(0, TILE_R)
        inside = (rows < R)[:, None] & (columns < N)[None, :]
        total += tl.sum(tl.load(x_ptr + rows[:, None] * N + columns[None, :], mask=inside, other=0.0), 0)
    tl.store(out_ptr + columns, total, mask=columns < N)


def _column_sums(x: Tensor) -> Tensor:
    """Sums `[N]` of few rows `[R, N]`, always in the same order."""
    rows, n = x.shape
    out = x.new_empty(n)
    _add_up[(triton.cdiv(n, 16),)](x, out, rows, n, TILE_R=128, TILE_N=16, num_warps=4)
    return out


def _layer(x: Tensor, weight: Tensor, bias: Tensor, kind: int) -> Tensor:
    m, (n, k), tiles = x.shape[0], weight.shape, _tiles(weight.shape[0])
    y = x.new_empty(m, n)
    grid = (triton.cdiv(m, tiles["TILE_M"]), triton.cdiv(n, tiles["TILE_N"]))
    _forward[grid](x, weight, bias, y, m, n, k, KIND=kind, TF32=_tf32(), **tiles)
    return y


def _from_output(gradient: Tensor, y: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """The gradient before the activation that gave `y`, and the bias gradient of its layer."""
    (m, n), tile_n = y.shape, 32
    blocks = triton.cdiv(m, TILE_M)
    out, sums = torch.empty_like(y), y.new_empty(blocks, n)
    grid = (blocks, triton.cdiv(n, tile_n))
    _output_gradient[grid](gradient, y, out, sums, m, n, KIND=kind, TILE_M=TILE_M, TILE_N=tile_n)
    return out, _column_sums(sums)


def _through(delta: Tensor, weight: Tensor, h: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """The gradient before the layer that gave `h`, and that layer's bias gradient."""
    (m, n), tiles = h.shape, _tiles(h.shape[1])
    blocks = triton.cdiv(m, tiles["TILE_M"])
    out, sums = torch.empty_like(h), h.new_empty(blocks, n)
    grid = (blocks, triton.cdiv(n, tiles["TILE_N"]))
    # Tensor cores want both factors contiguous along the inner axis; turning the small one costs next to nothing.
    turned = weight.t().contiguous()
    _input_gradient[grid](delta, turned, h, out, sums, m, n, weight.shape[0], KIND=kind, TF32=_tf32(), **tiles)
    return out, _column_sums(sums)


def hidden_layers(x: Tensor, activation: str, parameters: list[Tensor]) -> Tensor:
    """`[..., K]` through layers of `weight [N, K], bias [N]` pairs, each followed by the activation."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return _Layers.apply(flat, activation, *parameters).unflatten(0, x.shape[:-1])

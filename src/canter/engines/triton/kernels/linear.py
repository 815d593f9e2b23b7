"""Linear layers with their activations, forward and backward.

M samples (rows), K inputs, N outputs.

cuBLAS has no epilogue for ELU or tanh; with the small matrices of a control policy a separate
activation costs as much as the product before it, and torch sums bias gradients over samples with
few threads.

Products of weight gradients are small and long: a few tiles, each a sum over tens of thousands of
samples. cuBLAS would cut each into parts and add them up in a separate kernel; here one kernel adds
up the parts of all layers, in a fixed order.

Sums are float32. Under bfloat16 autocast, factors and tensors between layers are bfloat16; input
and output stay float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from canter.core.dispatch import double_backward, kernel, on_gpu
from canter.functional.layers import linear_layers

PARTS = 32
"""Parts that the samples are cut into, if it divides their number."""


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
    """Return the sums `[P]` of few rows `[R, P]`, in a fixed order."""
    rows, width = x.shape
    # Few columns: small tiles keep more blocks busy.
    tile = 64 if width > 4096 else 16
    out = x.new_empty(width)
    _add_up[(triton.cdiv(width, tile),)](x, out, rows, width, TILE_R=2048 // tile, TILE_P=tile)
    return out


def weight_gradients(deltas: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return `d.T @ x` in float32 for each layer's `d` `[M, N]` and `x` `[M, K]`."""
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


KINDS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.ELU: 1, nn.ReLU: 2, nn.Tanh: 3}
"""Activations that the kernels support, with their numbers in kernels."""


def kind_of(activation: Any) -> int | None:
    """Return the number of an activation; None if the kernels do not support it."""
    supported = type(activation) is not nn.ELU or activation.alpha == 1.0
    return KINDS.get(type(activation)) if supported else None


TILE_M = 64
TILE_K = 32


def _tiles(n: int, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Return the shape of a block and its warps and stages.

    `dtype` is that of both factors in memory. Fixed by measurement, not by a search at run time:
    another shape sums in another order, and a resumed run must have the same bits as one that never
    stopped.

    Both factors of `num_stages` steps lie in shared memory: at most (64 * 32 + 32 * 128) * 4 bytes
    * 3 = 73,728, as compiled for Hopper; 49,152 for Ampere, Ada and the RTX cards of Blackwell, and
    32,768 for Turing. All have room for that, RTX cards 101,376 bytes a block (Turing 65,536).
    """
    tile_n = min(128, max(16, triton.next_power_of_2(n)))
    return {
        "TILE_M": TILE_M,
        "TILE_N": tile_n,
        "TILE_K": TILE_K * 4 // dtype.itemsize,
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
    """Return the derivative of the activation from its value."""
    slope = tl.full(y.shape, 1.0, tl.float32)
    if KIND == 1:
        slope = tl.where(y > 0, 1.0, y + 1.0)
    elif KIND == 2:
        slope = tl.where(y > 0, 1.0, 0.0)
    elif KIND == 3:
        slope = 1.0 - y * y
    return slope


@triton.jit
def _product(
    x_ptr, w_ptr, side_ptr, y_ptr, sums_ptr, M, N, K, sums_stride,
    KIND: tl.constexpr, BACK: tl.constexpr, SUMS: tl.constexpr, BF16: tl.constexpr, TF32: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """`y[M, N] = act(x[M, K] @ w[N, K].T + side[N])`.

    With `BACK`, `y = (x @ w.T) * act'(side[M, N])`, and with `SUMS` also its column sums.
    """
    block = tl.program_id(0)
    rows = block * TILE_M + tl.arange(0, TILE_M)
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
        if BF16:
            x = x.to(tl.bfloat16)
            w = w.to(tl.bfloat16)
        total = tl.dot(x, w, total, input_precision="tf32" if TF32 else "ieee")
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    where = rows[:, None] * N + columns[None, :]
    if not BACK:
        total += tl.load(side_ptr + columns, mask=columns < N, other=0.0)[None, :]
        total = _activate(total, KIND)
    elif KIND != 0:
        total *= _slope(tl.load(side_ptr + where, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(y_ptr + where, total, mask=inside)
    if SUMS:
        sums = tl.sum(tl.where(inside, total, 0.0), 0)
        tl.store(sums_ptr + block * sums_stride + columns, sums, mask=columns < N)


@triton.jit
def _output_gradient(
    g_ptr, y_ptr, out_ptr, sums_ptr, M, N, sums_stride,
    KIND: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """`out[M, N] = g * act'(y)`, and the column sums of each block."""
    block = tl.program_id(0)
    rows = block * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    where = rows[:, None] * N + columns[None, :]
    y = tl.load(y_ptr + where, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(g_ptr + where, mask=inside, other=0.0).to(tl.float32) * _slope(y, KIND)
    tl.store(out_ptr + where, total, mask=inside)
    tl.store(sums_ptr + block * sums_stride + columns, tl.sum(total, 0), mask=columns < N)


class _Layers(torch.autograd.Function):
    """Hidden layers `act(x @ w.T + b)`, one after the other.

    Keeps each layer's output for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: nn.Module, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        kind = KINDS[type(activation)]
        outputs = [x]
        last = len(parameters) // 2 - 1
        for layer, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            kept = x.dtype if layer == last else dtype
            outputs.append(_layer(outputs[-1], weight, bias, kind, dtype, kept))
        ctx.kind = kind
        ctx.dtype = dtype
        ctx.activation = activation
        ctx.save_for_backward(*outputs, *parameters)
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = (len(ctx.saved_tensors) - 1) // 3
        outputs = ctx.saved_tensors[: count + 1]
        parameters = ctx.saved_tensors[count + 1 :]
        if torch.is_grad_enabled():
            return _again(ctx.activation, outputs[0], parameters, gradients[0])
        weights = parameters[::2]
        widths = [weight.shape[0] for weight in weights]
        sums = gradients[0].new_empty(triton.cdiv(outputs[0].shape[0], TILE_M), sum(widths), dtype=torch.float32)
        places = sums.split(widths, 1)
        deltas = [_from_output(gradients[0].contiguous(), outputs[-1], places[-1], ctx.kind, ctx.dtype)]
        for layer in range(count - 1, 0, -1):
            deltas.insert(0, _through(deltas[0], weights[layer], outputs[layer], places[layer - 1], ctx.kind))
        grad_x = _through(deltas[0], weights[0], outputs[0], None, 0) if ctx.needs_input_grad[0] else None
        products = weight_gradients(deltas, list(outputs[:-1]))
        biases = column_sums(sums).split(widths)
        return grad_x, None, None, *(gradient for pair in zip(products, biases, strict=True) for gradient in pair)


def _again(
    activation: nn.Module, x: Tensor, parameters: tuple[Tensor, ...], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    def layers(x: Tensor, *parameters: Tensor) -> Tensor:
        return linear_layers.plain(x, activation, parameters)

    of_x, *others = double_backward(layers, (x, *parameters), gradient)
    return of_x, None, None, *others


def _tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _layer(x: Tensor, weight: Tensor, bias: Tensor, kind: int, dtype: torch.dtype, kept: torch.dtype) -> Tensor:
    """Return the output of one layer in dtype `kept`, with factors of `dtype`."""
    y = x.new_empty(x.shape[0], weight.shape[0], dtype=kept)
    _multiply(x, weight, bias, y, None, _tiles(weight.shape[0]), KIND=kind, BACK=False, BF16=dtype == torch.bfloat16)
    return y


def _multiply(
    x: Tensor, weight: Tensor, side: Tensor, y: Tensor, sums: Tensor | None, tiles: dict[str, int], **constants: Any
) -> None:
    """Launch `_product`; column sums over blocks go to `sums` `[blocks, N]`, if given."""
    m, n = y.shape
    into = y if sums is None else sums
    _product[(triton.cdiv(m, tiles["TILE_M"]), triton.cdiv(n, tiles["TILE_N"]))](
        x, weight, side, y, into, m, n, x.shape[1], into.stride(0),
        SUMS=sums is not None, TF32=_tf32(), **constants, **tiles,
    )  # fmt: skip


def _from_output(gradient: Tensor, y: Tensor, sums: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient before the activation of output `y`.

    Write its sums `[blocks, N]` over blocks.
    """
    m, n = y.shape
    tile_n = 32
    out = torch.empty_like(y, dtype=dtype)
    grid = (sums.shape[0], triton.cdiv(n, tile_n))
    stride = sums.stride(0)
    _output_gradient[grid](gradient, y, out, sums, m, n, stride, KIND=kind, TILE_M=TILE_M, TILE_N=tile_n)
    return out


def _through(delta: Tensor, weight: Tensor, h: Tensor, sums: Tensor | None, kind: int) -> Tensor:
    """Return the gradient before the layer of output `h`.

    Write its sums `[blocks, N]` over blocks to `sums`.
    """
    out = torch.empty_like(h)
    # Tensor cores need both factors contiguous along the inner axis; transposing the small one
    # costs next to nothing.
    turned = delta.new_empty(weight.shape[::-1]).copy_(weight.t())
    _multiply(delta, turned, h, out, sums, _tiles(h.shape[1], delta.dtype), KIND=kind, BACK=True, BF16=False)
    return out


def _supports(x: Tensor, activation: Any, parameters: Sequence[Tensor]) -> bool:
    return on_gpu(x) and kind_of(activation) is not None


@kernel(of=linear_layers, accepts=_supports)
def fused_layers(x: Tensor, activation: nn.Module, parameters: Sequence[Tensor]) -> Tensor:
    """Compute all layers with one launch each, forward and backward."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return _Layers.apply(flat, activation, dtype, *parameters).unflatten(0, x.shape[:-1])

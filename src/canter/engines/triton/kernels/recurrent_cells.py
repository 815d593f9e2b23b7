"""One step of LSTM and GRU cells for some sequences and units, forward and backward.

B sequences, H units; gates in torch's order: input, forget, cell and output, or reset, update and
new.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _weights(w_ptr, rows, columns, ROW: tl.constexpr, COLUMN: tl.constexpr, H: tl.constexpr, LSTM: tl.constexpr):
    """Load a part of each gate's weights `[H, H]`; a GRU's third gate is repeated as the fourth."""
    w_ptr += rows[:, None] * ROW + columns[None, :] * COLUMN
    inside = (rows < H)[:, None] & (columns < H)[None, :]
    first = tl.load(w_ptr, mask=inside, other=0.0)
    second = tl.load(w_ptr + H * H, mask=inside, other=0.0)
    third = tl.load(w_ptr + 2 * H * H, mask=inside, other=0.0)
    fourth = third
    if LSTM:
        fourth = tl.load(w_ptr + 3 * H * H, mask=inside, other=0.0)
    return first, second, third, fourth


@triton.jit
def _biases(b_ptr, columns, H: tl.constexpr, LSTM: tl.constexpr):
    inside = columns < H
    first = tl.load(b_ptr + columns, mask=inside, other=0.0)[None, :]
    second = tl.load(b_ptr + H + columns, mask=inside, other=0.0)[None, :]
    third = tl.load(b_ptr + 2 * H + columns, mask=inside, other=0.0)[None, :]
    fourth = third
    if LSTM:
        fourth = tl.load(b_ptr + 3 * H + columns, mask=inside, other=0.0)[None, :]
    return first, second, third, fourth


@triton.jit
def _begins(reset_ptr, at, rows, t, L, B, RESET: tl.constexpr):
    """Return which sequences begin an episode at step t; loaded a step ahead, of which it may be the end."""
    begins = rows < 0
    if RESET:
        begins = tl.load(reset_ptr + at, mask=(rows < B) & (t >= 0) & (t < L), other=0) != 0
    return begins


@triton.jit
def _cell(
    factor, h, c, weights, biases, pre_ptr, kept_ptr, at, columns, inside, keep,
    H: tl.constexpr, LSTM: tl.constexpr,
):  # fmt: skip
    """Return the next state of some units; `keep` stores the gates in place of the input's part."""
    pre_ptr += at[:, None] * ((4 if LSTM else 3) * H) + columns[None, :]
    kept = inside & (keep != 0)
    first = tl.load(pre_ptr, mask=inside, other=0.0)
    second = tl.load(pre_ptr + H, mask=inside, other=0.0)
    third = tl.load(pre_ptr + 2 * H, mask=inside, other=0.0)
    last = third
    if LSTM:
        last = tl.load(pre_ptr + 3 * H, mask=inside, other=0.0)
    first = tl.sigmoid(first + tl.dot(factor, weights[0], input_precision="ieee") + biases[0])
    second = tl.sigmoid(second + tl.dot(factor, weights[1], input_precision="ieee") + biases[1])
    product = tl.dot(factor, weights[2], input_precision="ieee") + biases[2]
    if LSTM:
        third = _tanh(third + product)
        last = tl.sigmoid(last + tl.dot(factor, weights[3], input_precision="ieee") + biases[3])
        c = second * c + first * third
        h = last * _tanh(c)
        tl.store(pre_ptr + 3 * H, last, mask=kept)
    else:
        third = _tanh(third + first * product)
        h = third + second * (h - third)
        tl.store(kept_ptr + at[:, None] * H + columns[None, :], product, mask=kept)
    tl.store(pre_ptr, first, mask=kept)
    tl.store(pre_ptr + H, second, mask=kept)
    tl.store(pre_ptr + 2 * H, third, mask=kept)
    return h, c


@triton.jit
def _cell_gradient(
    dh, dc, c, begins, gates_ptr, kept_ptr, entered_ptr, quarter, c_ptr, deltas_ptr, at, columns, inside,
    H: tl.constexpr, LSTM: tl.constexpr,
):  # fmt: skip
    """Store the gradients before the gates' activations; return those that are multiplied by weights.

    Next is the gradient of the state that passes the products by: of an LSTM's cell, or of a GRU's
    hidden state. Last is an LSTM's cell state `c` before the step, of the last episode if one begins.
    """
    here = gates_ptr + at[:, None] * ((4 if LSTM else 3) * H) + columns[None, :]
    first = tl.load(here, mask=inside, other=0.0)
    second = tl.load(here + H, mask=inside, other=0.0)
    third = tl.load(here + 2 * H, mask=inside, other=0.0)
    state = at[:, None] * H + columns[None, :]
    deltas_ptr += at[:, None] * (4 * H) + columns[None, :]
    if LSTM:
        last = tl.load(here + 3 * H, mask=inside, other=0.0)
        out = _tanh(c)
        c = tl.load(c_ptr + state, mask=inside, other=0.0)
        old = tl.where(begins[:, None], 0.0, c)
        dc += dh * last * (1.0 - out * out)
        d_first = dc * third * first * (1.0 - first)
        d_second = dc * old * second * (1.0 - second)
        d_third = dc * first * (1.0 - third * third)
        d_last = dh * out * last * (1.0 - last)
        rest = dc * second
        tl.store(deltas_ptr + 2 * H, d_third, mask=inside)
    else:
        product = tl.load(kept_ptr + state, mask=inside, other=0.0)
        old = tl.load(entered_ptr + at[:, None] * (quarter * 4) + columns[None, :], mask=inside, other=0.0)
        d_new = dh * (1.0 - second) * (1.0 - third * third)
        d_first = d_new * product * first * (1.0 - first)
        d_second = dh * (old - third) * second * (1.0 - second)
        d_third = d_new * first
        d_last = d_third
        rest = dh * second
        tl.store(deltas_ptr + 2 * H, d_new, mask=inside)
    tl.store(deltas_ptr, d_first, mask=inside)
    tl.store(deltas_ptr + H, d_second, mask=inside)
    tl.store(deltas_ptr + 3 * H, d_last, mask=inside)
    return (d_first, d_second, d_third, d_last), rest, c


@triton.jit
def _back(deltas, weights, LSTM: tl.constexpr):
    """Return the sum of products of the gates' gradients and their weights."""
    dtype: tl.constexpr = weights[0].dtype
    largest = tl.maximum(tl.maximum(tl.abs(deltas[0]), tl.abs(deltas[1])), tl.abs(deltas[2]))
    if LSTM:
        largest = tl.maximum(largest, tl.abs(deltas[3]))
    scale = tl.maximum(tl.max(largest, 1), 1e-30)[:, None]
    inverse = 1.0 / scale
    total = tl.dot((deltas[0] * inverse).to(dtype), weights[0], input_precision="ieee")
    total = tl.dot((deltas[1] * inverse).to(dtype), weights[1], total, input_precision="ieee")
    total = tl.dot((deltas[2] * inverse).to(dtype), weights[2], total, input_precision="ieee")
    if LSTM:
        total = tl.dot((deltas[3] * inverse).to(dtype), weights[3], total, input_precision="ieee")
    return total * scale

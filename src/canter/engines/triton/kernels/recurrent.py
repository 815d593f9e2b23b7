"""Recurrent layers over whole sequences, one launch forward and one backward.

L steps, B sequences, F inputs, H units. An LSTM has 4 gates (input, forget, cell, output), a GRU 3
(reset, update, new).

One product computes the input's part of all gates and steps, and another one all weight gradients.
Between them each program runs a few sequences through all steps. Up to 128 units the recurrent
weights stay in shared memory and the state in registers; above, weights are streamed from the L2
cache, and the threads of a program exchange the state through memory.

Factors of the recurrent products are float16, which has the mantissa of TF32 and half its size.
Outputs of a layer are in -1..1 and weights far below float16's largest number; gradients are scaled
by their largest number in each sequence and step. Acting and learning use the same kernel, so that
the first ratio of an update is exactly 1.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from canter.core.dispatch import double_backward, kernel, on_gpu
from canter.engines.triton.kernels.linear import _layer, _tf32, weight_gradients
from canter.engines.triton.kernels.recurrent_cells import _back, _begins, _biases, _cell, _cell_gradient, _weights
from canter.functional.layers import recurrent_layer

MAX_UNITS = 256
"""Units of a layer beyond which the cells run step by step."""
RESIDENT_UNITS = 128
"""Units up to which the recurrent weights stay in shared memory, if it has room."""
SHARED_MEMORY = 101_376
"""Bytes that a block needs to stream weights; data-centre GPUs have them from Ampere on, and RTX
cards."""
RESIDENT_MEMORY = 232_448
"""Bytes that a block needs to keep all weights; data-centre GPUs have them from Hopper on."""


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one block can have; the interpreter has no limit."""
    if device.type != "cuda":
        return RESIDENT_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _shape(units: int, is_lstm: bool, half: bool, backward: bool, device: torch.device) -> dict[str, Any]:
    """Return the tiles of a launch, for factors of float16 or, in tests, float32.

    Measured on an H200 with 1,024 and 2,048 sequences of 24 steps. Three stages of an LSTM's
    backward pass do not fit beside its weights.
    """
    tile = max(16, triton.next_power_of_2(units))
    large = half and _shared_memory(device) >= RESIDENT_MEMORY
    chunk, warps, stages = 32, 8, 2
    if large and tile <= RESIDENT_UNITS:
        chunk, warps, stages = tile, 8 if tile > 64 else 4, 2 if is_lstm and backward else 3
    elif large:
        chunk, warps, stages = (32, 4, 3) if backward else (64, 8, 2)
    resident = large and tile <= RESIDENT_UNITS
    return {
        "RESIDENT": resident, "TILE_H": tile, "TILE_B": 16, "CHUNK": chunk, "STAGES": stages, "num_warps": warps,
    }  # fmt: skip


@triton.jit
def _streamed_step(
    factor, begins, pre_ptr, w_ptr, b_ptr, h_ptr, c_ptr, kept_ptr, keep, at, rows, units, B,
    H: tl.constexpr, LSTM: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the states after a step, a few units at a time."""
    for start in tl.range(0, H, CHUNK, num_stages=STAGES):
        some = start + tl.arange(0, CHUNK)
        part = (rows < B)[:, None] & (some < H)[None, :]
        before = at[:, None] * H + some[None, :]
        state = c_ptr if LSTM else h_ptr
        old = tl.where(begins[:, None], 0.0, tl.load(state + before, mask=part, other=0.0))
        streamed = _weights(w_ptr, units, some, 1, H, H, LSTM)
        shifts = _biases(b_ptr, some, H, LSTM)
        new, cell = _cell(
            factor, old, old, streamed, shifts, pre_ptr, kept_ptr, at, some, part, keep, H, LSTM
        )  # fmt: skip
        tl.store(h_ptr + B * H + before, new, mask=part)
        if LSTM:
            tl.store(c_ptr + B * H + before, cell, mask=part)
    tl.debug_barrier()  # other threads of the program wrote a part of the state


# Acting and learning launch the same binary: another one could round otherwise.
@triton.jit(do_not_specialize=["keep", "quarter", "L", "B"], do_not_specialize_on_alignment=["reset_ptr"])
def _forward(
    pre_ptr, w_ptr, b_ptr, reset_ptr, h_ptr, c_ptr, kept_ptr, entered_ptr, keep, quarter, L, B,
    H: tl.constexpr, LSTM: tl.constexpr, RESET: tl.constexpr, RESIDENT: tl.constexpr,
    TILE_H: tl.constexpr, TILE_B: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write states `[1 + L, B, H]`, of which the first are there, from the input's part `[L, B, 4 H]`.

    `keep` writes what the backward pass needs, among it the hidden states before each step, in rows
    of four times `quarter` numbers.
    """
    rows = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    units = tl.arange(0, TILE_H)
    inside = (rows < B)[:, None] & (units < H)[None, :]
    own = rows[:, None] * H + units[None, :]
    h = tl.load(h_ptr + own, mask=inside, other=0.0)
    c = h
    if LSTM:
        c = tl.load(c_ptr + own, mask=inside, other=0.0)
    if RESIDENT:
        weights = _weights(w_ptr, units, units, 1, H, H, LSTM)
        biases = _biases(b_ptr, units, H, LSTM)
    begins = _begins(reset_ptr, rows, rows, 0, L, B, RESET)
    for t in tl.range(0, L, num_stages=STAGES if RESIDENT else 1):
        at = (t * B + rows).to(tl.int64)
        following = _begins(reset_ptr, at + B, rows, t + 1, L, B, RESET)
        # Filled, not multiplied: a NaN must not reach the next episode.
        h = tl.where(begins[:, None], 0.0, h)
        tl.store(entered_ptr + at[:, None] * (quarter * 4) + units[None, :], h, mask=inside & (keep != 0))
        factor = h.to(w_ptr.dtype.element_ty)
        after = (at + B)[:, None] * H
        if RESIDENT:
            c = tl.where(begins[:, None], 0.0, c)
            h, c = _cell(factor, h, c, weights, biases, pre_ptr, kept_ptr, at, units, inside, keep, H, LSTM)
            tl.store(h_ptr + after + units[None, :], h, mask=inside)
            if LSTM:
                tl.store(c_ptr + after + units[None, :], c, mask=inside)
        else:
            _streamed_step(
                factor, begins, pre_ptr, w_ptr, b_ptr, h_ptr, c_ptr, kept_ptr, keep, at, rows, units, B,
                H, LSTM, CHUNK, STAGES,
            )  # fmt: skip
            h = tl.load(h_ptr + after + units[None, :], mask=inside, other=0.0)
        begins = following


@triton.jit
def _streamed_gradient(
    begins, d_h_ptr, d_c_ptr, gates_ptr, kept_ptr, entered_ptr, quarter, c_ptr, w_ptr, deltas_ptr,
    d_first_h_ptr, d_first_c_ptr, at, rows, units, B,
    H: tl.constexpr, LSTM: tl.constexpr, CELL: tl.constexpr, TILE_H: tl.constexpr, TILE_B: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Replace the gradients by the states after a step, in `d_first`, by those before it."""
    own = rows[:, None] * H + units[None, :]
    inside = (rows < B)[:, None] & (units < H)[None, :]
    total = tl.zeros((TILE_B, TILE_H), tl.float32)
    for start in tl.range(0, H, CHUNK, num_stages=STAGES):
        some = start + tl.arange(0, CHUNK)
        part = (rows < B)[:, None] & (some < H)[None, :]
        place = rows[:, None] * H + some[None, :]
        now = at[:, None] * H + some[None, :]
        dh_part = tl.load(d_first_h_ptr + place, mask=part, other=0.0)
        dh_part += tl.load(d_h_ptr + now, mask=part, other=0.0)
        dc_part = dh_part
        c = dh_part
        if LSTM:
            dc_part = tl.load(d_first_c_ptr + place, mask=part, other=0.0)
            c = tl.load(c_ptr + B * H + now, mask=part, other=0.0)
        if CELL:
            dc_part += tl.load(d_c_ptr + now, mask=part, other=0.0)
        deltas, rest, _ = _cell_gradient(
            dh_part, dc_part, c, begins, gates_ptr, kept_ptr, entered_ptr, quarter, c_ptr, deltas_ptr,
            at, some, part, H, LSTM,
        )  # fmt: skip
        total += _back(deltas, _weights(w_ptr, some, units, H, 1, H, LSTM), LSTM)
        if LSTM:
            tl.store(d_first_c_ptr + place, tl.where(begins[:, None], 0.0, rest), mask=part)
        else:
            tl.store(d_first_h_ptr + place, rest, mask=part)
    tl.debug_barrier()  # other threads of the program wrote or read a part of the state
    if not LSTM:
        total += tl.load(d_first_h_ptr + own, mask=inside, other=0.0)
    tl.store(d_first_h_ptr + own, tl.where(begins[:, None], 0.0, total), mask=inside)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["quarter", "L", "B"], do_not_specialize_on_alignment=["reset_ptr"])
def _backward(
    d_h_ptr, d_c_ptr, gates_ptr, kept_ptr, entered_ptr, quarter, c_ptr, w_ptr, reset_ptr, deltas_ptr,
    d_first_h_ptr, d_first_c_ptr, L, B,
    H: tl.constexpr, LSTM: tl.constexpr, RESET: tl.constexpr, CELL: tl.constexpr, RESIDENT: tl.constexpr,
    TILE_H: tl.constexpr, TILE_B: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients before the gates' activations `[L, B, 4 H]`, and by the first states.

    Those of a GRU's new gate are by the input's part and, last, by the recurrent part. `CELL`: the
    cell states have gradients `d_c`. Streaming, `d_first` hold what passes from step to step.
    """
    rows = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    units = tl.arange(0, TILE_H)
    inside = (rows < B)[:, None] & (units < H)[None, :]
    own = rows[:, None] * H + units[None, :]
    dh = tl.zeros((TILE_B, TILE_H), tl.float32)
    dc = dh
    c = dh
    if RESIDENT:
        weights = _weights(w_ptr, units, units, H, 1, H, LSTM)
        if LSTM:
            c = tl.load(c_ptr + L * B * H + own, mask=inside, other=0.0)
    begins = _begins(reset_ptr, (L - 1) * B + rows, rows, L - 1, L, B, RESET)
    for step in tl.range(0, L, num_stages=STAGES if RESIDENT else 1):
        t = L - 1 - step
        at = (t * B + rows).to(tl.int64)
        following = _begins(reset_ptr, at - B, rows, t - 1, L, B, RESET)
        if RESIDENT:
            dh += tl.load(d_h_ptr + at[:, None] * H + units[None, :], mask=inside, other=0.0)
            if CELL:
                dc += tl.load(d_c_ptr + at[:, None] * H + units[None, :], mask=inside, other=0.0)
            deltas, rest, c = _cell_gradient(
                dh, dc, c, begins, gates_ptr, kept_ptr, entered_ptr, quarter, c_ptr, deltas_ptr, at, units, inside,
                H, LSTM,
            )  # fmt: skip
            dh = _back(deltas, weights, LSTM)
            if LSTM:
                dc = tl.where(begins[:, None], 0.0, rest)
            else:
                dh += rest
            dh = tl.where(begins[:, None], 0.0, dh)
        else:
            _streamed_gradient(
                begins, d_h_ptr, d_c_ptr, gates_ptr, kept_ptr, entered_ptr, quarter, c_ptr, w_ptr, deltas_ptr,
                d_first_h_ptr, d_first_c_ptr, at, rows, units, B, H, LSTM, CELL, TILE_H, TILE_B, CHUNK, STAGES,
            )  # fmt: skip
        begins = following
    if RESIDENT:
        tl.store(d_first_h_ptr + own, dh, mask=inside)
        if LSTM:
            tl.store(d_first_c_ptr + own, dc, mask=inside)


class Sequence(torch.autograd.Function):
    """A layer over a sequence; `keep` says whether a backward pass may follow."""

    @staticmethod
    def forward(
        ctx: Any, keep: bool, cell: nn.LSTMCell | nn.GRUCell, x: Tensor, reset: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the states after each step; `tensors` are the first states and the parameters."""
        *state, w_ih, w_hh, b_ih, b_hh = tensors
        ctx.set_materialize_grads(False)
        length, count, features = x.shape
        flat = x.reshape(-1, features).contiguous()
        units = w_hh.shape[1]
        half = _tf32()
        pre = _layer(flat, w_ih, b_ih, 0, flat.dtype, flat.dtype)
        states = [torch.cat([part[None], part.new_empty(length, count, units)]) for part in state]
        is_lstm = len(states) > 1
        joined = _joined(flat, units) if keep else pre
        kept = flat.new_empty(len(flat), units) if keep and not is_lstm else pre
        shape = _shape(units, is_lstm, half, False, x.device)
        _forward[(triton.cdiv(count, shape["TILE_B"]),)](
            pre, w_hh.half() if half else w_hh, b_hh, flat if reset is None else reset.view(torch.uint8),
            states[0], states[-1], kept, joined, int(keep), joined.shape[1] // 4, length, count,
            H=units, LSTM=is_lstm, RESET=reset is not None, **shape,
        )  # fmt: skip
        ctx.cell = cell
        ctx.count = len(states)
        if keep:
            ctx.save_for_backward(x, reset, *tensors, pre, kept, joined, states[-1])
        return tuple(part[1:] for part in states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients by input, first states and parameters."""
        x, reset, *saved = ctx.saved_tensors
        *tensors, pre, kept, joined, last = saved
        if torch.is_grad_enabled():
            return _again(ctx.cell, x, reset, tensors, gradients)
        w_ih, w_hh = tensors[ctx.count : ctx.count + 2]
        length, count, features = x.shape
        units = w_hh.shape[1]
        half = _tf32()
        is_lstm = ctx.count > 1
        d_h = x.new_zeros(length, count, units) if gradients[0] is None else gradients[0].contiguous()
        d_c = None if gradients[-1] is None or not is_lstm else gradients[-1].contiguous()
        deltas = x.new_empty(length * count, 4 * units)
        d_first = [x.new_zeros(count, units) for _ in range(ctx.count)]
        shape = _shape(units, is_lstm, half, True, x.device)
        _backward[(triton.cdiv(count, shape["TILE_B"]),)](
            d_h, d_h if d_c is None else d_c, pre, kept, joined, joined.shape[1] // 4, last,
            w_hh.half() if half else w_hh, d_h if reset is None else reset.view(torch.uint8), deltas,
            d_first[0], d_first[-1], length, count,
            H=units, LSTM=is_lstm, RESET=reset is not None, CELL=d_c is not None, **shape,
        )  # fmt: skip
        [product] = weight_gradients([deltas], [joined])
        by_input = product[: len(w_ih)]
        by_state = product if is_lstm else torch.cat([product[: 2 * units], product[3 * units :]])
        end = units + features
        d_x = (deltas[:, : len(w_ih)] @ w_ih).view_as(x) if ctx.needs_input_grad[2] else None
        own = by_input[:, units:end], by_state[:, :units], by_input[:, end], by_state[:, end]
        return None, None, d_x, None, *d_first, *own


def _joined(x: Tensor, units: int) -> Tensor:
    """Return rows of space for hidden states, inputs and 1, padded to a multiple of 16 bytes.

    The gates' gradients times these are the gradients of all weights and biases.
    """
    rows, features = x.shape
    joined = x.new_empty(rows, triton.cdiv(units + features + 1, 4) * 4)
    joined[:, units : units + features] = x
    joined[:, units + features :] = 0.0
    joined[:, units + features] = 1.0
    return joined


def _again(
    cell: nn.Module, x: Tensor, reset: Tensor | None, tensors: list[Tensor], gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again."""
    count = len(gradients)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        weights = dict(zip(names, tensors[count:], strict=True))

        def call(*args: Any) -> Any:
            return torch.func.functional_call(cell, weights, args)

        return torch.stack(recurrent_layer.plain(x, call, tensors[:count], reset))

    units = tensors[0].shape[-1]
    full = [x.new_zeros(*x.shape[:2], units) if part is None else part for part in gradients]
    of_x, *others = double_backward(run, (x, *tensors), torch.stack(full))
    return None, None, of_x, None, *others


def is_supported(x: Tensor, cell: Any, state: tuple[Tensor, ...] = (), reset: Tensor | None = None) -> bool:
    """Return whether a layer runs in one launch: torch's cells of float32 where TF32 is allowed.

    They have at most `MAX_UNITS` units, a bias and no hooks, on a GPU with `SHARED_MEMORY`.
    """
    if type(cell) not in (nn.LSTMCell, nn.GRUCell) or not on_gpu(x) or x.dtype != torch.float32 or not _tf32():
        return False
    hooked = cell._forward_hooks or cell._forward_pre_hooks or cell._backward_hooks or "forward" in vars(cell)
    fits = cell.bias and cell.hidden_size <= MAX_UNITS and _shared_memory(x.device) >= SHARED_MEMORY
    return fits and not hooked


@kernel(of=recurrent_layer, accepts=is_supported)
def fused_recurrent_layer(
    x: Tensor, cell: nn.LSTMCell | nn.GRUCell, state: tuple[Tensor, ...], reset: Tensor | None
) -> tuple[Tensor, ...]:
    """Run all steps in one launch; for layers of up to `MAX_UNITS` units where TF32 is allowed."""
    weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    starts = None if reset is None else reset.contiguous()
    return Sequence.apply(torch.is_grad_enabled(), cell, x, starts, *state, *weights)

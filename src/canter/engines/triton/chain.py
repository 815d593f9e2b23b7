"""A whole network in one launch, and the gradients of the weights of several networks.

M samples (rows of the products), P parameters.

A block of samples passes through all layers on chip. Layers come in pairs: a few columns of the
first are computed at a time and consumed by the second at once, so that neither a wide layer nor
its weights need to fit as a whole. Outputs that the backward pass needs are written once, features
first, `[N, M]`, as tensor cores read a product over samples. The backward pass runs in the same
way: a layer multiplies by the transposed weights and the slope of its activation.

Factors are float16 where TF32 is allowed: it has TF32's mantissa and half its size. The network's
inputs, which may be beyond its range, are multiplied in TF32, and gradients are divided by a scale
until their sums are complete. All sums are float32.

Each tile of a weight gradient is a product over all samples, cut into parts that fill the chip; one
kernel adds up all parts in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.engines.triton.kernels.linear import _activate, _slope, _tf32

TILE = 128
STEP = 64
Product = tuple[int, int, int, int, int]
BLOCKS = 264
"""Blocks that the samples are cut for, two for each processor of an H200; the same on any GPU, and
so are the bits."""


@triton.jit
def _products(
    d_ptr, x_ptr, jobs_ptr, scale_ptr, out_ptr, M, STRIDE, SPAN, TILE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Compute a tile of `scale * d @ x.T` over a part of the samples; both are features first."""
    job = jobs_ptr + tl.program_id(0) * 6
    part = tl.program_id(1)
    i = tl.arange(0, TILE)
    d_row = tl.load(job)
    height = tl.load(job + 1)
    x_row = tl.load(job + 2)
    width = tl.load(job + 3)
    d_ptr += (d_row + i).to(tl.int64)[:, None] * M
    x_ptr += (x_row + i).to(tl.int64)[None, :] * M
    total = tl.zeros((TILE, TILE), tl.float32)
    stop = tl.minimum(M, (part + 1) * SPAN)
    for start in range(part * SPAN, stop, STEP):
        rows = start + tl.arange(0, STEP)
        d = tl.load(d_ptr + rows[None, :], mask=(i < height)[:, None] & (rows < stop)[None, :], other=0.0)
        x = tl.load(x_ptr + rows[:, None], mask=(i < width)[None, :] & (rows < stop)[:, None], other=0.0)
        total = tl.dot(d, x, total, input_precision="ieee")
    total *= tl.load(scale_ptr)
    where = tl.load(job + 4)
    stride = tl.load(job + 5)
    inside = (i < height)[:, None] & (i < width)[None, :]
    tl.store(out_ptr + part * STRIDE + where + i[:, None] * stride + i[None, :], total, mask=inside)


@triton.jit
def _share(count_ptr, COUNTS):
    """Return one over the sum of `COUNTS` counts; without samples all sums are zero."""
    count = 0.0
    for start in range(0, COUNTS, 512):
        i = start + tl.arange(0, 512)
        count += tl.sum(tl.load(count_ptr + i, mask=i < COUNTS, other=0.0), 0)
    return 1.0 / tl.maximum(count, 1e-9)


@triton.jit
def _add_up(
    parts_ptr, sums_ptr, places_ptr, count_ptr, out_ptr, means_ptr, P, STRIDE, PARTS, ROWS, COLUMNS, COUNTS,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Add up the parts `[PARTS, STRIDE]` of weight gradients, and rows of `sums` with a place.

    The first six rows are added up to `means`.
    """
    weight = _share(count_ptr, COUNTS)
    tiles = tl.cdiv(P, TILE)
    if tl.program_id(0) < tiles:
        columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
        parts = tl.arange(0, TILE_P)
        inside = (parts < PARTS)[:, None] & (columns < P)[None, :]
        total = tl.sum(tl.load(parts_ptr + parts[:, None] * STRIDE + columns[None, :], mask=inside, other=0.0), 0)
        # Other entries of P were not written by a product.
        written = tl.load(places_ptr + ROWS + columns, mask=columns < P, other=0) != 0
        tl.store(out_ptr + columns, total * weight, mask=written)
    else:
        rows = (tl.program_id(0) - tiles) * TILE_R + tl.arange(0, TILE_R)
        summed = tl.zeros((TILE_R,), tl.float32)
        for start in range(0, COLUMNS, 128):
            block = start + tl.arange(0, 128)
            within = (rows < ROWS)[:, None] & (block < COLUMNS)[None, :]
            summed += tl.sum(tl.load(sums_ptr + rows[:, None] * COLUMNS + block[None, :], mask=within, other=0.0), 1)
        place = tl.load(places_ptr + rows, mask=rows < ROWS, other=-1)
        tl.store(out_ptr + place, summed * weight, mask=place >= 0)
        tl.store(means_ptr + rows, summed * weight, mask=rows < 6)


class RowProducts:
    """Products over samples, and their offsets among the P gradients.

    `products` are, for each network, `d_row, N, x_row, K, place` of each weight gradient `[N, K]`;
    `sums` is the offset of each row's sum, -1 for none.
    """

    def __init__(self, products: list[list[Product]], sums: list[int], count: int, device: torch.device) -> None:
        jobs = [[job for product in network for job in _tiles(*product)] for network in products]
        multiplied = torch.zeros(count, dtype=torch.int32)
        for _, height, _, width, place in (product for network in products for product in network):
            multiplied[place : place + height * width] = 1
        self.jobs = [torch.tensor(network, dtype=torch.int32, device=device) for network in jobs]
        self.places = torch.cat([torch.tensor(sums, dtype=torch.int32), multiplied]).to(device)
        self.count = count
        self.rows = len(sums)
        self.parts = min(32, max(1, BLOCKS // sum(map(len, jobs))))

    def empty(self) -> Tensor:
        """Return a buffer for weight gradients of parts of the samples, at least `[parts, P]`."""
        return torch.empty((self.parts, triton.cdiv(self.count, 16) * 16), device=self.places.device)

    def __call__(self, network: int, deltas: Tensor, made: Tensor, scale: Tensor, out: Tensor) -> None:
        """Compute the weight gradients of a network over parts of the samples, of which `deltas` are `1 / scale`."""
        m = made.shape[1]
        jobs = self.jobs[network]
        span = triton.cdiv(triton.cdiv(m, self.parts), STEP) * STEP
        _products[(len(jobs), self.parts)](
            deltas, made, jobs, scale, out, m, out.shape[1], span, TILE=TILE, STEP=STEP, num_warps=8, num_stages=4
        )  # fmt: skip

    def add_up(self, parts: Tensor, sums: Tensor, count: Tensor, out: Tensor) -> Tensor:
        """Add up all P gradients from parts and sums `[R, blocks]`; return the means `[6]` of the first rows.

        `count` adds up to the number of samples.
        """
        means = sums.new_empty(6)
        tile = 128
        tile_r = 16
        grid = (triton.cdiv(self.count, tile) + triton.cdiv(self.rows, tile_r),)
        _add_up[grid](
            parts, sums, self.places, count, out, means, self.count, parts.shape[1], self.parts, self.rows,
            sums.shape[1], len(count), TILE=tile, TILE_P=triton.next_power_of_2(self.parts), TILE_R=tile_r,
        )  # fmt: skip
        return means


def _tiles(d_row: int, height: int, x_row: int, width: int, place: int) -> list[tuple[int, ...]]:
    return [
        (d_row + n, height - n, x_row + k, width - k, place + n * width + k, width)
        for n in range(0, height, TILE)
        for k in range(0, width, TILE)
    ]


def factor_type() -> tuple[torch.dtype, tl.dtype]:
    """Return the type of factors, for tensors and for kernels."""
    return (torch.float16, tl.float16) if _tf32() else (torch.float32, tl.float32)


TILE_M = 64
"""Samples of a block, the same for acting and for learning, so that both have the same bits."""

SHAPE = {"TILE_M": TILE_M, "CHUNK": 32, "num_warps": 4, "num_stages": 3}


class Layers:
    """Weights `[N, K]` and biases `[N]` of all layers of a network.

    An activation follows all but the last. Several `heads`, each a weight and a bias, are
    concatenated as the last layer.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor], kind: int, *heads: tuple[Tensor, Tensor]) -> None:
        self.kind = kind
        self.heads = tuple(zip(*heads, strict=True)) if heads else ((weights[-1],), (biases[-1],))
        if heads:
            joined = [torch.cat([part.detach() for part in parts]) for parts in self.heads]
            weights = [*weights, joined[0]]
            biases = [*biases, joined[1]]
        self.weights = tuple(weights)
        self.biases = tuple(biases)
        self.widths = (weights[0].shape[1], *(weight.shape[0] for weight in weights))
        self.back = [*range(len(weights) - 2, -1, -1), len(weights) - 1]
        """Layers in the order of their stored gradients: backward, and the last layer last."""
        self.back_widths = tuple(self.widths[layer + 1] for layer in self.back)

    @torch.no_grad()
    def factors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the current weights as factors `[N, K]`, and all but the first backwards as `[K, N]`."""
        for parts, whole in zip(self.heads, (self.weights[-1], self.biases[-1]), strict=True):
            if len(parts) > 1:
                torch.cat(parts, out=whole)
        first, *weights = self.weights
        dtype, kernel_dtype = factor_type()
        factors = tuple(torch.empty_like(weight, dtype=dtype) for weight in weights)
        turned = tuple(weight.new_empty(weight.shape[::-1], dtype=dtype) for weight in weights)
        if weights:
            shapes = tuple(size for weight in weights for size in weight.shape)
            tiles = max(triton.cdiv(n, 32) * triton.cdiv(k, 32) for n, k in (weight.shape for weight in weights))
            grid = (tiles, len(weights))
            _factors[grid](tuple(weights), factors, turned, SHAPES=shapes, FACTOR=kernel_dtype, TILE=32)
        return (first, *factors), turned[::-1]

    @property
    def fits(self) -> bool:
        """Every layer that is kept on chip as a whole, forward or backward, has room there."""
        wholes = self.widths[2:-1:2] + self.widths[-3:0:-2]
        return self.widths[0] <= 256 and max(wholes, default=0) <= 256 and self.widths[-1] <= 128

    def __call__(self, x: Tensor, needed: Tensor | None = None) -> Tensor:
        """Return the output `[M, N]` for `[M, K]`.

        With `needed` `[M]`, only rows where it is True are defined.
        """
        m, _ = x.shape
        out = x.new_empty(x.shape[0], self.widths[-1])
        x = x.contiguous()
        marks = (x if needed is None else needed.contiguous()).view(torch.uint8)
        made = (out,) * (len(self.widths) - 1)
        _run_alone[(triton.cdiv(m, TILE_M),)](
            x, marks, self.factors()[0], self.biases, made, m, int(needed is not None),
            WIDTHS=self.widths, KIND=self.kind, FACTOR=factor_type()[1], **SHAPE,
        )  # fmt: skip
        return out


@triton.constexpr_function
def room(widths: tuple[int, ...], layer: int) -> int:
    """Return a layer's width as padded for tensor cores."""
    return max(16, triton.next_power_of_2(widths[layer]))


@triton.jit
def _weights(w_ptr, outputs, inputs, N: tl.constexpr, K: tl.constexpr):
    """Load a part `[inputs, outputs]` of weights `[N, K]`."""
    inside = (outputs < N)[None, :] & (inputs < K)[:, None]
    return tl.load(w_ptr + outputs[None, :] * K + inputs[:, None], mask=inside, other=0.0)


@triton.jit
def _factor(x, FACTOR: tl.constexpr):
    """Convert a factor; numbers beyond float16's range become its largest ones."""
    if tl.float16 == FACTOR:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(FACTOR)


@triton.jit
def _factors(weights, factors, turned, SHAPES: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr):
    """Convert each of `weights` `[N, K]` to factors, and transpose these to `[K, N]`."""
    for i in tl.static_range(len(weights)):
        if tl.program_id(1) == i:
            across = tl.cdiv(SHAPES[2 * i + 1], TILE)
            n = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
            k = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
            inside = (n < SHAPES[2 * i])[:, None] & (k < SHAPES[2 * i + 1])[None, :]
            place = n[:, None] * SHAPES[2 * i + 1] + k[None, :]
            w = _factor(tl.load(weights[i] + place, mask=inside, other=0.0), FACTOR)
            tl.store(factors[i] + place, w, mask=inside)
            tl.store(turned[i] + k[:, None] * SHAPES[2 * i] + n[None, :], tl.trans(w), mask=tl.trans(inside))


@triton.jit
def _side(side_ptr, rows, columns, M, N: tl.constexpr, BACK: tl.constexpr):
    """Load the biases of columns, or backward the output of the layer.

    Loaded before the products, so that it has arrived when they are done.
    """
    if BACK:
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        return tl.load(side_ptr + columns[None, :] * M + rows[:, None], mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.load(side_ptr + columns, mask=columns < N, other=0.0)[None, :]


@triton.jit
def _finish(
    total, side, sums_ptr, made_ptr, rows, columns, M, scale, N: tl.constexpr, ENDS: tl.constexpr,
    KIND: tl.constexpr, BACK: tl.constexpr, KEEP: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Finish columns of a layer from their sums of products, store them and return them as factors.

    Forward: the activation of sum and bias, or the sum alone in the layer that `ENDS` a network.
    Backward: the gradient times the slope of the layer's output, and its sum over the block of
    samples.
    """
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if BACK:
        total *= _slope(side, KIND)
        where = sums_ptr + columns * tl.num_programs(0) + tl.program_id(0)
        tl.store(where, scale * tl.sum(total, 0), mask=columns < N)
    else:
        total += side
        if ENDS:
            tl.store(made_ptr + rows[:, None] * N + columns[None, :], total, mask=inside)
        else:
            total = _activate(total, KIND)
    factor = _factor(total, FACTOR)
    if KEEP and not ENDS:
        tl.store(made_ptr + columns[None, :] * M + rows[:, None], factor, mask=inside)
    return factor


@triton.jit
def _chain(
    h, rows, M, scale, weights, sides, sums, made, WIDTHS: tl.constexpr, TILE_M: tl.constexpr,
    KIND: tl.constexpr, BACK: tl.constexpr, KEEP: tl.constexpr, FACTOR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Run rows `h` `[TILE_M, room(WIDTHS, 0)]` through all layers of `WIDTHS`.

    `sides` are biases, or backward each layer's output; `sums` receive the sums of a block in the
    backward pass, times `scale`.
    """
    for layer in tl.static_range(0, len(WIDTHS) - 1, 2):
        h = _pair(
            h, rows, M, scale, weights, sides, sums, made, layer, WIDTHS, TILE_M, KIND, BACK, KEEP, FACTOR, CHUNK
        )  # fmt: skip


@triton.jit
def _pair(
    h, rows, M, scale, weights, sides, sums, made, LAYER: tl.constexpr, WIDTHS: tl.constexpr, TILE_M: tl.constexpr,
    KIND: tl.constexpr, BACK: tl.constexpr, KEEP: tl.constexpr, FACTOR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Run rows through a layer, and if there is one through the next."""
    precision: tl.constexpr = "ieee" if tl.float32 == FACTOR else "tf32"
    last: tl.constexpr = len(WIDTHS) - 2
    n: tl.constexpr = WIDTHS[LAYER + 1]
    inputs = tl.arange(0, room(WIDTHS, LAYER))
    after: tl.constexpr = LAYER + 2 if last > LAYER else LAYER + 1
    outputs = tl.arange(0, room(WIDTHS, after))
    total = tl.zeros((TILE_M, room(WIDTHS, after)), tl.float32)
    for start in range(0, n, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        side = _side(sides[LAYER], rows, columns, M, n, BACK)
        w = _weights(weights[LAYER], columns, inputs, n, WIDTHS[LAYER])
        part = tl.dot(h, w, input_precision=precision)
        part = _finish(
            part, side, sums[LAYER], made[LAYER], rows, columns, M, scale, n, not BACK and last == LAYER,
            KIND, BACK, KEEP, FACTOR,
        )  # fmt: skip
        if last > LAYER:
            w = _weights(weights[LAYER + 1], outputs, columns, WIDTHS[after], n)
            total = tl.dot(part, w, total, input_precision=precision)
    if last > LAYER:
        side = _side(sides[LAYER + 1], rows, outputs, M, WIDTHS[after], BACK)
        return _finish(
            total, side, sums[LAYER + 1], made[LAYER + 1], rows, outputs, M, scale, WIDTHS[after],
            not BACK and last == LAYER + 1, KIND, BACK, KEEP, FACTOR,
        )  # fmt: skip
    else:
        return h


@triton.jit(do_not_specialize=["sparse"])
def _run_alone(
    x_ptr, needed_ptr, weights, biases, made, M, sparse, WIDTHS: tl.constexpr, KIND: tl.constexpr,
    FACTOR: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute all rows, or if `sparse` only blocks with a needed one; only the output is stored."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    inputs = tl.arange(0, room(WIDTHS, 0))
    needed = tl.load(needed_ptr + rows, mask=(rows < M) & (sparse != 0), other=1)
    if tl.max(needed.to(tl.int32), 0) != 0:
        inside = (rows < M)[:, None] & (inputs < WIDTHS[0])[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * WIDTHS[0] + inputs[None, :], mask=inside, other=0.0)
        _chain(x, rows, M, 1.0, weights, biases, biases, made, WIDTHS, TILE_M, KIND, False, False, FACTOR, CHUNK)

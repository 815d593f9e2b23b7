"""Gradients of all weights and biases of several networks, from what their layers made and what came back.

M rows, P parameters. Each tile of a weight gradient is a product over all rows, cut into parts so that there is work
for the whole chip; one kernel adds up all parts, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.kernels.linear import _tf32

TILE, STEP = 128, 32
Product = tuple[int, int, int, int, int]
BLOCKS = 264
"""How many blocks the rows are cut for, two for each processor of an H200; the same on any, and so are the bits."""


@triton.jit
def _products(
    d_ptr, x_ptr, jobs_ptr, out_ptr, M, STRIDE, SPAN, TF32: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """A tile of `d @ x.T` over a part of the rows; both are features first."""
    job, part, i = jobs_ptr + tl.program_id(0) * 6, tl.program_id(1), tl.arange(0, TILE)
    d_row, height, x_row, width = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    d_ptr += (d_row + i).to(tl.int64)[:, None] * M
    x_ptr += (x_row + i).to(tl.int64)[None, :] * M
    total = tl.zeros((TILE, TILE), tl.float32)
    stop = tl.minimum(M, (part + 1) * SPAN)
    for start in range(part * SPAN, stop, STEP):
        rows = start + tl.arange(0, STEP)
        d = tl.load(d_ptr + rows[None, :], mask=(i < height)[:, None] & (rows < stop)[None, :], other=0.0)
        x = tl.load(x_ptr + rows[:, None], mask=(i < width)[None, :] & (rows < stop)[:, None], other=0.0)
        total = tl.dot(d, x, total, input_precision="tf32" if TF32 else "ieee")
    where, stride = tl.load(job + 4), tl.load(job + 5)
    inside = (i < height)[:, None] & (i < width)[None, :]
    tl.store(out_ptr + part * STRIDE + where + i[:, None] * stride + i[None, :], total, mask=inside)


@triton.jit
def _share(count_ptr, COUNTS):
    """One over the sum of `COUNTS` counts; where nothing counts, all sums are zero."""
    count = 0.0
    for start in range(0, COUNTS, 512):
        i = start + tl.arange(0, 512)
        count += tl.sum(tl.load(count_ptr + i, mask=i < COUNTS, other=0.0), 0)
    return 1.0 / tl.maximum(count, 1e-9)


@triton.jit
def _add_up(
    parts_ptr, sums_ptr, places_ptr, count_ptr, out_ptr, P, STRIDE, PARTS, ROWS, COLUMNS, COUNTS,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Weights from their parts `[PARTS, STRIDE]`, and rows of `sums` `[ROWS, COLUMNS]` that have a place among them."""
    weight, tiles = _share(count_ptr, COUNTS), tl.cdiv(P, TILE)
    if tl.program_id(0) < tiles:
        columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
        parts = tl.arange(0, TILE_P)
        inside = (parts < PARTS)[:, None] & (columns < P)[None, :]
        total = tl.sum(tl.load(parts_ptr + parts[:, None] * STRIDE + columns[None, :], mask=inside, other=0.0), 0)
        # Elsewhere in P nothing was written by a product.
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


class RowProducts:
    """What is to be multiplied and where in the P gradients it goes.

    `products` are, for each network, `d_row, N, x_row, K, place` of each weight gradient `[N, K]`; `sums` is the place
    of each row's sum, -1 for none.
    """

    def __init__(self, products: list[list[Product]], sums: list[int], count: int, device: torch.device) -> None:
        jobs = [[job for product in network for job in _tiles(*product)] for network in products]
        multiplied = torch.zeros(count, dtype=torch.int32)
        for _, height, _, width, place in (product for network in products for product in network):
            multiplied[place : place + height * width] = 1
        self.jobs = [torch.tensor(network, dtype=torch.int32, device=device) for network in jobs]
        self.places = torch.cat([torch.tensor(sums, dtype=torch.int32), multiplied]).to(device)
        self.count, self.rows = count, len(sums)
        self.parts = min(32, max(1, BLOCKS // sum(map(len, jobs))))

    def empty(self) -> Tensor:
        """Room for weight gradients over parts of the rows, `[parts, P]` and a little more."""
        return torch.empty((self.parts, triton.cdiv(self.count, 16) * 16), device=self.places.device)

    def __call__(self, network: int, deltas: Tensor, made: Tensor, out: Tensor) -> None:
        """Weight gradients of a network over parts of the rows, from `[features, M]` each."""
        m, jobs = made.shape[1], self.jobs[network]
        span = triton.cdiv(triton.cdiv(m, self.parts), STEP) * STEP
        _products[(len(jobs), self.parts)](
            deltas, made, jobs, out, m, out.shape[1], span,
            TF32=_tf32(), TILE=TILE, STEP=STEP, num_warps=8, num_stages=3,
        )  # fmt: skip

    def add_up(self, parts: Tensor, sums: Tensor, count: Tensor, out: Tensor) -> None:
        """All P gradients, from parts and from sums `[R, blocks]`; `count` adds up to the number of rows."""
        tile, tile_r = 128, 16
        grid = (triton.cdiv(self.count, tile) + triton.cdiv(self.rows, tile_r),)
        _add_up[grid](
            parts, sums, self.places, count, out, self.count, parts.shape[1], self.parts, self.rows, sums.shape[1],
            len(count),
            TILE=tile, TILE_P=triton.next_power_of_2(self.parts), TILE_R=tile_r,
        )  # fmt: skip


def _tiles(d_row: int, height: int, x_row: int, width: int, place: int) -> list[tuple[int, ...]]:
    return [
        (d_row + n, height - n, x_row + k, width - k, place + n * width + k, width)
        for n in range(0, height, TILE)
        for k in range(0, width, TILE)
    ]

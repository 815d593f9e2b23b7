"""A minibatch of PPO in two launches: both networks forward; the loss of a Gaussian policy and its critic, and back.

M rows, A action components, blocks of TILE_M rows. Policy and critic share no number, so that each block of rows goes
through one of them. What comes out are sums over rows, not yet divided by their number: that is known once all blocks
are through.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from canter.kernels.chain import SHAPE, TILE_M, Layers, _chain, room
from canter.kernels.gaussian_loss import _surrogate, _value_error
from canter.kernels.gaussian_params import _log_prob
from canter.kernels.linear import _tf32
from canter.kernels.row_products import RowProducts

BACK_SHAPE = SHAPE | {"num_stages": 2}
TERMS = 6
"""Rows of `sums` before all others: surrogate, value error, entropy, KL, clipped and valid rows."""


@triton.jit
def _note(sums_ptr, row, x, valid):
    """Row `row` of `sums` `[rows, blocks]`: the sum of `x` over the valid rows of this block."""
    # Filled, not multiplied: whatever a row holds that is not valid, NaN included, must not come through.
    tl.store(sums_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(valid, x, 0.0), 0))


@triton.jit
def _policy_gradient(
    rows, where, M, mean_ptr, raw_ptr, action_ptr, old_ptr, advantage_ptr, valid_ptr, entropy_coef_ptr,
    sums_ptr, d_raw_ptr, clip_ratio, mid, half, A: tl.constexpr, TILE_A: tl.constexpr,
):  # fmt: skip
    """The policy's terms of a block of rows, and its gradient by the mean, `[TILE_M, TILE_A]`."""
    parts, inside = tl.arange(0, TILE_A), rows < M
    both = inside[:, None] & (parts < A)[None, :]
    mean = tl.load(mean_ptr + rows[:, None] * A + parts[None, :], mask=both, other=0.0)
    action = tl.load(action_ptr + where[:, None] * A + parts[None, :], mask=both, other=0.0)
    old_mean = tl.load(old_ptr + where[:, None] * (2 * A) + parts[None, :], mask=both, other=0.0)
    old_log_std = tl.load(old_ptr + where[:, None] * (2 * A) + A + parts[None, :], mask=both, other=0.0)
    x = tl.load(raw_ptr + parts, mask=parts < A, other=0.0) / half
    root = tl.sqrt_rn(1.0 + x * x)
    log_std = (mid + half * x / root)[None, :] + tl.zeros_like(mean)
    precision = tl.exp(-log_std)
    entropy = tl.sum(tl.where(both, log_std + (0.9189385332046727 + 0.5), 0.0), 1)
    shift, log_ratio = (old_mean - mean) * precision, old_log_std - log_std
    kl = tl.sum(tl.where(both, 0.5 * (tl.exp(2.0 * log_ratio) - 1.0) - log_ratio + 0.5 * shift * shift, 0.0), 1)
    surrogate, slope, clipped = _surrogate(
        _log_prob(action, mean, log_std, both),
        _log_prob(action, old_mean, old_log_std, both),
        tl.load(advantage_ptr + where, mask=inside, other=0.0),
        clip_ratio,
    )
    valid = tl.load(valid_ptr + where, mask=inside, other=0) != 0
    _note(sums_ptr, 0, surrogate, valid)
    _note(sums_ptr, 2, entropy, valid)
    _note(sums_ptr, 3, kl, valid)
    _note(sums_ptr, 4, clipped, valid)
    _note(sums_ptr, 5, tl.zeros_like(kl) + 1.0, valid)
    z, counted = (action - mean) * precision, valid[:, None] & both
    d_log_std = tl.where(counted, slope[:, None] * (z * z - 1.0) - tl.load(entropy_coef_ptr), 0.0)
    d_raw = tl.sum(d_log_std, 0) / (root * root * root)
    tl.store(d_raw_ptr + parts * tl.num_programs(0) + tl.program_id(0), d_raw, mask=parts < A)
    return tl.where(counted, slope[:, None] * z * precision, 0.0)


@triton.jit
def _value_gradient(
    rows, where, M, value_ptr, old_ptr, return_ptr, valid_ptr, sums_ptr, value_clip, value_coef,
    CLIPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The value's error over a block of rows, and its gradient in the first column of `[TILE_M, TILE]`."""
    inside = rows < M
    loss, slope = _value_error(
        tl.load(value_ptr + rows, mask=inside, other=0.0),
        tl.load(old_ptr + where, mask=inside, other=0.0),
        tl.load(return_ptr + where, mask=inside, other=0.0),
        value_clip,
        CLIPPED,
    )
    valid = tl.load(valid_ptr + where, mask=inside, other=0) != 0
    _note(sums_ptr, 1, loss, valid)
    return tl.where(valid[:, None] & (tl.arange(0, TILE) == 0)[None, :], (value_coef * slope)[:, None], 0.0)


@triton.jit
def _forth(
    x_ptr, index_ptr, weights, biases, made, M, WIDTHS: tl.constexpr, KIND: tl.constexpr,
    TF32: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rows through a network; `made` is what each layer gives, and last what goes in, features first."""
    rows, inputs = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M), tl.arange(0, room(WIDTHS, 0))
    where = tl.load(index_ptr + rows, mask=rows < M, other=0)
    inside = (rows < M)[:, None] & (inputs < WIDTHS[0])[None, :]
    x = tl.load(x_ptr + where[:, None] * WIDTHS[0] + inputs[None, :], mask=inside, other=0.0)
    tl.store(made[len(WIDTHS) - 1] + inputs[None, :] * M + rows[:, None], x, mask=inside)
    _chain(x, rows, M, weights, biases, biases, made, WIDTHS, TILE_M, KIND, False, True, TF32, CHUNK)


@triton.jit
def _forward(
    index_ptr, actor, critic, M,
    ACTOR: tl.constexpr, ACTOR_KIND: tl.constexpr, CRITIC: tl.constexpr, CRITIC_KIND: tl.constexpr,
    TF32: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Networks are `x, weights, biases, made`; see `_forth`."""
    if tl.program_id(1) == 0:
        _forth(actor[0], index_ptr, actor[1], actor[2], actor[3], M, ACTOR, ACTOR_KIND, TF32, TILE_M, CHUNK)
    else:
        _forth(critic[0], index_ptr, critic[1], critic[2], critic[3], M, CRITIC, CRITIC_KIND, TF32, TILE_M, CHUNK)


@triton.jit
def _back(
    d, rows, M, weights, made, sums, deltas, WIDTHS: tl.constexpr, KIND: tl.constexpr,
    TF32: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The gradient before every layer's activation; the last of `deltas` and `sums` is that of what came out."""
    last: tl.constexpr = len(WIDTHS) - 1
    columns = tl.arange(0, room(WIDTHS, 0))
    inside = (rows < M)[:, None] & (columns < WIDTHS[0])[None, :]
    tl.store(deltas[last] + columns[None, :] * M + rows[:, None], d, mask=inside)
    where = sums[last] + columns * tl.num_programs(0) + tl.program_id(0)
    tl.store(where, tl.sum(d, 0), mask=columns < WIDTHS[0])
    _chain(d, rows, M, weights, made[last - 1 :: -1], sums, deltas, WIDTHS, TILE_M, KIND, True, True, TF32, CHUNK)


@triton.jit
def _backward(
    index_ptr, action_ptr, old_params_ptr, advantage_ptr, old_value_ptr, return_ptr, valid_ptr, raw_ptr,
    entropy_coef_ptr, sums_ptr, d_raw_ptr, actor, critic, M, clip_ratio, value_clip, value_coef, mid, half,
    ACTOR: tl.constexpr, ACTOR_KIND: tl.constexpr, CRITIC: tl.constexpr, CRITIC_KIND: tl.constexpr,
    CLIPPED: tl.constexpr, TF32: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Networks are `turned weights, made, sums, deltas`; see `_back`. Widths are those on the way back."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    where = tl.load(index_ptr + rows, mask=rows < M, other=0)
    if tl.program_id(1) == 0:
        d = _policy_gradient(
            rows, where, M, actor[1][len(ACTOR) - 1], raw_ptr, action_ptr, old_params_ptr, advantage_ptr, valid_ptr,
            entropy_coef_ptr, sums_ptr, d_raw_ptr, clip_ratio, mid, half, ACTOR[0], room(ACTOR, 0),
        )  # fmt: skip
        _back(d, rows, M, actor[0], actor[1], actor[2], actor[3], ACTOR, ACTOR_KIND, TF32, TILE_M, CHUNK)
    else:
        d = _value_gradient(
            rows, where, M, critic[1][len(CRITIC) - 1], old_value_ptr, return_ptr, valid_ptr, sums_ptr,
            value_clip, value_coef, CLIPPED, room(CRITIC, 0),
        )  # fmt: skip
        _back(d, rows, M, critic[0], critic[1], critic[2], critic[3], CRITIC, CRITIC_KIND, TF32, TILE_M, CHUNK)


@triton.jit
def _total(sums_ptr, out_ptr, COLUMNS, TILE: tl.constexpr):
    rows = tl.arange(0, 8)
    total = tl.zeros((8,), tl.float32)
    for start in range(0, COLUMNS, TILE):
        columns = start + tl.arange(0, TILE)
        inside = (rows < 6)[:, None] & (columns < COLUMNS)[None, :]
        total += tl.sum(tl.load(sums_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=inside, other=0.0), 1)
    tl.store(out_ptr + rows, total, mask=rows < 6)


@triton.jit
def _turn(weights, turned, SHAPES: tl.constexpr, TILE: tl.constexpr):
    """Each of `weights` `[N, K]` as `[K, N]`."""
    for i in tl.static_range(len(weights)):
        if tl.program_id(1) == i:
            across = tl.cdiv(SHAPES[2 * i + 1], TILE)
            n = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
            k = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
            inside = (n < SHAPES[2 * i])[:, None] & (k < SHAPES[2 * i + 1])[None, :]
            w = tl.load(weights[i] + n[:, None] * SHAPES[2 * i + 1] + k[None, :], mask=inside, other=0.0)
            tl.store(turned[i] + k[:, None] * SHAPES[2 * i] + n[None, :], tl.trans(w), mask=tl.trans(inside))


class Rows(NamedTuple):
    """What is learnt from, `[S, ...]` each."""

    actor_input: Tensor
    critic_input: Tensor
    action: Tensor
    old_params: Tensor
    advantage: Tensor
    old_value: Tensor
    return_: Tensor
    valid: Tensor


def _cut(features: Tensor, widths: list[tuple[int, ...]]) -> list[tuple[Tensor, ...]]:
    """Rows of each layer of each network, from those of all."""
    views = iter(features.split([width for network in widths for width in network]))
    return [tuple(islice(views, len(network))) for network in widths]


class Passed(NamedTuple):
    """What is left of a minibatch that went through both networks and back."""

    sums: Tensor
    """`[TERMS + A + all biases, blocks]` sums over each block of rows."""
    deltas: Tensor
    """`[features, M]` gradients before each layer's activation."""
    made: Tensor
    """`[features, M]` what went into each layer."""


class Learner:
    """Loss and gradients of a Gaussian actor, whose log-std is the same in every row, and of a critic.

    `places` says where among the `count` gradients each parameter has its own: weights and biases of both networks, and
    the `raw` log-std `[A]`, bounded by middle and half range as in `BoundedLogStd`. `value_clip` None is half the
    squared error.
    """

    def __init__(
        self,
        actor: Layers,
        critic: Layers,
        raw: Tensor,
        *,
        bound: tuple[float, float],
        clip_ratio: float,
        value_clip: float | None,
        value_coef: float,
        places: dict[Tensor, int],
        count: int,
    ) -> None:
        self.networks, self.raw = (actor, critic), raw
        self.numbers = (clip_ratio, value_clip or 0.0, value_coef, *bound)
        self.clipped_value = value_clip is not None
        products, sums = [], [-1] * TERMS + [places[raw] + i for i in range(raw.numel())]
        x_row, d_row = 0, 0
        for network in self.networks:
            starts = dict(zip(network.back, accumulate(network.back_widths, initial=d_row), strict=False))
            for layer, weight in enumerate(network.weights):
                x_start = x_row + sum(network.widths[:layer])
                products.append((starts[layer], weight.shape[0], x_start, weight.shape[1], places[weight]))
            for layer, width in zip(network.back, network.back_widths, strict=True):
                sums += range(places[network.biases[layer]], places[network.biases[layer]] + width)
            x_row, d_row = x_row + sum(network.widths[:-1]), d_row + sum(network.widths[1:])
        self.products = RowProducts(products, sums, count, raw.device)

    def __call__(self, rows: Rows, index: Tensor, entropy_coef: Tensor) -> Passed:
        """Rows `index` `[M]` through both networks and back."""
        m, (actor, critic), like = len(index), self.networks, rows.action
        xs, ds = (
            [network.widths[:-1] for network in self.networks],
            [network.back_widths for network in self.networks],
        )
        made, deltas = like.new_empty(sum(map(sum, xs)), m), like.new_empty(sum(map(sum, ds)), m)
        sums = like.new_empty(self.products.rows, triton.cdiv(m, TILE_M))
        biases = sums[TERMS + self.raw.numel() :]
        kept = [
            (*own[1:], like.new_empty(m, network.widths[-1]), own[0])
            for network, own in zip(self.networks, _cut(made, xs), strict=True)
        ]
        forth = [(x, net.weights, net.biases, own) for x, net, own in zip(rows, self.networks, kept, strict=False)]
        back = list(zip(self._turned(), kept, _cut(biases, ds), _cut(deltas, ds), strict=True))
        same = {"ACTOR_KIND": actor.kind, "CRITIC_KIND": critic.kind, "TF32": _tf32()}
        grid = (sums.shape[1], 2)
        _forward[grid](index, *forth, m, ACTOR=actor.widths, CRITIC=critic.widths, **same, **SHAPE)
        _backward[grid](
            index, *rows[2:], self.raw, entropy_coef, sums, sums[TERMS:], *back, m, *self.numbers,
            ACTOR=actor.widths[:0:-1], CRITIC=critic.widths[:0:-1], CLIPPED=self.clipped_value, **same, **BACK_SHAPE,
        )  # fmt: skip
        return Passed(sums, deltas, made)

    def _turned(self) -> list[tuple[Tensor, ...]]:
        """Weights `[K, N]` of all layers but the first, last one first: what the way back multiplies by."""
        weights = [weight for network in self.networks for weight in network.weights[:0:-1]]
        turned = [weight.new_empty(weight.shape[::-1]) for weight in weights]
        shapes = tuple(size for weight in weights for size in weight.shape)
        tiles = max(triton.cdiv(n, 32) * triton.cdiv(k, 32) for n, k in (weight.shape for weight in weights))
        _turn[(tiles, len(weights))](tuple(weights), tuple(turned), SHAPES=shapes, TILE=32)
        split = len(self.networks[0].weights) - 1
        return [tuple(turned[:split]), tuple(turned[split:])]

    def terms(self, passed: Passed) -> Tensor:
        """Sums `[6]` over all rows: surrogate, value error, entropy, KL, clipped and valid rows."""
        out = passed.sums.new_empty(TERMS)
        _total[(1,)](passed.sums, out, passed.sums.shape[1], TILE=256)
        return out

"""A minibatch of PPO in a few launches: forward, loss, backward and weight gradients.

M samples, A means or logits, blocks of TILE_M samples. Policy and critic share no number and run
concurrently; a shared trunk is one network, whose last column is the value. Results are sums over
samples, divided by the number of valid ones once all blocks are done.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from canter.core.dispatch import concurrently, side_stream
from canter.engines.triton.chain import SHAPE, TILE_M, Layers, RowProducts, _chain, _factor, factor_type, room
from canter.engines.triton.kernels.gaussian_params import FORMS, _log_std
from canter.engines.triton.loss import _value_error
from canter.engines.triton.policies import Bound, Policy, _policy_terms
from canter.functional.densities import StdForm

Tensors = tuple[Tensor, ...]

BACK_SHAPE = SHAPE | {"CHUNK": 64, "num_stages": 2}
TERMS = 7
"""First rows of `sums`: surrogate, value error, entropy, KL, clipped ratios, bound loss and number
of valid samples."""
COUNT = 6
"""Row of the number of valid samples."""


@triton.jit
def _policy_gradient(
    rows, where, M, first_ptr, raw_ptr, action_ptr, old_ptr, advantage_ptr, valid_ptr, entropy_coef_ptr, units_ptr,
    sums_ptr, d_raw_ptr, clip_ratio, log_volume, bound_coef, bound_limit, mid, half,
    STRIDE: tl.constexpr, TILE_A: tl.constexpr, FORM: tl.constexpr,
    A: tl.constexpr, NVEC: tl.constexpr, NODES: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Store the policy's terms of a block of samples.

    Return its gradient by means or logits, `[TILE_M, TILE_A]`, the first A of STRIDE columns.
    """
    parts = tl.arange(0, TILE_A)
    inside = rows < M
    both = inside[:, None] & (parts < A)[None, :]
    first = tl.load(first_ptr + rows[:, None] * STRIDE + parts[None, :], mask=both, other=0.0)
    log_std = tl.zeros_like(first)
    if len(NVEC) == 0:
        own, std_slope = _log_std(tl.load(raw_ptr + parts, mask=parts < A, other=0.0), mid, half, FORM)
        log_std += own[None, :]
    surrogate, entropy, kl, clipped, bound, d_first, d_log_std = _policy_terms(
        first, log_std, rows, where, M, action_ptr, old_ptr, advantage_ptr, entropy_coef_ptr, units_ptr,
        clip_ratio, log_volume, bound_coef, bound_limit, parts, A, NVEC, NODES, BOUND,
    )  # fmt: skip
    valid = tl.load(valid_ptr + where, mask=inside, other=0) != 0
    term = tl.arange(0, 8)[None, :]
    terms = tl.where(term == 0, surrogate[:, None], tl.where(term == 2, entropy[:, None], 1.0))
    terms = tl.where(term == 3, kl[:, None], tl.where(term == 4, clipped[:, None], terms))
    terms = tl.where(term == 5, bound[:, None], terms)
    # Filled, not multiplied: a NaN in an invalid sample must not reach the sums.
    total = tl.sum(tl.where(valid[:, None], terms, 0.0), 0)
    term = tl.arange(0, 8)
    tl.store(sums_ptr + term * tl.num_programs(0) + tl.program_id(0), total, mask=(term < 7) & (term != 1))
    counted = valid[:, None] & both
    if len(NVEC) == 0:
        d_raw = tl.sum(tl.where(counted, d_log_std, 0.0), 0) * std_slope
        tl.store(d_raw_ptr + parts * tl.num_programs(0) + tl.program_id(0), d_raw, mask=parts < A)
    return tl.where(counted, d_first, 0.0)


@triton.jit
def _value_gradient(
    rows, where, M, value_ptr, old_ptr, return_ptr, valid_ptr, sums_ptr, value_clip, value_coef,
    CLIPPED: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the value's error of a block of samples.

    Return its gradient `[TILE_M, TILE]`, the value last.
    """
    inside = rows < M
    loss, slope = _value_error(
        tl.load(value_ptr + rows * (COLUMN + 1) + COLUMN, mask=inside, other=0.0),
        tl.load(old_ptr + where, mask=inside, other=0.0),
        tl.load(return_ptr + where, mask=inside, other=0.0),
        value_clip,
        CLIPPED,
    )
    valid = tl.load(valid_ptr + where, mask=inside, other=0) != 0
    tl.store(sums_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(valid, loss, 0.0), 0))
    return tl.where(valid[:, None] & (tl.arange(0, TILE) == COLUMN)[None, :], (value_coef * slope)[:, None], 0.0)


@triton.jit
def _forward(
    x_ptr, index_ptr, weights, biases, made, M, WIDTHS: tl.constexpr, KIND: tl.constexpr,
    FACTOR: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Run samples through a network.

    `made` receives each layer's output, and last the input, features first.
    """
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    inputs = tl.arange(0, room(WIDTHS, 0))
    where = tl.load(index_ptr + rows, mask=rows < M, other=0)
    inside = (rows < M)[:, None] & (inputs < WIDTHS[0])[None, :]
    x = tl.load(x_ptr + where[:, None] * WIDTHS[0] + inputs[None, :], mask=inside, other=0.0)
    tl.store(made[len(WIDTHS) - 1] + inputs[None, :] * M + rows[:, None], _factor(x, FACTOR), mask=inside)
    _chain(x, rows, M, 1.0, weights, biases, biases, made, WIDTHS, TILE_M, KIND, False, True, FACTOR, CHUNK)


@triton.jit
def _backward(
    index_ptr, action_ptr, old_params_ptr, advantage_ptr, old_value_ptr, return_ptr, valid_ptr, scale_ptr, raw_ptr,
    entropy_coef_ptr, units_ptr, all_sums_ptr, d_raw_ptr, weights, made, sums, deltas, M,
    clip_ratio, log_volume, bound_coef, bound_limit, mid, half, value_clip, value_coef,
    A: tl.constexpr, NVEC: tl.constexpr, NODES: tl.constexpr, FORM: tl.constexpr, BOUND: tl.constexpr,
    CLIPPED: tl.constexpr,
    WIDTHS: tl.constexpr, KIND: tl.constexpr, FACTOR: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient before every activation of a network of A columns, the value, or both.

    The last of `deltas` and `sums` is that of the output. Gradients are divided by `scale`, sums not.
    """
    last: tl.constexpr = len(WIDTHS) - 1
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.arange(0, room(WIDTHS, 0))
    where = tl.load(index_ptr + rows, mask=rows < M, other=0)
    d = tl.zeros((TILE_M, room(WIDTHS, 0)), tl.float32)
    if A > 0:
        d += _policy_gradient(
            rows, where, M, made[last], raw_ptr, action_ptr, old_params_ptr, advantage_ptr, valid_ptr,
            entropy_coef_ptr, units_ptr, all_sums_ptr, d_raw_ptr, clip_ratio, log_volume, bound_coef, bound_limit,
            mid, half, WIDTHS[0], room(WIDTHS, 0), FORM, A, NVEC, NODES, BOUND,
        )  # fmt: skip
    if WIDTHS[0] > A:
        d += _value_gradient(
            rows, where, M, made[last], old_value_ptr, return_ptr, valid_ptr, all_sums_ptr,
            value_clip, value_coef, CLIPPED, A, room(WIDTHS, 0),
        )  # fmt: skip
    place = sums[last] + columns * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.sum(d, 0), mask=columns < WIDTHS[0])
    scale = tl.load(scale_ptr)
    inside = (rows < M)[:, None] & (columns < WIDTHS[0])[None, :]
    factor = _factor(d / scale, FACTOR)
    tl.store(deltas[last] + columns[None, :] * M + rows[:, None], factor, mask=inside)
    outputs = made[last - 1 :: -1]
    _chain(factor, rows, M, scale, weights, outputs, sums, deltas, WIDTHS, TILE_M, KIND, True, True, FACTOR, CHUNK)


class Samples(NamedTuple):
    """Samples to learn from, `[S, ...]` each."""

    actor_input: Tensor
    critic_input: Tensor
    action: Tensor
    old_params: Tensor
    advantage: Tensor
    old_value: Tensor
    return_: Tensor
    valid: Tensor
    scales: Tensor
    """`[2]`, sizes of the gradients of policy and value."""


class Learner:
    """Loss and gradients of a critic and an actor, with a log-std independent of the input if any.

    The critic is None with a shared trunk: the value is then the last of the actor's columns.
    `places` are the offsets of each parameter among the `count` gradients: weights and biases of
    both networks, and the learned numbers `raw` of the std `[A]`, or `[0]` for discrete actions;
    middle, half range and form are those of `LogStd`. `value_clip` None is half the squared error.
    """

    def __init__(
        self,
        actor: Layers,
        critic: Layers | None,
        raw: Tensor,
        *,
        policy: Policy,
        std: tuple[float, float, StdForm],
        bound: Bound,
        clip_ratio: float,
        value_clip: float | None,
        value_coef: float,
        places: dict[Tensor, int],
        count: int,
    ) -> None:
        self.networks = (actor,) if critic is None else (actor, critic)
        self.raw = raw
        self.stream = side_stream(raw.device)
        self.units = bound.units
        self.numbers = clip_ratio, policy.log_volume, bound.coef, bound.limit, *std[:2], value_clip or 0.0, value_coef
        self.form = policy.constants | {
            "FORM": FORMS.index(std[2]), "BOUND": bound.form, "CLIPPED": value_clip is not None,
        }  # fmt: skip
        sums = [-1] * TERMS + [places[raw] + i for i in range(raw.numel())]
        for network in self.networks:
            biases = [*((bias,) for bias in network.biases[:-1]), network.heads[1]]
            for layer in network.back:
                sums += [places[bias] + i for bias in biases[layer] for i in range(len(bias))]
        self.products = RowProducts(
            [_products_of(network, places) for network in self.networks], sums, count, raw.device
        )

    def __call__(self, samples: Samples, index: Tensor, entropy_coef: Tensor) -> tuple[Tensor, Tensor]:
        """Run samples `index` `[M]` forward and backward through both networks.

        Return sums over each block of samples, `[TERMS + A + all biases, blocks]`, and weight
        gradients of parts of the samples.
        """
        numbers = TERMS + self.raw.numel()
        sums = samples.advantage.new_empty(self.products.rows, triton.cdiv(len(index), TILE_M))
        parts = self.products.empty()
        own = _cut(sums[numbers:], [network.back_widths for network in self.networks])
        given = (self.raw, entropy_coef, self.units, sums, sums[TERMS:])
        with concurrently(self.stream) as join:
            for which in range(1, len(self.networks)):
                self._pass(which, samples, index, own[which], given, parts)
        self._pass(0, samples, index, own[0], given, parts)
        join()
        return sums, parts

    def _pass(self, which: int, samples: Samples, index: Tensor, sums: Tensors, given: Tensors, parts: Tensor) -> None:
        """Run samples forward and back through one network, and compute its weight gradients."""
        network = self.networks[which]
        x, scale = samples[which], samples.scales[which:]
        m = len(index)
        dtype, kernel_dtype = factor_type()
        same = {"KIND": network.kind, "FACTOR": kernel_dtype}
        made = x.new_empty(sum(network.widths[:-1]), m, dtype=dtype)
        deltas = x.new_empty(sum(network.widths[1:]), m, dtype=dtype)
        own = made.split(network.widths[:-1])
        kept = (*own[1:], x.new_empty(m, network.widths[-1]), own[0])
        grid = (triton.cdiv(m, TILE_M),)
        weights, turned = network.factors()
        _forward[grid](x, index, weights, network.biases, kept, m, WIDTHS=network.widths, **same, **SHAPE)
        form = self.form | ({"A": 0} if which else {})
        _backward[grid](
            index, *samples[2:8], scale, *given, turned, kept, sums, deltas.split(network.back_widths), m,
            *self.numbers, **form, WIDTHS=network.widths[:0:-1], **same, **BACK_SHAPE,
        )  # fmt: skip
        self.products(which, deltas, made, scale, parts)


def _products_of(network: Layers, places: dict[Tensor, int]) -> list[tuple[int, int, int, int, int]]:
    """Return rows and width of each weight's deltas and of its layer's input, and its offset."""
    starts = dict(zip(network.back, accumulate(network.back_widths, initial=0), strict=False))
    products: list[tuple[int, int, int, int, int]] = []
    for layer, parts in enumerate([*((weight,) for weight in network.weights[:-1]), network.heads[0]]):
        start = starts[layer]
        for weight in parts:
            products.append((start, weight.shape[0], sum(network.widths[:layer]), weight.shape[1], places[weight]))
            start += weight.shape[0]
    return products


def _cut(features: Tensor, widths: list[tuple[int, ...]]) -> list[Tensors]:
    """Split the rows of all layers by network and layer."""
    views = iter(features.split([width for network in widths for width in network]))
    return [tuple(islice(views, len(network))) for network in widths]

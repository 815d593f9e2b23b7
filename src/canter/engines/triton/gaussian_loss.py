"""PPO's loss of a Gaussian policy and its critic with all gradients, in one kernel.

M samples, A action components. The plain form takes about eighty small operations forward and
backward; these are the same formulas, differentiated by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from canter.engines.base import PPOLoss

TILE = 64
TERMS = 6
"""Surrogate, value error, entropy, KL, clipped ratios and bound loss."""
BOUND_FORMS = ("none", "soft", "regularisation")
"""Forms of the bound loss by their numbers in kernels."""


@triton.jit
def _count(valid_ptr, count_ptr, M, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.int32)
    for start in range(0, M, TILE):
        rows = start + tl.arange(0, TILE)
        total += tl.load(valid_ptr + rows, mask=rows < M, other=0).to(tl.int32)
    tl.store(count_ptr, tl.sum(total, 0).to(tl.float32))


def count_true(valid: Tensor) -> Tensor:
    """Return the number of elements that are True, 0-d float32."""
    count = torch.empty((), device=valid.device)
    _count[(1,)](valid.contiguous().view(torch.uint8), count, valid.numel(), TILE=8192, num_warps=8)
    return count


@triton.jit
def _surrogate(log_prob, old_log_prob, advantage, clip_ratio):
    """Return clipped surrogate, derivative by `log_prob`, and 1 where the ratio was clipped."""
    ratio = tl.exp(log_prob - old_log_prob)
    free = -advantage * ratio
    held = -advantage * tl.minimum(tl.maximum(ratio, 1.0 - clip_ratio), 1.0 + clip_ratio)
    # The clipped branch has no gradient where it is the larger one.
    return (
        tl.maximum(free, held),
        tl.where(free >= held, free, 0.0),
        tl.where(tl.abs(ratio - 1.0) > clip_ratio, 1.0, 0.0),
    )


@triton.jit
def _value_error(value, old_value, target, value_clip, CLIPPED: tl.constexpr):
    """Return half the squared error and its derivative.

    If `CLIPPED`, the maximum with that of a clipped value.
    """
    error = value - target
    loss = 0.5 * error * error
    slope = error
    if CLIPPED:
        moved = value - old_value
        held = old_value + tl.minimum(tl.maximum(moved, -value_clip), value_clip) - target
        held_loss = 0.5 * held * held
        slope = tl.where((loss >= held_loss) | (tl.abs(moved) <= value_clip), error, 0.0)
        loss = tl.maximum(loss, held_loss)
    return loss, slope


@triton.jit
def _bound_error(mean, both, parts, units_ptr, limit, A, BOUND: tl.constexpr):
    """Return the bound loss of means and its derivative by each.

    `units` `[2, A]` are centre and half width.
    """
    if BOUND == 0:
        return tl.sum(tl.zeros_like(mean), 1), tl.zeros_like(mean)
    else:
        centre = tl.load(units_ptr + parts, mask=parts < A, other=0.0)[None, :]
        half = tl.load(units_ptr + A + parts, mask=parts < A, other=1.0)[None, :]
        x = (mean - centre) / half
        beyond = x
        if BOUND == 1:
            beyond = tl.where(x > limit, x - limit, tl.where(x < -limit, x + limit, 0.0))
            beyond = tl.where(x != x, x, beyond)
        beyond = tl.where(both, beyond, 0.0)
        return tl.sum(beyond * beyond, 1), 2.0 * beyond / half


@triton.jit
def _loss(
    params_ptr, value_ptr, action_ptr, old_params_ptr, old_log_prob_ptr, advantage_ptr, old_value_ptr, return_ptr,
    valid_ptr, count_ptr, entropy_coef_ptr, units_ptr, sums_ptr, d_params_ptr, d_value_ptr,
    M, A, clip_ratio, value_clip, value_coef, bound_coef, bound_limit,
    CLIPPED_VALUE: tl.constexpr, BOUND: tl.constexpr, TILE: tl.constexpr, TILE_A: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = block * TILE + tl.arange(0, TILE)
    parts = tl.arange(0, TILE_A)
    inside = rows < M
    both = inside[:, None] & (parts < A)[None, :]
    where = rows[:, None] * (2 * A) + parts[None, :]
    mean = tl.load(params_ptr + where, mask=both, other=0.0)
    log_std = tl.load(params_ptr + where + A, mask=both, other=0.0)
    action = tl.load(action_ptr + rows[:, None] * A + parts[None, :], mask=both, other=0.0)
    precision = tl.exp(-log_std)
    z = (action - mean) * precision
    # 0.9189... is half the logarithm of two pi; a kernel sees no constants of its module.
    log_prob = tl.sum(tl.where(both, -0.5 * z * z - log_std - 0.9189385332046727, 0.0), 1)
    entropy = tl.sum(tl.where(both, log_std + (0.9189385332046727 + 0.5), 0.0), 1)
    shift = (tl.load(old_params_ptr + where, mask=both, other=0.0) - mean) * precision
    log_ratio = tl.load(old_params_ptr + where + A, mask=both, other=0.0) - log_std
    kl = tl.sum(tl.where(both, 0.5 * (tl.exp(2.0 * log_ratio) - 1.0) - log_ratio + 0.5 * shift * shift, 0.0), 1)
    surrogate, d_log_prob, was_clipped = _surrogate(
        log_prob,
        tl.load(old_log_prob_ptr + rows, mask=inside, other=0.0),
        tl.load(advantage_ptr + rows, mask=inside, other=0.0),
        clip_ratio,
    )
    value_loss, d_value = _value_error(
        tl.load(value_ptr + rows, mask=inside, other=0.0),
        tl.load(old_value_ptr + rows, mask=inside, other=0.0),
        tl.load(return_ptr + rows, mask=inside, other=0.0),
        value_clip,
        CLIPPED_VALUE,
    )
    valid = tl.load(valid_ptr + rows, mask=inside, other=0) != 0
    # Without valid samples everything is filled with zeros below.
    weight = 1.0 / tl.maximum(tl.load(count_ptr), 1e-9)
    slope = (weight * d_log_prob)[:, None]
    d_log_std = slope * (z * z - 1.0) - weight * tl.load(entropy_coef_ptr)
    bound, d_bound = _bound_error(mean, both, parts, units_ptr, bound_limit, A, BOUND)
    d_mean = slope * z * precision + weight * bound_coef * d_bound
    # Filled, not multiplied: a NaN in an invalid sample must not come through.
    tl.store(d_params_ptr + where, tl.where(valid[:, None], d_mean, 0.0), mask=both)
    tl.store(d_params_ptr + where + A, tl.where(valid[:, None], d_log_std, 0.0), mask=both)
    tl.store(d_value_ptr + rows, tl.where(valid, weight * value_coef * d_value, 0.0), mask=inside)
    tl.store(sums_ptr + block * 6 + 0, tl.sum(tl.where(valid, surrogate, 0.0), 0))
    tl.store(sums_ptr + block * 6 + 1, tl.sum(tl.where(valid, value_loss, 0.0), 0))
    tl.store(sums_ptr + block * 6 + 2, tl.sum(tl.where(valid, entropy, 0.0), 0))
    tl.store(sums_ptr + block * 6 + 3, tl.sum(tl.where(valid, kl, 0.0), 0))
    tl.store(sums_ptr + block * 6 + 4, tl.sum(tl.where(valid, was_clipped, 0.0), 0))
    tl.store(sums_ptr + block * 6 + 5, tl.sum(tl.where(valid, bound, 0.0), 0))


@triton.jit
def _finish(
    sums_ptr, count_ptr, entropy_coef_ptr, means_ptr, loss_ptr, blocks, value_coef, bound_coef, TILE: tl.constexpr
):  # fmt: skip
    """Compute the means of all terms from the sums of blocks, in a fixed order, and the loss."""
    terms = tl.arange(0, 8)
    total = tl.zeros((8,), tl.float32)
    for start in range(0, blocks, TILE):
        rows = start + tl.arange(0, TILE)
        inside = (rows < blocks)[:, None] & (terms < 6)[None, :]
        total += tl.sum(tl.load(sums_ptr + rows[:, None] * 6 + terms[None, :], mask=inside, other=0.0), 0)
    means = total / tl.maximum(tl.load(count_ptr), 1e-9)
    tl.store(means_ptr + terms, means, mask=terms < 6)
    weights = tl.where(terms == 0, 1.0, tl.where(terms == 1, value_coef, 0.0))
    weights = tl.where(terms == 2, -tl.load(entropy_coef_ptr), tl.where(terms == 5, bound_coef, weights))
    tl.store(loss_ptr, tl.sum(means * weights, 0))


class _GaussianLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, params: Tensor, value: Tensor, samples: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        clip_ratio, value_clip, value_coef, entropy_coef, clipped_value, count, bound = numbers
        dim = params.shape[-1] // 2
        m = value.numel()
        blocks = triton.cdiv(m, TILE)
        sums = params.new_empty(blocks, TERMS)
        # In one tensor, so that one multiplication scales both.
        gradient = params.new_empty(m * (2 * dim + 1))
        d_params = gradient[: m * 2 * dim]
        d_value = gradient[m * 2 * dim :]
        _loss[(blocks,)](
            params, value, *samples, count, entropy_coef, bound.units, sums, d_params, d_value,
            m, dim, clip_ratio, value_clip, value_coef, bound.coef, bound.limit,
            CLIPPED_VALUE=clipped_value, BOUND=bound.form,
            TILE=TILE, TILE_A=max(2, triton.next_power_of_2(dim)), num_warps=4,
        )  # fmt: skip
        ctx.shapes = params.shape, value.shape
        ctx.save_for_backward(gradient)
        means = params.new_empty(TERMS)
        loss = params.new_empty(())
        _finish[(1,)](sums, count, entropy_coef, means, loss, blocks, value_coef, bound.coef, TILE=256)
        ctx.mark_non_differentiable(means)
        ctx.set_materialize_grads(False)
        return loss, means

    @staticmethod
    @once_differentiable  # the gradients are constants: a second derivative must fail instead of being zero
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        params, value = ctx.shapes
        d_params, d_value = (gradient * gradients[0]).split([params.numel(), value.numel()])
        return d_params.view(params), d_value.view(value), None, None


class Bound(NamedTuple):
    """A bound loss as the kernels read it."""

    form: int
    coef: float
    limit: float
    units: Tensor
    """`[2, A]` centre and half width of each component; any tensor without a bound loss."""


def bound_of(loss: PPOLoss, dim: int, device: torch.device) -> Bound:
    """Return the bound loss of a description; a loss without one has form 0 and coefficient 0."""
    if loss.bound is None:
        return Bound(0, 0.0, 0.0, torch.empty(0, device=device))
    config = loss.bound.config
    columns = (loss.bound.centre, loss.bound.half)
    units = torch.stack([column.to(device).expand(dim) for column in columns])
    return Bound(BOUND_FORMS.index(config.form), config.coef, config.limit, units)


def gaussian_loss(
    params: Tensor,
    value: Tensor,
    *,
    action: Tensor,
    old_params: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    old_value: Tensor,
    return_: Tensor,
    valid: Tensor,
    count: Tensor,
    clip_ratio: float,
    value_clip: float | None,
    value_coef: float,
    entropy_coef: Tensor,
    bound: Bound,
) -> tuple[Tensor, Tensor]:
    """Return the loss, 0-d, and the means `[6]` of all `TERMS` over `count` samples.

    Samples as in PPO's batch, `[..., 2A]`, `[..., A]` and `[...]`; `value_clip` None is half the
    squared error.
    """
    samples = (action, old_params, old_log_prob, advantage, old_value, return_, valid.view(torch.uint8))
    numbers = (clip_ratio, value_clip or 0.0, value_coef, entropy_coef, value_clip is not None, count, bound)
    contiguous = tuple(tensor.contiguous() for tensor in samples)
    return _GaussianLoss.apply(params.contiguous(), value.contiguous(), contiguous, numbers)

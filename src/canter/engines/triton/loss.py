"""PPO's loss of a policy and its critic with all gradients, in one kernel.

M samples, P distribution parameters. The plain form takes about eighty small operations forward and
backward; these are the same formulas, differentiated by hand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from canter.engines.triton.policies import Bound, Policy, _policy_terms

TILE = 64
ROOM = 8192
"""Numbers of a block; it has fewer samples if these have many parameters."""
TERMS = 6
"""Surrogate, value error, entropy, KL, clipped ratios and bound loss."""


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
def _loss(
    params_ptr, value_ptr, action_ptr, old_params_ptr, advantage_ptr, old_value_ptr, return_ptr,
    valid_ptr, entropy_coef_ptr, units_ptr, sums_ptr, d_params_ptr, d_value_ptr,
    M, clip_ratio, log_volume, bound_coef, bound_limit, value_clip, value_coef,
    CLIPPED_VALUE: tl.constexpr, A: tl.constexpr, NVEC: tl.constexpr, NODES: tl.constexpr, BOUND: tl.constexpr,
    TILE: tl.constexpr, TILE_A: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = block * TILE + tl.arange(0, TILE)
    parts = tl.arange(0, TILE_A)
    inside = rows < M
    both = inside[:, None] & (parts < A)[None, :]
    where = rows[:, None] * (A if len(NVEC) > 0 else 2 * A) + parts[None, :]
    first = tl.load(params_ptr + where, mask=both, other=0.0)
    log_std = first
    if len(NVEC) == 0:
        log_std = tl.load(params_ptr + where + A, mask=both, other=0.0)
    surrogate, entropy, kl, was_clipped, bound, d_first, d_log_std = _policy_terms(
        first, log_std, rows, rows, M, action_ptr, old_params_ptr, advantage_ptr, entropy_coef_ptr, units_ptr,
        clip_ratio, log_volume, bound_coef, bound_limit, parts, A, NVEC, NODES, BOUND,
    )  # fmt: skip
    value_loss, d_value = _value_error(
        tl.load(value_ptr + rows, mask=inside, other=0.0),
        tl.load(old_value_ptr + rows, mask=inside, other=0.0),
        tl.load(return_ptr + rows, mask=inside, other=0.0),
        value_clip,
        CLIPPED_VALUE,
    )
    valid = tl.load(valid_ptr + rows, mask=inside, other=0) != 0
    # Filled, not multiplied: a NaN in an invalid sample must not come through.
    tl.store(d_params_ptr + where, tl.where(valid[:, None], d_first, 0.0), mask=both)
    if len(NVEC) == 0:
        tl.store(d_params_ptr + where + A, tl.where(valid[:, None], d_log_std, 0.0), mask=both)
    tl.store(d_value_ptr + rows, tl.where(valid, value_coef * d_value, 0.0), mask=inside)
    sums_ptr += block * 7
    tl.store(sums_ptr, tl.sum(tl.where(valid, surrogate, 0.0), 0))
    tl.store(sums_ptr + 1, tl.sum(tl.where(valid, value_loss, 0.0), 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(valid, entropy, 0.0), 0))
    tl.store(sums_ptr + 3, tl.sum(tl.where(valid, kl, 0.0), 0))
    tl.store(sums_ptr + 4, tl.sum(tl.where(valid, was_clipped, 0.0), 0))
    tl.store(sums_ptr + 5, tl.sum(tl.where(valid, bound, 0.0), 0))
    tl.store(sums_ptr + 6, tl.sum(valid.to(tl.float32), 0))


@triton.jit
def _finish(
    sums_ptr, entropy_coef_ptr, means_ptr, loss_ptr, weight_ptr, blocks, value_coef, bound_coef, TILE: tl.constexpr
):  # fmt: skip
    """Compute the means of all terms from the sums of blocks, in a fixed order, and the loss.

    The weight of a sample is one over their number.
    """
    terms = tl.arange(0, 8)
    total = tl.zeros((8,), tl.float32)
    for start in range(0, blocks, TILE):
        rows = start + tl.arange(0, TILE)
        inside = (rows < blocks)[:, None] & (terms < 7)[None, :]
        total += tl.sum(tl.load(sums_ptr + rows[:, None] * 7 + terms[None, :], mask=inside, other=0.0), 0)
    # Without valid samples all sums and gradients are zero.
    weight = 1.0 / tl.maximum(tl.sum(tl.where(terms == 6, total, 0.0), 0), 1e-9)
    means = total * weight
    tl.store(means_ptr + terms, means, mask=terms < 6)
    weights = tl.where(terms == 0, 1.0, tl.where(terms == 1, value_coef, 0.0))
    weights = tl.where(terms == 2, -tl.load(entropy_coef_ptr), tl.where(terms == 5, bound_coef, weights))
    tl.store(loss_ptr, tl.sum(means * weights, 0))
    tl.store(weight_ptr, weight)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, params: Tensor, value: Tensor, samples: tuple[Tensor, ...], policy: Policy, numbers: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        clip_ratio, value_clip, value_coef, entropy_coef, bound = numbers
        m = value.numel()
        tile_a = max(2, triton.next_power_of_2(policy.columns))
        tile = max(1, min(TILE, ROOM // tile_a))
        blocks = triton.cdiv(m, tile)
        sums = params.new_empty(blocks, TERMS + 1)
        # In one tensor, so that one multiplication scales both.
        gradient = params.new_empty(params.numel() + m)
        d_params = gradient[: params.numel()]
        d_value = gradient[params.numel() :]
        _loss[(blocks,)](
            params, value, *samples, entropy_coef, bound.units, sums, d_params, d_value,
            m, clip_ratio, policy.log_volume, bound.coef, bound.limit, value_clip or 0.0, value_coef,
            CLIPPED_VALUE=value_clip is not None, BOUND=bound.form, **policy.constants,
            TILE=tile, TILE_A=tile_a, num_warps=4,
        )  # fmt: skip
        ctx.shapes = params.shape, value.shape
        means = params.new_empty(TERMS)
        loss = params.new_empty(())
        weight = params.new_empty(())
        _finish[(1,)](sums, entropy_coef, means, loss, weight, blocks, value_coef, bound.coef, TILE=256)
        ctx.save_for_backward(gradient, weight)
        ctx.mark_non_differentiable(means)
        ctx.set_materialize_grads(False)
        return loss, means

    @staticmethod
    @once_differentiable  # the gradients are constants: a second derivative must fail instead of being zero
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors
        params, value = ctx.shapes
        d_params, d_value = (gradient * (weight * gradients[0])).split([params.numel(), value.numel()])
        return d_params.view(params), d_value.view(value), None, None, None


def fused_loss(
    policy: Policy,
    params: Tensor,
    value: Tensor,
    *,
    action: Tensor,
    old_params: Tensor,
    advantage: Tensor,
    old_value: Tensor,
    return_: Tensor,
    valid: Tensor,
    clip_ratio: float,
    value_clip: float | None,
    value_coef: float,
    entropy_coef: Tensor,
    bound: Bound,
) -> tuple[Tensor, Tensor]:
    """Return the loss, 0-d, and the means `[6]` of all `TERMS` over the valid samples.

    Samples as in PPO's batch, `[..., P]`, those of the action, and `[...]`; `value_clip` None is
    half the squared error. Ratios are those to `old_params`.
    """
    samples = (action, old_params, advantage, old_value, return_, valid.view(torch.uint8))
    numbers = (clip_ratio, value_clip, value_coef, entropy_coef, bound)
    contiguous = tuple(tensor.contiguous() for tensor in samples)
    return _FusedLoss.apply(params.contiguous(), value.contiguous(), contiguous, policy, numbers)

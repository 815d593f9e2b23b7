"""One gradient step over flat vectors: whether to take it, and Adam.

Torch's fused Adam hands out work tensor by tensor in pieces of 65,536 numbers: one flat vector of a policy's size keeps
two of a GPU's processors busy and the others waiting. And what is decided on single numbers before it takes a launch
for each comparison, which together last as long as a layer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def _decide(squares, steps, skip_ptr, out_ptr):
    total = 0.0
    for group in tl.static_range(len(squares)):
        total += tl.load(squares[group])
    norm = tl.sqrt_rn(total)
    # Not so for infinity, nor for a NaN.
    finite = tl.where(norm < float("inf"), 1.0, 0.0)
    taken = tl.where(tl.load(skip_ptr) != 0, 0.0, finite)
    tl.store(out_ptr, norm)
    tl.store(out_ptr + 1, 1.0 - finite)
    tl.store(out_ptr + 2, 1.0 - taken)
    for group in tl.static_range(len(steps)):
        tl.store(steps[group], tl.load(steps[group]) + taken)


def decide(squares: list[Tensor], steps: list[Tensor], skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient's norm, 1 where that is not finite, and 1 where no step is taken: for that reason or `skip`.

    All are 0-d: `squares` are those of each group's norm; their `steps`, of those taken so far, go up by one or stay.
    """
    out = squares[0].new_empty(3)
    _decide[(1,)](tuple(squares), tuple(steps), skip, out, num_warps=1)
    norm, blocked, skipped = out.unbind()
    return norm, blocked, skipped


@triton.jit
def _adam(
    p_ptr, g_ptr, m_ptr, v_ptr, step_ptr, lr_ptr, norm_ptr, skip_ptr, count, max_norm,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # Where the step is skipped nothing is written, so that not even a NaN in the gradient leaves a trace.
    inside = tl.where(i < count, 1.0 - tl.load(skip_ptr), 0.0) > 0.0
    step, lr = tl.load(step_ptr), tl.load(lr_ptr)
    g = tl.load(g_ptr + i, mask=inside, other=0.0) / tl.maximum(tl.load(norm_ptr) / max_norm, 1.0)
    p = tl.load(p_ptr + i, mask=inside, other=0.0)
    p = p - lr * DECAY * p
    m = tl.load(m_ptr + i, mask=inside, other=0.0)
    m = m + (g - m) * (1.0 - BETA1)
    v = tl.load(v_ptr + i, mask=inside, other=0.0) * BETA2 + g * g * (1.0 - BETA2)
    correction1 = 1.0 - tl.exp2(step * tl.log2(BETA1 + 0.0 * step))
    correction2 = 1.0 - tl.exp2(step * tl.log2(BETA2 + 0.0 * step))
    p = p - lr / correction1 * m / (tl.sqrt_rn(v) / tl.sqrt_rn(correction2) + EPS)
    tl.store(p_ptr + i, p, mask=inside)
    tl.store(m_ptr + i, m, mask=inside)
    tl.store(v_ptr + i, v, mask=inside)


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Tensor,
    learning_rate: Tensor,
    norm: Tensor,
    max_norm: float,
    skip: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW on flat vectors in place; nothing at all where `skip` is 1.

    A gradient whose `norm` is above `max_norm` is shortened to that. `step` counts this step already; it and the other
    0-d arguments live on the device.
    """
    count = parameter.numel()
    _adam[(triton.cdiv(count, TILE),)](
        parameter, gradient, exp_avg, exp_avg_sq, step, learning_rate, norm, skip, count, max_norm,
        BETA1=betas[0], BETA2=betas[1], EPS=eps, DECAY=weight_decay, TILE=TILE,
    )  # fmt: skip

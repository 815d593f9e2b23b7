"""One Adam step over a flat vector.

Torch's fused Adam hands out work tensor by tensor in pieces of 65,536 numbers: one flat vector of a policy's size keeps
two of a GPU's processors busy and the others waiting.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def _adam(
    p_ptr, g_ptr, m_ptr, v_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, count,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # Where the step is skipped nothing is written, so that not even a NaN in the gradient leaves a trace.
    inside = tl.where(i < count, 1.0 - tl.load(skip_ptr), 0.0) > 0.0
    step, lr = tl.load(step_ptr) + 1.0, tl.load(lr_ptr)
    g = tl.load(g_ptr + i, mask=inside, other=0.0) / tl.load(scale_ptr)
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
    step: Tensor,
    *,
    learning_rate: Tensor,
    grad_scale: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW on flat vectors in place, with the gradient divided by `grad_scale`; nothing at all where `skip` is 1.

    `step` is the number of steps done before and goes up by one; the four 0-d arguments live on the device.
    """
    count = parameter.numel()
    _adam[(triton.cdiv(count, TILE),)](
        parameter, gradient, exp_avg, exp_avg_sq, step, learning_rate, grad_scale, skip, count,
        BETA1=betas[0], BETA2=betas[1], EPS=eps, DECAY=weight_decay, TILE=TILE,
    )  # fmt: skip
    step.add_(1.0 - skip)

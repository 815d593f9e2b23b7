"""Adam steps over flat vectors, and a learning rate that follows the KL.

Torch's fused Adam hands out work in pieces of 65,536 numbers: one flat vector of a policy's size
keeps two of a GPU's processors busy. The decisions on single numbers before it take a launch for
each comparison, together as long as a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.core.dispatch import kernel, on_gpu
from canter.functional.optimization import AdamGroup, adam_step_
from canter.nn.schedules import follow_kl_

TILE = 1024


@triton.jit
def _decide(squares, steps, skip_ptr, out_ptr):
    total = 0.0
    for group in tl.static_range(len(squares)):
        total += tl.load(squares[group])
    norm = tl.sqrt_rn(total)
    # False for infinity and NaN.
    finite = tl.where(norm < float("inf"), 1.0, 0.0)
    taken = tl.where(tl.load(skip_ptr) != 0, 0.0, finite)
    tl.store(out_ptr, norm)
    tl.store(out_ptr + 1, 1.0 - finite)
    tl.store(out_ptr + 2, 1.0 - taken)
    for group in tl.static_range(len(steps)):
        tl.store(steps[group], tl.load(steps[group]) + taken)


def decide(squares: list[Tensor], steps: list[Tensor], skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient's norm, 1 if it is not finite, and 1 if no step is taken.

    All are 0-d: `squares` are the squared norms of the groups; their `steps` increase by one if a
    step is taken.
    """
    out = squares[0].new_empty(3)
    _decide[(1,)](tuple(squares), tuple(steps), skip, out, num_warps=1)
    norm, blocked, skipped = out.unbind()
    return norm, blocked, skipped


@triton.jit
def _adam(
    p_ptr, g_ptr, m_ptr, v_ptr, step_ptr, lr_ptr, norm_ptr, skip_ptr, count, max_norm,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr, COUPLED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # A skipped step writes nothing, so that a NaN in the gradient leaves no trace.
    inside = tl.where(i < count, 1.0 - tl.load(skip_ptr), 0.0) > 0.0
    step = tl.load(step_ptr)
    lr = tl.load(lr_ptr)
    g = tl.load(g_ptr + i, mask=inside, other=0.0) / tl.maximum(tl.load(norm_ptr) / max_norm, 1.0)
    p = tl.load(p_ptr + i, mask=inside, other=0.0)
    if COUPLED:
        g += DECAY * p
    else:
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


def _on_gpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> bool:
    return on_gpu(groups[0].gradient)


@kernel(of=adam_step_, accepts=_on_gpu)
def adam_step_on_gpu(groups: Sequence[AdamGroup], joint: bool, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step with two launches for each group and one for the decisions on single numbers."""
    # A dot product uses the whole GPU; the norm of one vector runs on a single processor.
    squares = [torch.dot(group.gradient, group.gradient) for group in groups]
    norm, blocked, skipped = decide(squares, [group.step for group in groups], skip)
    for group, square in zip(groups, squares, strict=True):
        count = group.flat.numel()
        own = norm if joint else square.sqrt()
        _adam[(triton.cdiv(count, TILE),)](
            group.flat, group.gradient, group.exp_avg, group.exp_avg_sq, group.step, group.learning_rate,
            own, skipped, count, group.max_norm,
            BETA1=group.betas[0], BETA2=group.betas[1], EPS=group.eps, DECAY=group.weight_decay,
            COUPLED=group.coupled, TILE=TILE,
        )  # fmt: skip
    return norm, blocked


@triton.jit
def _follow_kl(value_ptr, kl_ptr, target, up, down, minimum, maximum):
    kl = tl.load(kl_ptr)
    too_near = (kl != 0.0) & (kl < 0.5 * target)
    # NaN fails both comparisons and counts as too far.
    change = tl.where(kl <= 2.0 * target, tl.where(too_near, up, 1.0), down)
    tl.store(value_ptr, tl.minimum(tl.maximum(tl.load(value_ptr) * change, minimum), maximum))


@kernel(of=follow_kl_, accepts=on_gpu)
def follow_kl_on_gpu_(value: Tensor, kl: Tensor, target: float, factor: float, minimum: float, maximum: float) -> None:
    """Update the 0-d `value` on the GPU."""
    _follow_kl[(1,)](value, kl, target, factor, 1.0 / factor, minimum, maximum, num_warps=1)

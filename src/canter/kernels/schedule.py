"""A learning rate that follows the KL, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from canter.dispatch import kernel, on_gpu
from canter.schedules import follow_kl_


@triton.jit
def _follow_kl(value_ptr, kl_ptr, target, up, down, minimum, maximum):
    kl = tl.load(kl_ptr)
    too_near = (kl != 0.0) & (kl < 0.5 * target)
    # A KL that is not a number is none of these, and so too far.
    change = tl.where(kl <= 2.0 * target, tl.where(too_near, up, 1.0), down)
    tl.store(value_ptr, tl.minimum(tl.maximum(tl.load(value_ptr) * change, minimum), maximum))


@kernel(of=follow_kl_, accepts=on_gpu)
def follow_kl_on_gpu_(value: Tensor, kl: Tensor, target: float, factor: float, minimum: float, maximum: float) -> None:
    """On the 0-d `value` and `kl` where they are."""
    _follow_kl[(1,)](value, kl, target, factor, 1.0 / factor, minimum, maximum, num_warps=1)

"""Projection of a categorical distribution on a GPU, where adding up by scattered writes would round by chance."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from canter.dispatch import kernel, on_gpu
from canter.functional.soft import project


@triton.jit
def _project(p_ptr, a_ptr, out_ptr, K, low, scale, PLACES: tl.constexpr, STEP: tl.constexpr):
    """Of one row: every atom's share of every place, summed in a fixed order."""
    row, places = tl.program_id(0), tl.arange(0, PLACES)
    total = tl.zeros((PLACES,), tl.float32)
    for start in range(0, K, STEP):
        atoms = start + tl.arange(0, STEP)
        p = tl.load(p_ptr + row * K + atoms, mask=atoms < K, other=0.0)
        atom = tl.load(a_ptr + row * K + atoms, mask=atoms < K, other=0.0)
        place = tl.minimum(tl.maximum((atom - low) * scale, 0.0), K - 1.0)
        share = tl.maximum(1.0 - tl.abs(place[None, :] - places[:, None]), 0.0)
        # Maxima forget a NaN, and a step that it must block would be taken.
        share = tl.where((atom == atom)[None, :], share, float("nan"))
        total += tl.sum(p[None, :] * share, 1)
    tl.store(out_ptr + row * K + places, total, mask=places < K)


@kernel(of=project, accepts=on_gpu)
def project_on_gpu(probs: Tensor, atoms: Tensor, low: float, high: float) -> Tensor:
    """A program for each row."""
    count, atoms, probs = probs.shape[-1], atoms.contiguous(), probs.contiguous()
    out = torch.empty_like(probs)
    scale, places = (count - 1) / (high - low), triton.next_power_of_2(count)
    _project[(probs.numel() // count,)](probs, atoms, out, count, low, scale, PLACES=places, STEP=16)
    return out

"""Projection of a categorical distribution on a GPU, where adding up by scattered writes would round by chance."""

from __future__ import annotations

import torch
from torch import Tensor

from canter.dispatch import kernel, on_gpu
from canter.functional.soft import project


@kernel(of=project, accepts=on_gpu)
def project_densely(probs: Tensor, atoms: Tensor, low: float, high: float) -> Tensor:
    """Every atom's share of every place, `[B, K, K]`, summed in a fixed order."""
    count = probs.shape[-1]
    place = ((atoms - low) * ((count - 1) / (high - low))).clamp(0, count - 1)
    places = torch.arange(count, device=probs.device, dtype=probs.dtype)
    share = (1 - (place.unsqueeze(-1) - places).abs()).clamp(min=0)
    return (probs.unsqueeze(-2) @ share).squeeze(-2)

"""Copies from environments in host memory to a policy on a GPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from canter.core.struct import tree_copy_, tree_leaves, tree_map

ALIGNMENT = 16
"""Bytes; the beginning of every tensor in a buffer is a multiple of it, whatever its dtype."""


class Slot:
    """The same tensors side by side in a buffer of the host and in one of the device."""

    def __init__(self, tree: Any, device: torch.device) -> None:
        starts = [0, *accumulate(-(-leaf.nbytes // ALIGNMENT) * ALIGNMENT for leaf in tree_leaves(tree))]
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        self.device = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self.host_tree, self.device_tree = (_views(buffer, tree, starts) for buffer in (self.host, self.device))
        self.sent = torch.cuda.Event() if on_gpu else None
        """When the host may write to its buffer again."""


class Courier:
    """Copies a tree of host tensors to a device, all of them in one go and without waiting.

    Memory that the system may not move can be copied while the host goes on, so buffers are pinned; there are two, for
    the host to fill one while the other is on its way. What comes out of a call is overwritten by the next but one.
    """

    def __init__(self, tree: Any, device: torch.device) -> None:
        self.tree, self.turn = tree, 0
        self.slots = [Slot(tree, device) for _ in range(2)]

    def __call__(self) -> Any:
        """The tree as it is now, on the device."""
        slot = self.slots[self.turn]
        self.turn = 1 - self.turn
        if slot.sent is not None:
            slot.sent.synchronize()
        tree_copy_(slot.host_tree, self.tree)
        slot.device.copy_(slot.host, non_blocking=True)
        if slot.sent is not None:
            slot.sent.record()
        return slot.device_tree


def _views(buffer: Tensor, tree: Any, starts: list[int]) -> Any:
    """The tree's tensors as parts of a buffer."""
    places = iter(starts)

    def view(leaf: Tensor) -> Tensor:
        start = next(places)
        return buffer[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)

    return tree_map(view, tree)

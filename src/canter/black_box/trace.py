"""Watches every operation of torch and remembers where numbers that are not finite come from."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OWN = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Origin:
    """The first operation of a chain: its results are not finite, and all that went into it was."""

    operation: str
    """Name of the operation, such as `div`."""
    place: str
    """`file:line` of the Python code that called for it."""
    function: str
    """The function that this line is in."""
    value: Tensor
    """The result."""
    index: Tensor | None
    """`[B]` the sequences of the minibatch that was at hand, if one was."""

    def __str__(self) -> str:
        return f"{self.operation} in {self.function} ({self.place})"


class Trace(TorchDispatchMode):
    """While entered, knows of every tensor with NaN or infinity in it by which operation that began."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, Origin | None] = {}
        """By the address of a tensor; None where it came from outside."""
        self._alive: list[Tensor] = []
        """Keeps the addresses from being used again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at its results."""
        # NaN before infinity: a bound that is infinite on purpose is no cause.
        before = [leaf for leaf in tree_leaves((args, kwargs)) if is_spoilt(leaf)]
        before.sort(key=lambda leaf: not bool(torch.isnan(leaf).any()))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if is_spoilt(leaf):
                self._alive.append(leaf)
                self._origins[leaf.data_ptr()] = self.origin_of(*before) if before else _origin(func, leaf)
        return result

    def origin_of(self, *tensors: Tensor) -> Origin | None:
        """Where the numbers of the first of these went wrong that did so in what was watched; None without one."""
        found = (self._origins.get(tensor.data_ptr()) for tensor in tensors)
        return next((origin for origin in found if origin is not None), None)


def is_spoilt(leaf: Any) -> bool:
    """Whether something is a tensor with NaN or infinity in it."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())


def _origin(func: Any, result: Tensor) -> Origin:
    frame, place, function, index = sys._getframe(2), "", "backward", None
    while frame is not None:
        code = frame.f_code
        if not place and not code.co_filename.startswith((_OWN, _TORCH)):
            place, function = f"{code.co_filename}:{frame.f_lineno}", code.co_name
        if code.co_name == "gradients" and isinstance(frame.f_locals.get("index"), Tensor):
            index = frame.f_locals["index"]
        frame = frame.f_back
    return Origin(str(func).removeprefix("aten.").partition(".")[0], place, function, result, index)

"""How a function over tensors becomes a CUDA graph.

What keeps one from being recorded as it stands is often small and harmless: constants copied from the host, lists as
indices, numbers read for a log. `Capturing` does these on the device meanwhile. What it cannot replace ends the
attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from canter.envs.robots.host_state import not_collecting


class Declined(RuntimeError):
    """A part of a step cannot be captured; the message says why."""


class Capturing(TorchFunctionMode):
    """Replaces, while a part is recorded, what would wait for the device or copy from the host."""

    def __init__(self, constants: dict[Any, Tensor], rows: list[Tensor], device: torch.device) -> None:
        super().__init__()
        self.constants, self.rows, self.device = constants, rows, device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operation of torch."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], list | tuple | int | float):
            return self._constant(function, args, kwargs).clone()
        if name == "item" and args[0].device.type == self.device.type:
            return args[0].reshape(())
        if name == "nonzero":
            if not self.rows:
                raise Declined("it asks which rows hold something a second time")
            rows = self.rows.pop(0)
            return (rows,) if kwargs.get("as_tuple") else rows.unsqueeze(1)
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Tensor):
            args = (args[0], self._index(args[1], args[0].device), *args[2:])
            if len(args) > 2 and isinstance(args[2], int | float):  # else copied from the host for each index
                form = {"dtype": args[0].dtype, "device": self.device}
                args = (*args[:2], self._constant(torch.tensor, args[2:], form))
        return function(*args, **kwargs)

    def _constant(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        key = (repr(args), repr(kwargs))
        if key not in self.constants:
            if _is_capturing():
                raise Declined(f"it makes a constant that was not there before: {key[0][:60]}")
            self.constants[key] = function(*args, **kwargs)
        return self.constants[key]

    def _index(self, index: Any, device: torch.device) -> Any:
        if isinstance(index, tuple):
            return tuple(self._index(part, device) for part in index)
        if isinstance(index, list):
            return self._constant(torch.tensor, (index,), {"device": device})
        return index


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class CudaRecorder:
    """Records functions as CUDA graphs, all with one pool of memory."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays the function, and its output, the same tensors every time."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with not_collecting(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed, and record nothing once more: torch's random stream believes to be recorded."""
        with suppress(RuntimeError):
            graph.capture_end()
        self.pool, empty = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            empty.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            empty.capture_end()


@contextmanager
def refusing_to_wait(device: torch.device) -> Iterator[None]:
    """An error where something waits for the device, which would spoil a recording."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

"""Recording a function over tensors as a CUDA graph, and comparing a replay with the function.

Small and harmless operations often prevent a recording: constants copied from the host, lists as
indices, numbers read for a log. `CaptureMode` replaces these by work on the device while a function
is recorded. Anything else that would wait for the device ends the attempt with `NotCapturable` or
the error of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from canter.core.machine import gc_paused
from canter.envs.robots.host_state import Snapshot

Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Records a function; returns a function that replays it, and its output, the same tensors after
every replay."""


class NotCapturable(RuntimeError):
    """A segment of a step cannot be captured; the message says why."""


class CaptureMode(TorchFunctionMode):
    """Replaces operations that wait for the device or copy from the host, in a recording.

    `constants` keeps the tensors that stand for constants of the host, by their values. `env_ids`
    are the results of the function's calls of `nonzero`, in their order.
    """

    def __init__(self, constants: dict[Any, Tensor], env_ids: list[Tensor], device: torch.device) -> None:
        super().__init__()
        self.constants = constants
        self.env_ids = env_ids
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, or its replacement."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], list | tuple | int | float):
            return self._constant(function, args, kwargs).clone()
        if name == "item" and args[0].device.type == self.device.type:
            return args[0].reshape(())
        if name == "nonzero":
            return self._next_env_ids(as_tuple=bool(kwargs.get("as_tuple")))
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Tensor):
            args = (args[0], self._index(args[1], args[0].device), *args[2:])
            if len(args) > 2 and isinstance(args[2], int | float):  # torch would copy it from the host
                value = self._constant(torch.tensor, args[2:], {"dtype": args[0].dtype, "device": self.device})
                args = (*args[:2], value)
        return function(*args, **kwargs)

    def _next_env_ids(self, *, as_tuple: bool) -> Any:
        if not self.env_ids:
            raise NotCapturable("it calls nonzero more often than its masks are known")
        env_ids = self.env_ids.pop(0)
        return (env_ids,) if as_tuple else env_ids.unsqueeze(1)

    def _constant(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        key = (repr(args), repr(kwargs))
        if key not in self.constants:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise NotCapturable(f"it makes a constant that was not there in the rehearsal: {key[0][:60]}")
            self.constants[key] = function(*args, **kwargs)
        return self.constants[key]

    def _index(self, index: Any, device: torch.device) -> Any:
        if isinstance(index, tuple):
            return tuple(self._index(entry, device) for entry in index)
        if isinstance(index, list):
            return self._constant(torch.tensor, (index,), {"device": device})
        return index


class CudaRecorder:
    """Records functions as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return a function that replays the recording, and its output."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with gc_paused(), torch.cuda.stream(self.stream):
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
        """End a recording that failed, in a new pool.

        After a failure torch's random generator still believes that it is being recorded; an empty
        recording resets it.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        self.pool = torch.cuda.graph_pool_handle()
        empty = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            empty.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            empty.capture_end()


@contextmanager
def forbid_sync(device: torch.device) -> Iterator[None]:
    """Raise where something waits for the device, as this would corrupt a recording."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass
class EagerResult:
    """The result of an eager run, its log entries, and the state after it."""

    output: Any
    log: dict[str, Any]
    snapshot: Snapshot

    def check(self, output: Any, log: dict[str, Any], snapshot: Snapshot) -> None:
        """Raise NotCapturable if a replay from the same state has another result."""
        found = self.snapshot.differences(snapshot)
        found += _differences(self.output, output) + _differences(self.log, log)
        if found:
            raise NotCapturable(f"it differs from the eager one in {'; '.join(found[:3])} ({len(found)} in all)")


def clone_tree(tree: Any) -> Any:
    """Return a copy of all tensors in a tree; lists become tuples."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: clone_tree(value) for key, value in tree.items()}
    return tuple(map(clone_tree, tree)) if isinstance(tree, tuple | list) else tree


def _differences(expected: Any, actual: Any, name: str = "its result") -> list[str]:
    """Return what differs in two trees; a number may equal a tensor of one number."""
    if isinstance(expected, dict):
        pairs = [(expected[key], actual.get(key), str(key)) for key in expected]
        return [line for one, other, label in pairs for line in _differences(one, other, label)]
    if isinstance(expected, tuple):
        pairs = [(one, other, f"{name} {i}") for i, (one, other) in enumerate(zip(expected, actual, strict=True))]
        return [line for one, other, label in pairs for line in _differences(one, other, label)]
    if expected is None or actual is None:
        return [] if expected is actual else [name]
    one = torch.as_tensor(expected, device="cpu").double().nan_to_num()
    other = torch.as_tensor(actual, device="cpu").double().nan_to_num()
    return [] if torch.equal(one.float(), other.float()) else [f"{name} by {(one - other).abs().max():.3g}"]

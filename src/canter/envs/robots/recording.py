"""mjlab's physics, without computing twice what depends on positions and velocities alone.

A step of MuJoCo begins with `forward`: kinematics, contacts, constraints and velocities, then forces, accelerations and
the solver. mjlab calls `forward` at the end of every step of the environment too, for what is observed, and nothing but
controls changes until the next one begins. Its first step of physics therefore starts with the forces. The numbers are
the same to the bit.

How a function over tensors becomes a CUDA graph.

What keeps one from being recorded as it stands is often small and harmless: constants copied from the host, lists as
indices, numbers read for a log. `Capturing` does these on the device meanwhile. What it cannot replace ends the
attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from canter.envs.robots.host_state import not_collecting

CONTROLS = ("ctrl", "xfrc_applied", "qfrc_applied")
"""What forces are computed from, and nothing before them."""


class Physics:
    """Steps a simulation of mjlab. Whoever writes to it by torch is noticed, other than by controls."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.repeats: str | None = self._declines()
        """Why every step begins with all of `forward`; None where the first one need not."""
        self._computed = -1
        """What `writes` gave when `forward` was called, -1 where the state has moved on since."""
        self._graph, self._beside = None, None
        """That of the rest of a step, and mjlab's of a whole one, which is made anew if arrays are replaced."""
        if self.repeats is None:
            self._record()

    def _declines(self) -> str | None:
        warp = import_module("mujoco_warp")
        model = self.sim.wp_model
        if model.opt.enableflags & warp.EnableBit.SLEEP:
            return "bodies may sleep"
        return "a callback sets controls" if model.callback.control else None

    def forward(self) -> None:
        """As the simulation's own."""
        self.sim.forward()
        self._computed = self.writes()

    def writes(self) -> int:
        """How often torch wrote to what the simulation holds, controls aside; graphs that are replayed do not count."""
        return _versions(self.sim._data_bridge) + _versions(self.sim._model_bridge)

    def account(self, part: str, before: int, *, restored: bool) -> None:
        """A part of the environment's step was run; there were `before` writes, and it may have `restored` everything.

        A part that writes would do so again, as a graph too, and unnoticed.
        """
        if self.writes() != before and not restored:
            self.repeats = f"{part} write to the simulation"
        elif self._computed == before:
            self._computed = self.writes()

    def step(self) -> None:
        """A step of physics, as the simulation's own."""
        computed, self._computed = self._computed, -1
        if self.repeats is not None or computed != self.writes():
            self.sim.step()
            return
        sim, warp = self.sim, import_module("warp")
        with warp.ScopedDevice(sim.wp_device), sim.nan_guard.watch(sim.data):
            if self._beside is not sim.step_graph:
                self._record()
            if self._graph is None:
                _rest_of_step(sim.wp_model, sim.wp_data)
            else:
                warp.capture_launch(self._graph)

    def _record(self) -> None:
        sim, warp = self.sim, import_module("warp")
        self._graph, self._beside = None, sim.step_graph
        if sim.use_cuda_graph and sim.step_graph is not None:
            with not_collecting(), warp.ScopedDevice(sim.wp_device), warp.ScopedCapture() as capture:
                _rest_of_step(sim.wp_model, sim.wp_data)
            self._graph = capture.graph


def _versions(bridge: Any) -> int:
    found = 0
    for name, value in vars(bridge)["_wrapped_cache"].items():
        if name not in CONTROLS:
            found += _versions(value) if "_wrapped_cache" in vars(value) else value._tensor._version
    return found


def _rest_of_step(model: Any, data: Any) -> None:
    """What `mujoco_warp.step` does once positions and velocities are dealt with."""
    forward, solver, sensor = (import_module(f"mujoco_warp._src.{name}") for name in ("forward", "solver", "sensor"))
    forward.fwd_actuation(model, data)
    forward.fwd_acceleration(model, data, factorize=True)
    solver.solve(model, data)
    sensor.sensor_acc(model, data)
    kinds = forward.IntegratorType
    integrate = {kinds.EULER: forward.euler, kinds.RK4: forward.rungekutta4}
    integrate.get(model.opt.integrator, forward.implicit)(model, data)


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

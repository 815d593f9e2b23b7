"""mjlab's physics, without computing twice what depends on positions and velocities alone.

A step of MuJoCo begins with `forward`: kinematics, contacts, constraints and velocities, then forces, accelerations and
the solver. mjlab calls `forward` at the end of every step of the environment too, for what is observed, and nothing but
controls changes until the next one begins. Its first step of physics therefore starts with the forces. The numbers are
the same to the bit.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

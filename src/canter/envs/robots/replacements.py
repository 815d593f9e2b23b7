"""Replacements for parts of mjlab: masks instead of indices, and physics that repeats no work.

A method that asks which environments satisfy a condition cannot be captured as a CUDA graph, as the
answer is on the device. The replacements write all N environments under a mask, draw the same
random numbers in the same order and return equal bits; every capture compares them with the
original. K of the N environments get new commands.

A step of MuJoCo begins with `forward`: kinematics, contacts, constraints and velocities, then
forces, accelerations and the solver. mjlab also calls `forward` at the end of every step of the
environment, for the observations, and nothing but controls changes until the next step begins. Its
first step of physics can therefore begin with the forces, and computes equal bits.
"""

from __future__ import annotations

from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from canter.core.machine import gc_paused

MIN_FORWARD_SPEED = 0.3
"""Lowest speed of commands to walk straight ahead, in m/s."""
MIN_HORIZONTAL = 0.1
"""An axis points up or down if the length of its projection on the plane is below this."""
CONTROLS = ("ctrl", "xfrc_applied", "qfrc_applied")
"""Inputs of the forces, which nothing before the forces reads."""


def use_masks(env: Any) -> None:
    """Replace methods of commands and sensors that are exactly of mjlab's classes; all others stay.

    The methods of the instances are replaced: mjlab has no setting for this, and another
    environment of the same process keeps the originals.
    """
    command = import_module("mjlab.tasks.velocity.mdp.velocity_command").UniformVelocityCommand
    rays = import_module("mjlab.sensor.raycast_sensor").RayCastSensor
    for term in getattr(env.command_manager, "_terms", {}).values():
        if type(term) is command:
            term._resample_command = MethodType(resample_command, term)
            term._update_command = MethodType(update_command, term)
    for sensor in env.scene.sensors.values():
        if getattr(type(sensor), "_extract_yaw_rotation", None) is rays._extract_yaw_rotation:
            sensor._extract_yaw_rotation = yaw_rotation


def resample_command(term: Any, env_ids: Tensor) -> None:
    """Draw new commands for K environments."""
    cfg = term.cfg

    def draw(low: float, high: float) -> Tensor:
        return torch.empty(len(env_ids), device=term.device).uniform_(low, high)

    x = draw(*cfg.ranges.lin_vel_x)
    y = draw(*cfg.ranges.lin_vel_y)
    turn = draw(*cfg.ranges.ang_vel_z)
    if cfg.heading_command:
        term.heading_target[env_ids] = draw(*cfg.ranges.heading)
        term.is_heading_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_heading_envs
    term.is_standing_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_standing_envs
    term.is_world_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_world_envs
    term.vel_command_w[env_ids] = torch.stack([x, y, turn], 1)
    forward = draw(0.0, 1.0) <= cfg.rel_forward_envs
    term.is_forward_env[env_ids] = forward
    x = torch.where(forward, x.abs().clamp(min=MIN_FORWARD_SPEED), x)
    zero = torch.zeros_like(x)
    y = torch.where(forward, zero, y)
    turn = torch.where(forward, zero, turn)
    term.vel_command_b[env_ids] = torch.stack([x, y, turn], 1)


def update_command(term: Any, env_ids: Tensor | None = None) -> None:
    """Update commands `[N, 3]` in place: headings, the world's frame, standing still."""
    cfg = term.cfg
    command = term.vel_command_b
    heading = term.robot.data.heading_w
    if cfg.heading_command:
        term.heading_error = import_module("mjlab.utils.lab_api.math").wrap_to_pi(term.heading_target - heading)
        low, high = cfg.ranges.ang_vel_z
        turn = torch.clip(cfg.heading_control_stiffness * term.heading_error, min=low, max=high)
        command[:, 2] = torch.where(term.is_heading_env, turn, command[:, 2])
    cos = torch.cos(heading)
    sin = torch.sin(heading)
    x, y = term.vel_command_w[:, :2].unbind(1)
    command[:, 0] = torch.where(term.is_world_env, cos * x + sin * y, command[:, 0])
    command[:, 1] = torch.where(term.is_world_env, -sin * x + cos * y, command[:, 1])
    standing = term.is_standing_env.unsqueeze(1)
    command.masked_fill_(standing, 0.0)
    term.vel_command_w.masked_fill_(standing, 0.0)


def yaw_rotation(rotation: Tensor) -> Tensor:
    """Return the rotations `[N, 3, 3]` about the vertical alone.

    The direction of the x axis determines them, or that of the y axis if the x axis points up or
    down.
    """
    horizontal = rotation[:, :2, :2].clone()
    x = torch.zeros_like(rotation[:, :, 0])
    y = torch.zeros_like(rotation[:, :, 0])
    x[:, :2] = horizontal[:, :, 0]
    y[:, :2] = horizontal[:, :, 1]
    length = x.norm(dim=1)
    y = y / y.norm(dim=1).clamp(min=1e-6).unsqueeze(-1)
    vertical = length < MIN_HORIZONTAL
    x = torch.where(vertical.unsqueeze(-1), torch.stack([y[:, 1], -y[:, 0], y[:, 2]], 1), x)
    x = x / torch.where(vertical, 1.0, length).clamp(min=1e-6).unsqueeze(-1)
    yaw = torch.zeros_like(rotation)
    yaw[:, 0, 0] = x[:, 0]
    yaw[:, 1, 0] = x[:, 1]
    yaw[:, 0, 1] = -x[:, 1]
    yaw[:, 1, 1] = x[:, 0]
    yaw[:, 2, 2] = 1.0
    return yaw


class Physics:
    """Steps a simulation of mjlab; the first step after `forward` begins with the forces.

    It begins with all of `forward` if torch has written to anything but controls in between.
    """

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.full_step_reason: str | None = self._unsupported_reason()
        """Reason why every step begins with all of `forward`; None if the first one need not."""
        self._writes_at_forward = -1
        """Result of `count_writes` when `forward` was called; -1 after a step, as the state has
        changed."""
        self._graph: Any = None
        """The graph of a step without the first part of `forward`."""
        self._full_step_graph: Any = None
        """mjlab's graph of a whole step when `_graph` was recorded; mjlab makes a new one if arrays
        are replaced."""
        if self.full_step_reason is None:
            self._record()

    def _unsupported_reason(self) -> str | None:
        warp = import_module("mujoco_warp")
        model = self.sim.wp_model
        if model.opt.enableflags & warp.EnableBit.SLEEP:
            return "bodies may sleep"
        return "a callback sets controls" if model.callback.control else None

    def forward(self) -> None:
        """Call the simulation's `forward`."""
        self.sim.forward()
        self._writes_at_forward = self.count_writes()

    def count_writes(self) -> int:
        """Return how often torch has written to the simulation, except by replayed graphs.

        Writes of controls are left out.
        """
        return _count_versions(self.sim._data_bridge) + _count_versions(self.sim._model_bridge)

    def attribute_writes(self, segment: str, before: int, *, restored: bool) -> None:
        """Notice whether a segment has written; `before` is the count before it ran.

        A segment that writes once will write again, and unnoticed if it is replayed as a graph:
        from then on every step begins with all of `forward`. Writes that only `restored` the state
        do not count.
        """
        if self.count_writes() != before and not restored:
            self.full_step_reason = f"{segment} write to the simulation"
        elif self._writes_at_forward == before:
            self._writes_at_forward = self.count_writes()

    def step(self) -> None:
        """Step the physics like the simulation's `step`."""
        writes_at_forward = self._writes_at_forward
        self._writes_at_forward = -1
        if self.full_step_reason is not None or writes_at_forward != self.count_writes():
            self.sim.step()
            return
        sim = self.sim
        warp = import_module("warp")
        with warp.ScopedDevice(sim.wp_device), sim.nan_guard.watch(sim.data):
            if self._full_step_graph is not sim.step_graph:
                self._record()
            if self._graph is None:
                _step_from_forces(sim.wp_model, sim.wp_data)
            else:
                warp.capture_launch(self._graph)

    def _record(self) -> None:
        sim = self.sim
        warp = import_module("warp")
        self._graph = None
        self._full_step_graph = sim.step_graph
        if sim.use_cuda_graph and sim.step_graph is not None:
            with gc_paused(), warp.ScopedDevice(sim.wp_device), warp.ScopedCapture() as capture:
                _step_from_forces(sim.wp_model, sim.wp_data)
            self._graph = capture.graph


def _count_versions(bridge: Any) -> int:
    """Return the sum of torch's version counters of all arrays but controls."""
    count = 0
    for name, value in vars(bridge)["_wrapped_cache"].items():
        if name not in CONTROLS:
            count += _count_versions(value) if "_wrapped_cache" in vars(value) else value._tensor._version
    return count


def _step_from_forces(model: Any, data: Any) -> None:
    """Run the part of `mujoco_warp.step` that follows positions and velocities."""
    forward = import_module("mujoco_warp._src.forward")
    solver = import_module("mujoco_warp._src.solver")
    sensor = import_module("mujoco_warp._src.sensor")
    forward.fwd_actuation(model, data)
    forward.fwd_acceleration(model, data, factorize=True)
    solver.solve(model, data)
    sensor.sensor_acc(model, data)
    kinds = forward.IntegratorType
    integrate = {kinds.EULER: forward.euler, kinds.RK4: forward.rungekutta4}
    integrate.get(model.opt.integrator, forward.implicit)(model, data)

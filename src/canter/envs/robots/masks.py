"""Parts of mjlab with masks where they ask for row numbers, so that they can be captured.

They draw the same random numbers in the same order and give the same numbers to the bit; every capture holds them
against the original. K rows are drawn anew, of N.
"""

from __future__ import annotations

from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor

SLOWEST_FORWARD = 0.3
"""Speed that commands to walk straight ahead have at least, in m/s."""
STEEP = 0.1
"""An axis whose part in the plane is shorter than this points up or down."""


def use_masks(env: Any) -> None:
    """Replace methods of commands and sensors of exactly mjlab's classes; all others stay as they are."""
    command = import_module("mjlab.tasks.velocity.mdp.velocity_command").UniformVelocityCommand
    rays = import_module("mjlab.sensor.raycast_sensor").RayCastSensor
    for term in getattr(env.command_manager, "_terms", {}).values():
        if type(term) is command:
            term._resample_command, term._update_command = MethodType(resample, term), MethodType(update, term)
    for sensor in env.scene.sensors.values():
        if getattr(type(sensor), "_extract_yaw_rotation", None) is rays._extract_yaw_rotation:
            sensor._extract_yaw_rotation = yaw_rotation


def resample(term: Any, env_ids: Tensor) -> None:
    """New commands for K rows."""
    cfg = term.cfg

    def draw(low: float, high: float) -> Tensor:
        return torch.empty(len(env_ids), device=term.device).uniform_(low, high)

    x, y, turn = (draw(*span) for span in (cfg.ranges.lin_vel_x, cfg.ranges.lin_vel_y, cfg.ranges.ang_vel_z))
    if cfg.heading_command:
        term.heading_target[env_ids] = draw(*cfg.ranges.heading)
        term.is_heading_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_heading_envs
    term.is_standing_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_standing_envs
    term.is_world_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_world_envs
    term.vel_command_w[env_ids] = torch.stack([x, y, turn], 1)
    forward = draw(0.0, 1.0) <= cfg.rel_forward_envs
    term.is_forward_env[env_ids] = forward
    x = torch.where(forward, x.abs().clamp(min=SLOWEST_FORWARD), x)
    zero = torch.zeros_like(x)
    term.vel_command_b[env_ids] = torch.stack([x, torch.where(forward, zero, y), torch.where(forward, zero, turn)], 1)


def update(term: Any, env_ids: Tensor | None = None) -> None:
    """Turn towards headings, rotate commands of the world's frame, stand still: `[N, 3]` in place."""
    cfg, command, heading = term.cfg, term.vel_command_b, term.robot.data.heading_w
    if cfg.heading_command:
        term.heading_error = import_module("mjlab.utils.lab_api.math").wrap_to_pi(term.heading_target - heading)
        low, high = cfg.ranges.ang_vel_z
        turn = torch.clip(cfg.heading_control_stiffness * term.heading_error, min=low, max=high)
        command[:, 2] = torch.where(term.is_heading_env, turn, command[:, 2])
    cos, sin, (x, y) = torch.cos(heading), torch.sin(heading), term.vel_command_w[:, :2].unbind(1)
    command[:, 0] = torch.where(term.is_world_env, cos * x + sin * y, command[:, 0])
    command[:, 1] = torch.where(term.is_world_env, -sin * x + cos * y, command[:, 1])
    standing = term.is_standing_env.unsqueeze(1)
    command.masked_fill_(standing, 0.0)
    term.vel_command_w.masked_fill_(standing, 0.0)


def yaw_rotation(rotation: Tensor) -> Tensor:
    """Rotations `[N, 3, 3]` about the vertical alone, by where the x axis points, or the y axis where that is steep."""
    flat = rotation[:, :2, :2].clone()
    x, y = torch.zeros_like(rotation[:, :, 0]), torch.zeros_like(rotation[:, :, 0])
    x[:, :2], y[:, :2] = flat[:, :, 0], flat[:, :, 1]
    length = x.norm(dim=1)
    y = y / y.norm(dim=1).clamp(min=1e-6).unsqueeze(-1)
    steep = length < STEEP
    x = torch.where(steep.unsqueeze(-1), torch.stack([y[:, 1], -y[:, 0], y[:, 2]], 1), x)
    x = x / torch.where(steep, 1.0, length).clamp(min=1e-6).unsqueeze(-1)
    turned = torch.zeros_like(rotation)
    turned[:, 0, 0], turned[:, 1, 0], turned[:, 0, 1], turned[:, 1, 1] = x[:, 0], x[:, 1], -x[:, 1], x[:, 0]
    turned[:, 2, 2] = 1.0
    return turned

"""mjlab's uniform velocity command with masks where it asks for row numbers, so that it can be captured.

Draws the same random numbers in the same order and gives the same commands to the bit; `tests/envs/test_mjlab.py` and
every capture hold it against the original. K rows are drawn anew, of N.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

SLOWEST_FORWARD = 0.3
"""Speed that commands to walk straight ahead have at least, in m/s."""


def use_masks(term: Any) -> bool:
    """Replace two methods of a term of exactly mjlab's class; False for any other, which stays as it is."""
    try:
        from mjlab.tasks.velocity.mdp.velocity_command import UniformVelocityCommand
    except ImportError:
        return False
    if type(term) is not UniformVelocityCommand:
        return False
    term._resample_command = MethodType(resample, term)
    term._update_command = MethodType(update, term)
    return True


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
    from mjlab.utils.lab_api.math import wrap_to_pi

    cfg, command, heading = term.cfg, term.vel_command_b, term.robot.data.heading_w
    if cfg.heading_command:
        term.heading_error = wrap_to_pi(term.heading_target - heading)
        low, high = cfg.ranges.ang_vel_z
        turn = torch.clip(cfg.heading_control_stiffness * term.heading_error, min=low, max=high)
        command[:, 2] = torch.where(term.is_heading_env, turn, command[:, 2])
    cos, sin, (x, y) = torch.cos(heading), torch.sin(heading), term.vel_command_w[:, :2].unbind(1)
    command[:, 0] = torch.where(term.is_world_env, cos * x + sin * y, command[:, 0])
    command[:, 1] = torch.where(term.is_world_env, -sin * x + cos * y, command[:, 1])
    standing = term.is_standing_env.unsqueeze(1)
    command.masked_fill_(standing, 0.0)
    term.vel_command_w.masked_fill_(standing, 0.0)

"""The settings that a robot's task brings along for RSL-RL or rl_games, as those of a run here."""

from __future__ import annotations

from dataclasses import replace

import torch

from canter.compat.settings.importing import Imported, import_config
from canter.envs.robots import isaaclab, mjlab

NUM_ENVS = {"cuda": 4096, "cpu": 16}
"""Environments by kind of device: the tasks themselves do not say, and on a CPU they are for a look only."""


def task_settings(env_id: str, device: str | None) -> Imported | None:
    """What a task of mjlab or Isaac Lab is registered with; None for other environments.

    Without a device it is the GPU, where there is one.
    """
    scheme, _, task = env_id.partition(":")
    if scheme not in ("mjlab", "isaaclab"):
        return None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    plain = mjlab.rl_settings(task) if scheme == "mjlab" else isaaclab.rl_settings(task, device)
    kind = torch.device(device).type
    imported = import_config(plain, env=env_id, num_envs=NUM_ENVS.get(kind, NUM_ENVS["cpu"]))
    return replace(imported, config=replace(imported.config, device=device))

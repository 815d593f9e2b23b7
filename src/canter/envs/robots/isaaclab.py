"""`isaaclab:TASK`: NVIDIA Isaac Lab, which is imported once its application runs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium

from canter.core.registry import UserError, nearest
from canter.envs.robots.adapter import FinalObsOption, ManagerEnv
from canter.envs.robots.mjlab import named_device, override

HOW = "install Isaac Sim and Isaac Lab (https://isaac-sim.github.io/IsaacLab), then pip install canter beside them"
ENTRY_POINTS = ("rsl_rl_cfg_entry_point", "rl_games_cfg_entry_point")
"""Entries of a task's registration with settings, RSL-RL's first."""

_app: Any = None
"""The running application; nothing here calls its `close()`, which would end the process."""


def tasks() -> list[str]:
    """Return the registered tasks; Isaac Lab registers its own once its application runs."""
    return sorted(name for name, spec in gymnasium.registry.items() if set(ENTRY_POINTS) & spec.kwargs.keys())


def rl_settings(task: str, device: str = "cuda:0") -> dict[str, Any]:
    """Return the task's settings for RSL-RL or rl_games, as plain data."""
    spec, utils = _find_task(task, device)
    entry = next((name for name in ENTRY_POINTS if name in spec.kwargs), None)
    if entry is None:
        raise UserError(f"isaaclab:{task} has no settings for RSL-RL or rl_games: pass --config FILE")
    settings = utils.load_cfg_from_registry(task, entry)
    return settings if isinstance(settings, dict) else settings.to_dict()


def make_isaaclab(
    task: str,
    num_envs: int,
    device: str,
    *,
    final_obs: FinalObsOption = "exact",
    clip_actions: float | None = None,
    clip_observations: float | None = None,
    random_start: bool = True,
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    **overrides: Any,
) -> ManagerEnv:
    """Make a task of Isaac Lab, such as isaaclab:Isaac-Ant-v0; needs Isaac Lab.

    `final_obs` "exact" requests final observations from Isaac Lab 3; older versions lose them, and
    the spec says so. `clip_actions` None takes the task's value for RSL-RL. `overrides` are
    settings of the task by their dotted path.
    """
    if final_obs not in ("exact", "approximate"):
        raise UserError(f"env.options.final_obs={final_obs!r} must be exact or approximate")
    spec, utils = _find_task(task, device, cameras=render_mode is not None)
    cfg = utils.parse_env_cfg(task, device=named_device(device), num_envs=num_envs)
    override(cfg, overrides)
    cfg.seed = 0
    exact = final_obs == "exact" and hasattr(cfg, "compute_final_obs")
    if hasattr(cfg, "compute_final_obs"):
        cfg.compute_final_obs = exact
    if max_episode_steps is not None:  # half a step less, as the quotient is rounded up
        cfg.episode_length_s = (max_episode_steps - 0.5) * cfg.sim.dt * cfg.decimation
    if clip_actions is None and "rsl_rl_cfg_entry_point" in spec.kwargs:
        clip_actions = getattr(utils.load_cfg_from_registry(task, "rsl_rl_cfg_entry_point"), "clip_actions", None)
    env: Any = gymnasium.make(task, cfg=cfg, render_mode=render_mode).unwrapped
    if hasattr(env, "possible_agents"):
        raise UserError(f"isaaclab:{task} has several agents; only tasks with one agent are supported")
    return ManagerEnv(
        env,
        f"isaaclab:{task}",
        clip_actions=clip_actions,
        clip_observations=clip_observations,
        final_obs="separate" if exact else "unknown",
        random_start=random_start,
    )


def _find_task(task: str, device: str, cameras: bool = False) -> tuple[Any, Any]:
    """Start the application if need be; return the task's registration and Isaac Lab's helpers."""
    global _app
    if find_spec("isaaclab") is None:
        raise ImportError(f"isaaclab:{task} needs Isaac Lab: {HOW}")
    if _app is None:
        launch = import_module("isaaclab.app").AppLauncher
        _app = launch(headless=True, device=named_device(device), enable_cameras=cameras).app
    import_module("isaaclab_tasks")  # registers the tasks
    utils = import_module("isaaclab_tasks.utils")
    if task not in gymnasium.registry:
        raise UserError(f"unknown Isaac Lab task {task!r}: {nearest(task, tasks())}")
    return gymnasium.spec(task), utils

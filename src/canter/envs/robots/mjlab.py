"""`mjlab:TASK`: MuJoCo Warp on a GPU, or slowly on a CPU."""

from __future__ import annotations

import logging
from dataclasses import asdict, is_dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from canter.core.registry import UserError, nearest
from canter.envs.robots.adapter import FinalObsOption, ManagerEnv
from canter.envs.robots.captured import CapturedStep

HOW = 'pip install "canter[mjlab]"'
EXPORTER = "mjlab.rl.exporter_utils"
CAPTURED_VERSION = "1.6"
"""Version of mjlab whose step `CapturedStep` repeats."""

_log = logging.getLogger(__name__)


def tasks() -> list[str]:
    """Return the registered tasks; none if mjlab is not installed."""
    return [] if find_spec("mjlab") is None else _registry("").list_tasks()


def rl_settings(task: str) -> dict[str, Any]:
    """Return the task's settings for RSL-RL, as plain data."""
    return asdict(_find_task(task).load_rl_cfg(task))


def make_mjlab(
    task: str,
    num_envs: int,
    device: str,
    *,
    final_obs: FinalObsOption = "approximate",
    clip_actions: float | None = None,
    capture: bool = True,
    random_start: bool = True,
    play: bool = False,
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    **overrides: Any,
) -> ManagerEnv:
    """Make a task of mjlab, such as mjlab:Mjlab-Velocity-Flat-Unitree-Go1.

    It needs `pip install "canter[mjlab]"`. `final_obs` "exact" resets ended environments here,
    after their final observations were read; "approximate" leaves resets to mjlab, which loses
    them. `clip_actions` None takes the task's value. `capture` runs segments of a step as CUDA
    graphs on a GPU. `play` takes the task's settings for watching. `overrides` are settings of the
    task by their dotted path, such as `rewards.air_time.weight`.
    """
    registry = _find_task(task)
    if final_obs not in ("exact", "approximate"):
        raise UserError(f"env.options.final_obs={final_obs!r} must be exact or approximate")
    cfg = registry.load_env_cfg(task, play=play)
    override(cfg, overrides)
    cfg.scene.num_envs = num_envs
    cfg.seed = 0
    cfg.auto_reset = final_obs == "approximate"
    if max_episode_steps is not None:  # half a step less, as the quotient is rounded up
        cfg.episode_length_s = (max_episode_steps - 0.5) * cfg.sim.mujoco.timestep * cfg.decimation
    if clip_actions is None:
        clip_actions = getattr(registry.load_rl_cfg(task), "clip_actions", None)
    if (
        torch.device(device).type == "cuda"
    ):  # else scripted functions are recompiled for every new number of environments
        torch.jit.set_fusion_strategy([("DYNAMIC", 10)])
    env = import_module("mjlab.envs").ManagerBasedRlEnv(cfg, device=named_device(device), render_mode=render_mode)
    return ManagerEnv(
        env,
        f"mjlab:{task}",
        clip_actions=clip_actions,
        resets_itself=cfg.auto_reset,
        final_obs="unknown" if cfg.auto_reset else "separate",
        random_start=random_start,
        step=CapturedStep(env) if capture and _can_capture(device) else None,
    )


def _can_capture(device: str) -> bool:
    """Return whether this is a GPU and the version of mjlab whose step `CapturedStep` repeats."""
    if torch.device(device).type != "cuda":
        return False
    installed = version("mjlab")
    if not installed.startswith(f"{CAPTURED_VERSION}."):
        _log.warning("mjlab's step runs eagerly: CUDA graphs need version %s, this is %s", CAPTURED_VERSION, installed)
        return False
    return True


def onnx_metadata(env: Any, run: str) -> dict[str, Any]:
    """Return the metadata that mjlab writes to the ONNX files of a robot.

    It has joints, gains, default pose, observations and action scales; empty for other
    environments, and for tasks without a robot with position control of its joints.
    """
    if not isinstance(env, ManagerEnv) or not env.spec.env_id.startswith("mjlab:"):
        return {}
    try:
        return dict(import_module(EXPORTER).get_base_metadata(env.env, run))
    except (KeyError, ValueError, AssertionError):
        return {}


def attach_metadata(file: str, metadata: dict[str, Any]) -> None:
    """Write metadata to an ONNX file, in mjlab's format."""
    import_module(EXPORTER).attach_metadata_to_onnx(file, metadata)


def named_device(device: str) -> str:
    """Return a device with its index, which simulators need."""
    kind = torch.device(device)
    return str(kind) if kind.type != "cuda" or kind.index is not None else f"cuda:{torch.cuda.current_device()}"


def _registry(task: str) -> Any:
    try:
        return import_module("mjlab.tasks.registry")  # importing its package registers the tasks
    except ImportError as error:
        raise ImportError(f"mjlab:{task} needs mjlab: {HOW} ({error})") from error


def _find_task(task: str) -> Any:
    registry = _registry(task)
    if task not in registry.list_tasks():
        raise UserError(f"unknown mjlab task {task!r}: {nearest(task, registry.list_tasks())}")
    return registry


def override(cfg: Any, overrides: dict[str, Any], path: str = "env.options") -> None:
    """Write settings, by nested or dotted names, into a tree of dataclasses and mappings.

    Raise UserError for an unknown one.
    """
    for name, value in overrides.items():
        first, _, rest = name.partition(".")
        settings = cfg if isinstance(cfg, dict) else vars(cfg)
        if first not in settings:
            raise UserError(f"{path}.{name}={value!r}: the task has no such setting, {nearest(first, settings)}")
        present = settings[first]
        if rest:
            override(present, {rest: value}, f"{path}.{first}")
        elif isinstance(value, dict) and (is_dataclass(present) or isinstance(present, dict)):
            override(present, value, f"{path}.{first}")
        else:
            settings[first] = tuple(value) if isinstance(present, tuple) else value

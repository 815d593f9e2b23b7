"""`maniskill:TASK`: ManiSkill 3, many environments on a GPU or a single one on a CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError, nearest
from canter.envs.robots.adapter import ManagerEnv
from canter.envs.robots.mjlab import named_device

HOW = "pip install mani_skill"


def tasks() -> list[str]:
    """Return the registered tasks; imports ManiSkill."""
    import_module("mani_skill.envs")  # registers them
    return sorted(import_module("mani_skill.utils.registration").REGISTERED_ENVS)


def make_maniskill(
    task: str,
    num_envs: int,
    device: str,
    *,
    random_start: bool = True,
    max_episode_steps: int | None = None,
    **options: Any,
) -> ManagerEnv:
    """ManiSkill 3, such as maniskill:PickCube-v1 (pip install mani_skill).

    Success and failure terminate an episode, the time limit truncates it. `options` are arguments
    of the task, such as `control_mode` and `obs_mode`, by default "state".
    """
    try:
        known = tasks()
    except ImportError as error:
        raise ImportError(f"maniskill:{task} needs ManiSkill: {HOW} ({error})") from error
    if task not in known:
        raise UserError(f"unknown ManiSkill task {task!r}: {nearest(task, known)}")
    on_gpu = torch.device(device).type == "cuda"
    if not on_gpu and num_envs > 1:
        raise UserError(f"env.num_envs={num_envs}: on a CPU ManiSkill steps one environment; set 1, or take a GPU")
    limit = max_episode_steps or gymnasium.spec(task).max_episode_steps
    if limit is None:
        raise UserError(f"maniskill:{task} has no time limit; set env.options.max_episode_steps")
    backend = named_device(device).replace("cuda", "physx_cuda") if on_gpu else "physx_cpu"
    settings = {"obs_mode": "state", "sim_backend": backend, **options}
    if settings["obs_mode"].startswith("state"):
        settings.setdefault("render_backend", "none")  # nothing is drawn, so no Vulkan device is needed for it
    env: Any = gymnasium.make(task, num_envs=num_envs, **settings).unwrapped
    return ManagerEnv(
        ManiSkillTask(env, limit),
        f"maniskill:{task}",
        resets_itself=False,
        final_obs="separate",
        random_start=random_start,
    )


class ManiSkillTask:
    """N environments of ManiSkill with the members that `ManagerEnv` reads from a simulator.

    Time limits are counted here: the wrappers of `gymnasium.make` are for one environment.
    """

    cfg = None

    def __init__(self, env: Any, limit: int) -> None:
        self.env = env
        self.max_episode_length = limit
        self.num_envs = env.num_envs
        self.device = env.device
        self.single_action_space = env.single_action_space
        self.step_dt = 1 / env.control_freq
        self.common_step_counter = 0
        self.extras: dict[str, Any] = {}
        self._info: dict[str, Any] = {}
        self._random = np.random.default_rng(0)
        self.close = env.close

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps `[N]` of the present episodes, which may be written to."""
        return self.env.elapsed_steps

    def reset(self, seed: int | None = None, env_ids: Tensor | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restart all environments, or those of `env_ids`; their success rate is `extras["log"]`."""
        self.extras = {}
        if env_ids is not None:
            flags = {name: self._info[name] for name in ("success", "fail") if name in self._info}
            self.extras["log"] = {name: flag[env_ids].float().mean() for name, flag in flags.items()}
        if seed is not None:
            self._random = np.random.default_rng(seed)
        own = [self.device] if torch.device(self.device).type == "cuda" else []
        with torch.random.fork_rng(own):  # without a seed, new episodes are drawn from torch's own generator
            torch.manual_seed(int(self._random.integers(2**31)))
            obs, _ = self.env.reset(seed=seed, options={} if env_ids is None else {"env_idx": env_ids})
        return _to_groups(obs), self.extras

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Apply actions `[N, A]`, which the simulator clips, without restarting ended environments."""
        self.common_step_counter += 1
        obs, reward, terminated, _, self._info = self.env.step(action)
        return _to_groups(obs), reward, terminated, self.env.elapsed_steps >= self.max_episode_length, {}

    def render(self) -> None:
        """Return no picture: the simulator draws on a GPU alone, with Vulkan."""


def _to_groups(obs: Any) -> dict[str, Any]:
    return obs if isinstance(obs, dict) else {"policy": obs}

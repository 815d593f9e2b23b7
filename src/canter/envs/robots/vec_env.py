"""Environments of the user's own with RSL-RL's `VecEnv` interface, as those of Genesis and legged_gym.

N environments. The interface has one `done` for both ends of an episode; `extras["time_outs"]` marks
those that the time limit cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.struct import Obs
from canter.envs.robots.adapter import ManagerEnv, flatten_groups


@runtime_checkable
class VecEnv(Protocol):
    """Interface of RSL-RL's environments, with the `reset` that all generations of them have."""

    num_envs: int
    num_actions: int
    max_episode_length: Any
    episode_length_buf: Tensor
    device: Any

    def get_observations(self) -> Any:
        """Return the present observations."""
        ...

    def reset(self) -> Any:
        """Restart all environments."""
        ...

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        """Apply actions `[N, A]`; return observations, rewards, episode ends and extras."""
        ...


def read_groups(obs: Any, more: Mapping[str, Any] = MappingProxyType({})) -> Obs:
    """Return observations of any generation of RSL-RL as groups; `more` come with a bare tensor."""
    if not isinstance(obs, Tensor):
        return flatten_groups(obs)
    groups = {"policy": obs}
    groups |= {name: more[name] for name in ("critic", "teacher") if more.get(name) is not None}
    return groups | ({"rnd": more["rnd_state"]} if "rnd_state" in more else {})


def read_observations(env: Any) -> Obs:
    """Return the present observations of an environment of any generation of RSL-RL."""
    found = env.get_observations()
    if isinstance(found, tuple):
        obs, extras = found
        return read_groups(obs, extras.get("observations") or {})
    if isinstance(found, Tensor) and hasattr(env, "get_privileged_observations"):
        return read_groups(found, {"critic": env.get_privileged_observations()})
    return read_groups(found)


def step_vec_env(env: Any, action: Tensor) -> tuple[Obs, Tensor, Tensor, dict[str, Any]]:
    """Step an environment of any generation; return observations, rewards, episode ends and extras."""
    result = env.step(action)
    if len(result) == 5:  # 1.x: observations, privileged ones, rewards, ends, extras
        obs, privileged, reward, done, extras = result
        return read_groups(obs, {"critic": privileged}), reward, done, extras
    obs, reward, done, extras = result
    return read_groups(obs, extras.get("observations") or {}), reward, done, extras


def make_vec_env(env: VecEnv, env_id: str, num_envs: int, device: str) -> ManagerEnv:
    """Return Canter's environment of a VecEnv; one step of it shows whether it keeps final observations."""
    here = torch.device(env.device)
    if env.num_envs != num_envs:
        raise UserError(f"{env_id} made {env.num_envs} environments, not the {num_envs} of env.num_envs: pass it on")
    if here.type != torch.device(device).type:
        raise UserError(f"{env_id} is on {here}, the run on {device}: set --device {here.type}, or make it on {device}")
    task = VecEnvTask(env)
    task.reset()
    *_, extras = task.step(torch.zeros((num_envs, int(env.num_actions)), device=here))
    return ManagerEnv(task, env_id, final_obs="separate" if "final_obs" in extras else "unknown")


class VecEnvTask:
    """N environments of RSL-RL's interface with the members that `ManagerEnv` reads from a simulator."""

    cfg = None

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.device = env.device
        self.max_episode_length = int(env.max_episode_length)
        self.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (int(env.num_actions),))
        self.common_step_counter = 0

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps `[N]` of the present episodes, which may be written to."""
        return self.env.episode_length_buf

    def reset(self, seed: int | None = None) -> tuple[Obs, dict[str, Any]]:
        """Restart all environments; a seed is that of torch and NumPy, from which they draw."""
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
        self.env.reset()
        return read_observations(self.env), {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Apply actions `[N, A]`; return observations, rewards, terminations, truncations and extras."""
        self.common_step_counter += 1
        obs, reward, done, extras = step_vec_env(self.env, action)
        done = done.bool()
        time_outs = extras.get("time_outs")
        truncated = torch.zeros_like(done) if time_outs is None else done & time_outs.bool()
        more: dict[str, Any] = {"log": extras.get("log") or extras.get("episode")}
        if extras.get("final_obs") is not None:
            more["final_obs"] = read_groups(extras["final_obs"])
        return obs, reward, done & ~truncated, truncated, more

    def close(self) -> None:
        """Leave the simulator open: the interface has no `close`, and the process ends it."""

"""RSL-RL's vectorised environments, of every generation, behind Canter's contract.

N environments, A action components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from canter.compat.adapter import ParentEnv
from canter.core.declarations import Symmetry
from canter.core.specs import Continuous, Step
from canter.core.struct import Obs
from canter.envs.robots.adapter import flat_groups


class RslRlEnv(ParentEnv):
    """A VecEnv of RSL-RL: groups of a TensorDict (3.x on), or the tensors of 1.x and 2.x as `policy` and `critic`.

    Actions go to it as they were drawn.
    """

    def __init__(self, env: Any, device: str | torch.device = "cpu") -> None:
        super().__init__(env, device)
        infinite = (float("inf"),) * int(env.num_actions)
        action, name = Continuous(tuple(-x for x in infinite), infinite), type(getattr(env, "unwrapped", env)).__name__
        self.spec = self.describe(self.observe(), action, int(env.num_envs), env_id=name)

    def declare(self, symmetries: tuple[Symmetry, ...]) -> None:
        """Say how the world can be mirrored; its settings know, the environment does not."""
        self.spec = replace(self.spec, symmetries=symmetries)

    def observe(self) -> Obs:
        """The observations of now; the environment was reset by whoever made it."""
        found, more = self.env.get_observations(), {}
        if isinstance(found, tuple):
            found, extras = found
            more = extras.get("observations") or {}
        elif isinstance(found, Tensor) and hasattr(self.env, "get_privileged_observations"):
            more = {"critic": self.env.get_privileged_observations()}
        return self.groups(found, more)

    def groups(self, obs: Any, more: Mapping[str, Any] = MappingProxyType({})) -> Obs:
        """Observations of any generation as groups on the learner's device; `more` are those beside a bare tensor."""
        if isinstance(obs, Tensor):
            beside = {name: more[name] for name in ("critic", "teacher") if more.get(name) is not None}
            named = {"policy": obs} | beside
        else:
            named = flat_groups(obs)
        return {name: group.to(self.device) for name, group in named.items()}

    def reset(self, seed: int | None = None) -> Obs:
        """The observations of now: RSL-RL's environments seed and reset themselves."""
        return self.observe()

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment."""
        result = self.env.step(action.to(self.env.device))
        if len(result) == 5:  # 1.x: observations, privileged ones, rewards, ends, infos
            obs, privileged, reward, done, extras = result
            more = {"critic": privileged}
        else:
            obs, reward, done, extras = result
            more = extras.get("observations") or {}
        told = extras.get("log") or extras.get("episode")
        reward = reward.to(self.device).float()
        return self.stepped(self.groups(obs, more), reward, done, extras.get("time_outs"), told)

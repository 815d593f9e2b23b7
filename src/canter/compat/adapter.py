"""What the parents' vectorised environments have in common behind Canter's contract.

They reset within the step and so lose the last observation of an episode. N rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canter.core.specs import ActionSpec, EnvSpec, Step, TensorSpec
from canter.core.struct import Obs
from canter.envs.robots.adapter import scalars


class ParentEnv:
    """Description and steps; how observations are asked for is up to each parent's own."""

    reset_is_clean = False

    def __init__(self, env: Any, device: str | torch.device) -> None:
        self.env, self.device = env, torch.device(device)

    def describe(self, obs: Obs, action: ActionSpec, rows: int, **more: Any) -> EnvSpec:
        """Shapes and conventions, from first observations."""
        groups = {name: TensorSpec(tuple(group.shape[1:]), group.dtype) for name, group in obs.items()}
        return EnvSpec(groups, action, rows, self.device, final_obs="unknown", **more)

    def stepped(self, obs: Obs, reward: Tensor, done: Any, cut: Any, told: Any) -> Step:
        """A step by its ends `[N]`, those of them that were cut off, if anybody says, and the simulator's numbers."""
        done = self.flags(done)
        truncated = torch.zeros_like(done) if cut is None else done & self.flags(cut)
        return Step(
            obs=obs,
            reward=reward.reshape(-1),
            terminated=done & ~truncated,
            truncated=truncated,
            valid=torch.ones_like(done),
            metrics=scalars(told or {}, self.device),
        )

    def flags(self, value: Any) -> Tensor:
        """True or false for each row, on the learner's device."""
        return torch.as_tensor(value).to(self.device).bool().reshape(-1)

    def close(self) -> None:
        """Leave it open: whoever made it closes it."""

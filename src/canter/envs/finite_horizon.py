"""Tasks whose deadline is part of the task."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from canter.specs import Env, Step

OFFERED = (
    *("state_dict", "load_state_dict", "snapshot", "resumes"),
    *("generators", "seeds_by_row", "render", "render_fps"),
)
"""What an environment may offer on top of the protocol; passed on where it does."""


class FiniteHorizon:
    """Any environment, with every cut of an episode counted as its termination.

    That is right where the deadline belongs to the task and the observation shows the time: nothing follows it.
    """

    def __init__(self, env: Env) -> None:
        if env.spec.truncates is False:
            raise ValueError(
                f"env.finite_horizon=True: {env.spec.env_id} never cuts an episode off, so no deadline could count as "
                "its end; give it one (env.options.max_episode_steps) or leave the setting out"
            )
        self.env, self.spec = env, replace(env.spec, truncates=False)
        self.reset, self.close = env.reset, env.close
        for name in OFFERED:
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    @property
    def begins_anew(self) -> bool:
        """As the environment says, which may change while it is used."""
        return getattr(self.env, "begins_anew", False)

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; no row is truncated."""
        step = self.env.step(action)
        return replace(step, terminated=step.terminated | step.truncated, truncated=torch.zeros_like(step.truncated))

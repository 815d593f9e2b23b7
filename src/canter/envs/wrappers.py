"""Tasks whose deadline is part of the task.

Wrappers around single Gymnasium environments, by name, from settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import gymnasium
import torch
from torch import Tensor

from canter.core.registry import UserError, nearest
from canter.core.specs import Env, Step
from canter.envs.imports import find_factory

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
            raise UserError(
                f"env.finite_horizon=True: {env.spec.env_id} never cuts an episode off, so no deadline could count as "
                "its end; give it one (env.options.max_episode_steps) or leave the setting out"
            )
        self.env, self.spec = env, replace(env.spec, truncates=False)
        self.reset, self.close = env.reset, env.close
        for name in OFFERED:
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    @property
    def reset_is_clean(self) -> bool:
        """As the environment says, which may change while it is used."""
        return getattr(self.env, "reset_is_clean", False)

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; no row is truncated."""
        step = self.env.step(action)
        return replace(step, terminated=step.terminated | step.truncated, truncated=torch.zeros_like(step.truncated))


Wrap = Callable[[gymnasium.Env], gymnasium.Env]


def make_wrappers(settings: Mapping[str, Any]) -> list[Wrap]:
    """The wrappers that settings name, the first the innermost: name -> keyword arguments, or null for none.

    Arguments that a wrapper cannot have are refused before it goes around anything.
    """
    made = []
    for name, given in settings.items():
        wrapper = _find(name)
        if not isinstance(given, Mapping | None):
            raise UserError(f"env.wrappers.{name}={given!r}: expected its keyword arguments as a mapping, or null")
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in (given or {}).items()}
        try:
            signature(wrapper).bind(None, **arguments)
        except TypeError as error:
            taken = ", ".join(list(signature(wrapper).parameters)[1:]) or "none"
            raise UserError(f"env.wrappers.{name}: {error}; it takes {taken}") from error
        made.append(partial(wrapper, **arguments))
    return made


def _find(name: str) -> Callable[..., Any]:
    if ":" not in name:
        if name in gymnasium.wrappers.__all__:
            return getattr(gymnasium.wrappers, name)
        raise UserError(
            f"env.wrappers.{name}: no wrapper of Gymnasium is called so (one of yours is my_module:MyWrapper, with "
            f"--allow-import my_module), {nearest(name, gymnasium.wrappers.__all__)}"
        )
    found = find_factory(name, ())
    if found is None:
        raise UserError(f"env.wrappers.{name}: that is an environment, not a wrapper")
    return found

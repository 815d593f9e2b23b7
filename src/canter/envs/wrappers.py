"""Wrappers: a deadline that is part of the task, and Gymnasium's wrappers named in settings."""

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
from canter.core.specs import DeclaresCleanReset, Env, Step
from canter.envs.imports import find_object, parameters_of

OPTIONAL = (
    *("state_dict", "load_state_dict", "snapshot", "resumes"),
    *("generators", "seeds_by_row", "render", "render_fps", "absent_info", "read_metrics"),
)
"""Members of the optional protocols of `canter.core.specs.Env`, and of environments that draw
themselves."""


class FiniteHorizon:
    """Any environment, with every truncation counted as a termination.

    That is right if the deadline belongs to the task and the observation shows the time: nothing
    follows it.
    """

    def __init__(self, env: Env) -> None:
        if env.spec.truncates is False:
            raise UserError(
                f"env.finite_horizon=True: {env.spec.env_id} never truncates an episode, so there is no deadline; set "
                "one with env.options.max_episode_steps or leave the setting out"
            )
        self.env = env
        self.spec = replace(env.spec, truncates=False)
        self.reset = env.reset
        self.close = env.close
        # A protocol is recognised by its members, so this wrapper must have exactly those of its
        # environment.
        for name in OPTIONAL:
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    @property
    def reset_is_clean(self) -> bool:
        """Declaration of the environment, which may change while it is used."""
        return isinstance(self.env, DeclaresCleanReset) and bool(self.env.reset_is_clean)

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; no row is truncated."""
        step = self.env.step(action)
        return replace(step, terminated=step.terminated | step.truncated, truncated=torch.zeros_like(step.truncated))


Wrap = Callable[[gymnasium.Env], gymnasium.Env]


def make_wrappers(settings: Mapping[str, Any]) -> list[Wrap]:
    """Return the wrappers that settings name, innermost first: name -> keyword arguments or null.

    Raises UserError for arguments that a wrapper does not take, before any environment is made.
    """
    wraps = []
    for name, arguments in settings.items():
        wrapper = _find(name)
        if not isinstance(arguments, Mapping | None):
            raise UserError(f"env.wrappers.{name}={arguments!r}: expected its keyword arguments as a mapping, or null")
        keywords = {key: tuple(value) if isinstance(value, list) else value for key, value in (arguments or {}).items()}
        try:
            signature(wrapper).bind(None, **keywords)
        except TypeError as error:
            names = ", ".join(list(parameters_of(wrapper))[1:]) or "none"
            raise UserError(f"env.wrappers.{name}: {error}; it takes {names}") from error
        wraps.append(partial(wrapper, **keywords))
    return wraps


def _find(name: str) -> Callable[..., Any]:
    if ":" not in name:
        if name in gymnasium.wrappers.__all__:
            return getattr(gymnasium.wrappers, name)
        raise UserError(
            f"env.wrappers.{name}: Gymnasium has no wrapper of this name (one of yours is my_module:MyWrapper, with "
            f"--allow-import my_module), {nearest(name, gymnasium.wrappers.__all__)}"
        )
    return find_object(name, "env.wrappers")

"""What stands before the colon of an environment id: who builds the environments.

N environments. A scheme is one registration of a builder, here or in a plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from canter.core.registry import Registry, UserError, nearest
from canter.core.specs import Env
from canter.envs.envpool import EnvPoolEnv
from canter.envs.gymnasium import make_gymnasium
from canter.envs.imports import find_factory, makes_a_batch, registered_id
from canter.envs.pettingzoo import make_pettingzoo
from canter.envs.robots.isaaclab import make_isaaclab
from canter.envs.robots.mjlab import make_mjlab
from canter.envs.tensor import tensor_envs

Builder = Callable[..., Env]
"""Called with the part of the id after the colon, `num_envs` and `device` as keywords, and `env.options`.

A time limit (`env.reset_steps`) comes as the option `max_episode_steps`. A builder that has parameters
`vectorization`, `autoreset`, `step_timeout` or `close_timeout` is given these settings too. Its docstring begins with
the line that `canter envs` shows.
"""

SETTINGS = {"num_envs", "device", "vectorization", "autoreset", "step_timeout", "close_timeout", "wrappers"}
"""Keywords that builders are given from settings of their own."""


def _check(builder: Builder) -> None:
    if not makes_a_batch(builder):
        names = ", ".join(inspect.signature(builder).parameters)
        raise TypeError(f"expected a function of name, num_envs, device and options, not one of {names}")


schemes: Registry[Builder] = Registry("scheme", _check, default="gymnasium")
"""Builders by the part of an id before its colon; an id without a colon is Gymnasium's."""


def make_tensor(name: str, num_envs: int, *, device: str, **options: Any) -> Env:
    """Written in torch, batched, on any device."""
    factory = tensor_envs[name]
    check_options(factory, f"tensor:{name}", options)
    return factory(num_envs, device, **options)


schemes.register("gymnasium")(make_gymnasium)
schemes.register("envpool")(EnvPoolEnv)
schemes.register("pettingzoo")(make_pettingzoo)
schemes.register("tensor")(make_tensor)
schemes.register("mjlab")(make_mjlab)
schemes.register("isaaclab")(make_isaaclab)


def find_builder(env_id: str) -> tuple[Builder, str]:
    """Who builds the environments of an id, and the name to give to it."""
    scheme, colon, name = env_id.partition(":")
    if not colon:
        return make_gymnasium, env_id
    if scheme in schemes:
        return schemes[scheme], name
    factory = find_factory(env_id, schemes)
    if factory is None:
        return make_gymnasium, env_id
    if not makes_a_batch(factory):
        return make_gymnasium, registered_id(env_id, factory)

    def imported(name: str, /, *, num_envs: int, device: str, **options: Any) -> Env:
        check_options(factory, env_id, options)
        return factory(num_envs=num_envs, device=device, **options)

    return imported, name


def check_options(builder: Callable[..., Any], env_id: str, options: dict[str, Any]) -> None:
    """Refuse `env.options` that nobody takes, by their keys."""
    parameters = inspect.signature(builder).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in options.items():
        if name in SETTINGS:
            setting = "device" if name == "device" else f"env.{name}"
            raise UserError(f"env.options.{name}={value!r} is no option of {env_id}; say {setting}")
        if not takes_any and name not in parameters:
            limit = " (nor env.reset_steps, which sets it)" if name == "max_episode_steps" else ""
            known = nearest(name, parameters.keys() - SETTINGS)
            raise UserError(f"env.options.{name}={value!r}{limit}: {env_id} takes no such option, {known}")

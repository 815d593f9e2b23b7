"""Schemes of environment ids: the prefix before the colon selects the builder of the environments.

N environments. A scheme is one registration of a builder, here or in a plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from canter.core.registry import Registry, UserError, nearest
from canter.core.specs import Env
from canter.envs.envpool import EnvPoolEnv
from canter.envs.gymnasium import make_gymnasium
from canter.envs.imports import find_factory, makes_a_batch, parameters_of, registered_id
from canter.envs.pettingzoo import make_pettingzoo
from canter.envs.robots.isaaclab import make_isaaclab
from canter.envs.robots.mjlab import make_mjlab
from canter.envs.tensor import tensor_envs

Builder = Callable[..., Env]
"""Called with the part of the id after the colon, `num_envs` and `device` as keywords, and
`env.options`.

A time limit (`env.reset_steps`) comes as the option `max_episode_steps`. A builder that has
parameters `vectorization`, `autoreset`, `step_timeout`, `close_timeout` or `wrappers` receives
these settings too. `canter envs` shows the first line of its docstring.
"""

SETTINGS = {"num_envs", "device", "vectorization", "autoreset", "step_timeout", "close_timeout", "wrappers"}
"""Keywords of builders that have settings of their own, so that `env.options` cannot set them."""


def _check(builder: Builder) -> None:
    if not makes_a_batch(builder):
        names = ", ".join(parameters_of(builder))
        raise TypeError(f"expected a function of name, num_envs, device and options, not one of {names}")


schemes: Registry[Builder] = Registry("scheme", _check, default="gymnasium")
"""Builders by the prefix of an id; an id without a colon is Gymnasium's."""


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
    """Return the builder of an id's environments, and the name to pass to it."""
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


def check_options(builder: Callable[..., Any], env_id: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for an entry of `env.options` that the builder does not take."""
    parameters = parameters_of(builder)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in options.items():
        if name in SETTINGS:
            setting = "device" if name == "device" else f"env.{name}"
            raise UserError(f"env.options.{name}={value!r} is no option of {env_id}; set {setting} instead")
        if not takes_any and name not in parameters:
            limit = " (nor env.reset_steps, which sets it)" if name == "max_episode_steps" else ""
            known = nearest(name, parameters.keys() - SETTINGS)
            raise UserError(f"env.options.{name}={value!r}{limit}: {env_id} takes no such option, {known}")

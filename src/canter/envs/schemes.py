"""What stands before the colon of an environment id: who builds the environments.

N environments. A scheme is one registration of a builder, here or in a plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from canter.envs.imports import find_factory, makes_a_batch, registered_id
from canter.envs.tensor import tensor_envs
from canter.registry import Registry, nearest
from canter.specs import Env

Builder = Callable[..., Env]
"""Called with the part of the id after the colon, `num_envs` and `device` as keywords, and `env.options`.

A time limit (`env.reset_steps`) comes as the option `max_episode_steps`. A builder that has parameters
`vectorization`, `autoreset`, `step_timeout` or `close_timeout` is given these settings too. Its docstring begins with
the line that `canter envs` shows.
"""


SETTINGS = {
    "num_envs": "say env.num_envs",
    "device": "say device",
    "vectorization": "say env.vectorization",
    "autoreset": "say env.autoreset",
    "step_timeout": "say env.step_timeout",
    "close_timeout": "say env.close_timeout",
    "wrappers": "say env.wrappers",
}
"""Keywords that builders are given from settings of their own."""


def _check(builder: Builder) -> None:
    names = inspect.signature(builder).parameters
    if not {"num_envs", "device"} <= names.keys():
        raise TypeError(f"expected a function of name, num_envs, device and options, not one of {', '.join(names)}")


schemes: Registry[Builder] = Registry("scheme", _check, default="gymnasium")
"""Builders by the part of an id before its colon; an id without a colon is Gymnasium's."""


@schemes.register("gymnasium")
def _gymnasium(
    name: str,
    /,
    *,
    num_envs: int,
    device: str,
    vectorization: Any = "auto",
    autoreset: Any = None,
    step_timeout: float = 600.0,
    close_timeout: float = 60.0,
    wrappers: Any = (),
    **options: Any,
) -> Env:
    """Registered with Gymnasium; the id alone will do: CartPole-v1, HalfCheetah-v5 (pip install "canter[mujoco]")."""
    from canter.envs.gymnasium import make_gymnasium

    how = {"vectorization": vectorization, "autoreset": autoreset}
    how |= {"step_timeout": step_timeout, "close_timeout": close_timeout}
    return make_gymnasium(name, num_envs, device=device, wrappers=wrappers, **how, **options)


@schemes.register("envpool")
def _envpool(name: str, /, *, num_envs: int, device: str, **options: Any) -> Env:
    """EnvPool's C++ threads, such as envpool:HalfCheetah-v4 (pip install "canter[envpool]")."""
    from canter.envs.envpool import EnvPoolEnv

    return EnvPoolEnv(name, num_envs, device=device, **options)


@schemes.register("pettingzoo")
def _pettingzoo(name: str, /, *, num_envs: int, device: str, **options: Any) -> Env:
    """PettingZoo's parallel environments, such as pettingzoo:sisl/pursuit-v5 (pip install "canter[pettingzoo]")."""
    from canter.envs.pettingzoo import make_pettingzoo

    return make_pettingzoo(name, num_envs, device=device, **options)


@schemes.register("tensor")
def _tensor(name: str, /, *, num_envs: int, device: str, **options: Any) -> Env:
    """Written in torch, batched, on any device."""
    factory = tensor_envs[name]
    check_options(factory, f"tensor:{name}", options)
    return factory(num_envs, device, **options)


@schemes.register("mjlab")
def _mjlab(name: str, /, *, num_envs: int, device: str, **options: Any) -> Env:
    """Mjlab's tasks, such as mjlab:Mjlab-Velocity-Flat-Unitree-Go1 (pip install "canter[mjlab]")."""
    from canter.envs.robots.mjlab import make_mjlab

    return make_mjlab(name, num_envs, device, **options)


@schemes.register("isaaclab")
def _isaaclab(name: str, /, *, num_envs: int, device: str, **options: Any) -> Env:
    """Isaac Lab's tasks, such as isaaclab:Isaac-Ant-v0, where Isaac Lab is installed."""
    from canter.envs.robots.isaaclab import make_isaaclab

    return make_isaaclab(name, num_envs, device, **options)


def find_builder(env_id: str) -> tuple[Builder, str]:
    """Who builds the environments of an id, and the name to give to it."""
    scheme, colon, name = env_id.partition(":")
    if not colon:
        return _gymnasium, env_id
    if scheme in schemes:
        return schemes[scheme], name
    factory = find_factory(env_id, schemes)
    if factory is None:
        return _gymnasium, env_id
    if not makes_a_batch(factory):
        return _gymnasium, registered_id(env_id, factory)

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
            raise ValueError(f"env.options.{name}={value!r} is no option of {env_id}; {SETTINGS[name]}")
        if not takes_any and name not in parameters:
            limit = " (nor env.reset_steps, which sets it)" if name == "max_episode_steps" else ""
            known = nearest(name, parameters.keys() - SETTINGS.keys())
            raise ValueError(f"env.options.{name}={value!r}{limit}: {env_id} takes no such option, {known}")

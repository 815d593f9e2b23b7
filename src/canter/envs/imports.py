"""Environments from the user's own code, `module.path:name`, where importing it was allowed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium

from canter.registry import nearest

_allowed: set[str] = set()


def allow_import(prefix: str) -> None:
    """Trust a module and all modules inside of it; nothing that a settings file says can do this."""
    if not all(part.isidentifier() for part in prefix.split(".")):
        raise ValueError(f"--allow-import {prefix!r}: expected a module such as my_package or my_package.envs")
    _allowed.add(prefix)


def allowed_imports() -> set[str]:
    """What is trusted so far."""
    return set(_allowed)


def is_allowed(module: str) -> bool:
    """Whether a module may be imported because an environment id names it."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in _allowed)


def find_factory(env_id: str, schemes: Iterable[str]) -> Callable[..., Any] | None:
    """What `module.path:name` means; None where importing the module registered `name` with Gymnasium instead.

    `schemes` are what an id may begin with besides the name of a module.
    """
    module, _, name = env_id.partition(":")
    if not is_allowed(module):
        raise ValueError(
            f"environment id {env_id!r}: unknown scheme {module!r}, {nearest(module, schemes)} "
            f"If it is a module of yours, say --allow-import {module.partition('.')[0]}"
        )
    imported = importlib.import_module(module)
    factory = getattr(imported, name, None)
    if factory is None and name not in gymnasium.registry:
        raise ValueError(f"environment id {env_id!r}: {module} has no {name} and registers no such environment")
    return factory


def makes_a_batch(factory: Callable[..., Any]) -> bool:
    """Whether a factory takes `num_envs` and `device` and so builds all environments at once."""
    return {"num_envs", "device"} <= set(inspect.signature(factory).parameters)


def registered_id(env_id: str, factory: Callable[..., Any]) -> str:
    """A Gymnasium id for a factory of single environments."""
    name = f"imported/{env_id.replace(':', '.')}-v0"
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point=factory)
    return name

"""Environments from the user's own code: `module.path:name` where importing it was allowed, and objects of Python."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import gymnasium

from canter.core.registry import UserError, nearest

PYTHON = "python"
"""What ids of environments begin with that no module has under a name."""
_allowed: dict[str, str] = {}
"""Modules that are trusted, and the folder in which each is found."""
_introduced: dict[str, Callable[..., Any]] = {}
_importing: list[str] = []


def allow_import(prefix: str, folder: str | None = None) -> None:
    """Trust a module and all modules inside of it; nothing that a settings file says can do this.

    It is looked for in `folder`, by default the current one, after all other places.
    """
    if not all(part.isidentifier() for part in prefix.split(".")):
        raise UserError(f"--allow-import {prefix!r}: expected a module such as my_package or my_package.envs")
    _allowed[prefix] = folder or os.getcwd()


def allowed_imports() -> dict[str, str]:
    """What is trusted so far: modules, and the folder in which each is looked for."""
    return dict(_allowed)


def is_allowed(module: str) -> bool:
    """Whether a module may be imported because an environment id names it."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in _allowed)


def import_trusted(module: str) -> ModuleType:
    """Import a module that is trusted, also from the folder that belongs to it."""
    folder = next((place for prefix, place in _allowed.items() if f"{module}.".startswith(f"{prefix}.")), None)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides nothing
    _importing.append(module)
    try:
        return importlib.import_module(module)
    finally:
        _importing.pop()


def refuse_while_importing(what: str) -> None:
    """Refuse to work inside of a program that is only imported for the environment that it holds."""
    if _importing:
        raise RuntimeError(
            f"{what} is called while {_importing[-1]} is imported for its environment; in the program put it under\n"
            'if __name__ == "__main__":'
        )


def introduce(env_id: str, factory: Callable[..., Any]) -> None:
    """Let an id mean this class or function in this process."""
    _introduced[env_id] = factory


def find_factory(env_id: str, schemes: Iterable[str]) -> Callable[..., Any] | None:
    """What `module.path:name` means; None where importing the module registered `name` with Gymnasium instead.

    `schemes` are what an id may begin with besides the name of a module.
    """
    if env_id in _introduced:
        return _introduced[env_id]
    module, _, name = env_id.partition(":")
    if module == PYTHON:
        raise UserError(
            f"environment id {env_id!r}: it existed only in the program that trained it. Put its class or function "
            "into a module and name it: --env my_module:MyEnv --allow-import my_module"
        )
    if not is_allowed(module):
        raise UserError(
            f"environment id {env_id!r}: unknown scheme {module!r}, {nearest(module, schemes)} "
            f"(if it is a module of yours, say --allow-import {module.partition('.')[0]})"
        )
    imported = import_trusted(module)
    factory = getattr(imported, name, None)
    if factory is None and name not in gymnasium.registry:
        raise UserError(f"environment id {env_id!r}: {module} has no {name} and registers no such environment")
    return factory


def makes_a_batch(factory: Callable[..., Any]) -> bool:
    """Whether a factory takes `num_envs` and `device` and so builds all environments at once."""
    return {"num_envs", "device"} <= set(inspect.signature(factory).parameters)


def registered_id(env_id: str, factory: Callable[..., Any]) -> str:
    """A Gymnasium id for a factory of single environments."""
    name = f"imported/{env_id.replace(':', '.')}-v0"
    if name in gymnasium.registry and gymnasium.registry[name].entry_point is not factory:
        del gymnasium.registry[name]  # another object of the same name, as in a notebook
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point=factory)
    return name

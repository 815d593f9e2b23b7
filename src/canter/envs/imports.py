"""Environments from the user's code: `module.path:name` if its import is allowed, and objects."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

from canter.core.registry import UserError, nearest

PYTHON = "python"
"""Scheme of environments that exist only in the running program: no module has them under a
name."""
_allowed: dict[str, str] = {}
"""Trusted modules, and the folder in which each is found."""
_factories: dict[str, Callable[..., Any]] = {}
"""Classes and functions of the running program by environment id."""
_importing: list[str] = []
"""Trusted modules whose import is running."""


def allow_import(prefix: str, folder: str | None = None) -> None:
    """Trust a module and all modules inside of it; no settings file can do this.

    The module is searched for in `folder`, by default the current one, after all other places.
    """
    if not all(part.isidentifier() for part in prefix.split(".")):
        raise UserError(f"--allow-import {prefix!r}: expected a module such as my_package or my_package.envs")
    _allowed[prefix] = folder or os.getcwd()


def allowed_imports() -> dict[str, str]:
    """Return the trusted modules and the folder of each."""
    return dict(_allowed)


def is_allowed(module: str) -> bool:
    """Return True if a module may be imported because an environment id names it."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in _allowed)


def import_trusted(module: str) -> ModuleType:
    """Import a trusted module, from its folder if it is nowhere else."""
    folder = next((place for prefix, place in _allowed.items() if f"{module}.".startswith(f"{prefix}.")), None)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides nothing
    _importing.append(module)
    try:
        return importlib.import_module(module)
    finally:
        _importing.pop()


def refuse_while_importing(function: str) -> None:
    """Raise RuntimeError if the program is being imported only for its environment."""
    if _importing:
        raise RuntimeError(
            f"{function} is called while {_importing[-1]} is imported for its environment; in the program put it under"
            '\nif __name__ == "__main__":'
        )


def register_factory(env_id: str, factory: Callable[..., Any]) -> None:
    """Make an id stand for a class or function in this process."""
    _factories[env_id] = factory


def find_factory(env_id: str, schemes: Iterable[str]) -> Callable[..., Any] | None:
    """Return the class or function `module.path:name`; None if its module registers it.

    `schemes` are the prefixes of ids other than modules, for the error message.
    """
    if env_id in _factories:
        return _factories[env_id]
    module, _, name = env_id.partition(":")
    if module == PYTHON:
        raise UserError(
            f"environment id {env_id!r}: it existed only in the program that trained it. Put its class or function "
            "into a module and name it: --env my_module:MyEnv --allow-import my_module"
        )
    if not is_allowed(module):
        raise UserError(
            f"environment id {env_id!r}: unknown scheme {module!r}, {nearest(module, schemes)} "
            f"(if it is a module of yours, add --allow-import {module.partition('.')[0]}; "
            f"in a program, canter.allow_import({module.partition('.')[0]!r}))"
        )
    imported = import_trusted(module)
    factory = getattr(imported, name, None)
    if factory is None and name not in gymnasium.registry:
        raise UserError(f"environment id {env_id!r}: {module} has no {name} and registers no such environment")
    return factory


def name_for_import(factory: Callable[..., Any]) -> tuple[str, str] | None:
    """Return `module.path:name` of a class or function, and advice for the user; trust its module.

    None if no module has it under a name, or if the module has no file, as in a notebook.
    """
    name = getattr(factory, "__qualname__", "")
    module = getattr(factory, "__module__", "")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None or not name.isidentifier():
        return None
    path = Path(file).resolve()
    if module == "__main__":
        spec = getattr(loaded, "__spec__", None)
        module = path.stem if spec is None else spec.name
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    depth = len(parts) - (path.name != "__init__.py")
    allow_import(module, str(path.parents[depth]))
    note = ""
    if loaded is sys.modules.get("__main__") and "__name__" not in path.read_text(errors="replace"):
        note = f'Put canter.train(...) under `if __name__ == "__main__":`; other commands import {path.name}'
    return f"{module}:{name}", note


def find_object(name: str, setting: str) -> Callable[..., Any]:
    """Return the class or function `module.path:name` that a setting names; its import must be allowed."""
    module, _, attribute = name.partition(":")
    if module == PYTHON:
        raise UserError(
            f"{setting}={name!r}: it existed only in the program that trained it. Put it into a module and name it: "
            "my_module:NAME with --allow-import my_module"
        )
    if not attribute or not is_allowed(module):
        expected = f"add --allow-import {module.partition('.')[0]}" if attribute else "expected my_module:MyModule"
        raise UserError(f"{setting}={name!r}: {expected}")
    found = getattr(import_trusted(module), attribute, None)
    if found is None:
        raise UserError(f"{setting}={name!r}: {module} has no {attribute}")
    return found


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a factory or builder.

    A factory declares by its parameters which settings it takes: so any function of a user is one,
    without a base class or a registration.
    """
    return inspect.signature(factory).parameters


def makes_a_batch(factory: Callable[..., Any]) -> bool:
    """Return True if a factory takes `num_envs` and `device`: it makes all environments at once."""
    return {"num_envs", "device"} <= parameters_of(factory).keys()


def registered_id(env_id: str, factory: Callable[..., Any]) -> str:
    """Return a Gymnasium id for a factory of single environments."""
    name = f"imported/{env_id.replace(':', '.')}-v0"
    if name in gymnasium.registry and gymnasium.registry[name].entry_point is not factory:
        del gymnasium.registry[name]  # another object of the same name, as in a notebook
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point=factory)
    return name

"""A fingerprint of an environment's source, so that scores are not compared across changed code."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from canter.core.registry import UserError
from canter.envs import find_builder, make_tensor
from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import tensor_envs

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, of which only the environment's own file is read."""


def source_fingerprint(env_id: str) -> str | None:
    """Return a hash of an environment's source; None if the source is not known.

    It covers the modules of its class and base classes and, unless they are installed, the modules
    in the same folder that they use. Comments, layout and the block under `if __name__ ==
    "__main__":` do not count.
    """
    try:
        factory = _find(env_id)
    except (UserError, ImportError, AttributeError):
        return None
    if factory is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(_files(factory)):
        digest.update(_meaning(path.read_text(errors="replace")))
    return digest.hexdigest()[:16]


def _find(env_id: str) -> Callable[..., Any] | None:
    """Return the class or function that makes an environment; None if another package has it."""
    builder = find_builder(env_id)
    if builder.func is make_tensor:
        return tensor_envs[builder.args[0]]
    if builder.func is not make_gymnasium:
        return None if builder.args else builder.func
    registered = gymnasium.registry.get(builder.args[0].rpartition(":")[2])
    entry = None if registered is None else registered.entry_point or registered.vector_entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


def _files(factory: Callable[..., Any]) -> set[Path]:
    """Return the source files of a factory, of its base classes and of what they use beside them."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    parts = inspect.getmro(factory) if inspect.isclass(factory) else (factory,)
    names = {part.__module__ for part in parts}
    modules = [sys.modules[name] for name in names if name in sys.modules and not name.startswith("gymnasium.core")]
    files: set[Path] = set()
    while modules:
        module = modules.pop()
        path = _path(module)
        if path is None or path in files:
            continue
        files.add(path)
        if not any(folder in path.parts for folder in (*INSTALLED, "canter")):
            modules += _used(module, path.parent)
    return files


def _used(module: ModuleType, folder: Path) -> Iterator[ModuleType]:
    """Yield the modules below a folder from which a module has imported something."""
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        other = sys.modules.get(name) if isinstance(name, str) else None
        path = None if other is None else _path(other)
        if other is not None and path is not None and path.is_relative_to(folder):
            yield other


def _path(module: ModuleType) -> Path | None:
    """Return the source file of a module; None without one."""
    file = getattr(module, "__file__", None)
    path = Path(file).resolve() if isinstance(file, str) else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


@functools.cache
def _meaning(source: str) -> bytes:
    """Return the syntax tree of a source as text, without the block that runs it as a program."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test))]
    return ast.dump(tree).encode()

"""Canter's classes in the place of a parent's, for scripts that import the parent themselves."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any


def replace_classes(library: str, home: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Put all that `modules` has for the module `home` there, or stand for the whole library where there is none.

    `modules` are those that scripts import from, each after the package that it is in, with what they find there.
    """
    try:
        package: Any = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name not in (library, home):
            raise
        return _stand_in(modules)
    for name, own in modules[home].items():
        theirs = getattr(package, name, None)
        if theirs is not None and theirs is not own:
            _refuse_if_held(library, name, theirs)
        setattr(package, name, own)


def _stand_in(modules: Mapping[str, Mapping[str, Any]]) -> None:
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []  # a package
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _refuse_if_held(library: str, name: str, theirs: Any) -> None:
    """Whoever imported the parent's class already goes on with it, which nobody would notice."""
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where.partition(".")[0] not in (library, "canter") and vars(module).get(name) is theirs:
            whose = f"{library}'" if library.endswith("s") else f"{library}'s"
            first = f"import canter.compat.{library}.take_over first"
            raise ImportError(f"{where} has imported {whose} {name} already: {first}")

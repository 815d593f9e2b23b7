"""Wrappers around single Gymnasium environments, by name, from settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import gymnasium

from canter.envs.imports import find_factory
from canter.registry import nearest

Wrap = Callable[[gymnasium.Env], gymnasium.Env]


def make_wrappers(settings: Mapping[str, Any]) -> list[Wrap]:
    """The wrappers that settings name, the first the innermost: name -> keyword arguments, or null for none.

    Arguments that a wrapper cannot have are refused before it goes around anything.
    """
    made = []
    for name, given in settings.items():
        wrapper = _find(name)
        if not isinstance(given, Mapping | None):
            raise ValueError(f"env.wrappers.{name}={given!r}: expected its keyword arguments as a mapping, or null")
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in (given or {}).items()}
        try:
            signature(wrapper).bind(None, **arguments)
        except TypeError as error:
            taken = ", ".join(list(signature(wrapper).parameters)[1:]) or "none"
            raise ValueError(f"env.wrappers.{name}: {error}; it takes {taken}") from error
        made.append(partial(wrapper, **arguments))
    return made


def _find(name: str) -> Callable[..., Any]:
    if ":" not in name:
        if name in gymnasium.wrappers.__all__:
            return getattr(gymnasium.wrappers, name)
        raise ValueError(
            f"env.wrappers.{name}: no wrapper of Gymnasium is called so (one of yours is my_module:MyWrapper, with "
            f"--allow-import my_module), {nearest(name, gymnasium.wrappers.__all__)}"
        )
    found = find_factory(name, ())
    if found is None:
        raise ValueError(f"env.wrappers.{name}: that is an environment, not a wrapper")
    return found

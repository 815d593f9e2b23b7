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
    """The wrappers that settings name, the first the innermost: name -> keyword arguments, or null for none."""
    return [_made(name, _find(name), _arguments(name, given)) for name, given in settings.items()]


def _made(name: str, wrapper: Callable[..., Any], arguments: dict[str, Any]) -> Wrap:
    """A wrapper with its arguments; those that it cannot have are refused before it goes around anything."""
    try:
        signature(wrapper).bind(None, **arguments)
    except TypeError as error:
        taken = list(signature(wrapper).parameters)[1:]
        raise ValueError(f"env.wrappers.{name}: {error}; it takes {', '.join(taken) or 'none'}") from error
    return partial(wrapper, **arguments)


def _find(name: str) -> Callable[..., Any]:
    if ":" in name:
        found = find_factory(name, ())
        if found is None:
            raise ValueError(f"env.wrappers.{name}: that is an environment, not a wrapper")
        return found
    if name not in gymnasium.wrappers.__all__:
        raise ValueError(
            f"env.wrappers.{name}: no wrapper of Gymnasium is called so (one of yours is my_module:MyWrapper, with "
            f"--allow-import my_module), {nearest(name, gymnasium.wrappers.__all__)}"
        )
    return getattr(gymnasium.wrappers, name)


def _arguments(name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"env.wrappers.{name}={given!r}: expected its keyword arguments as a mapping, or null")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}

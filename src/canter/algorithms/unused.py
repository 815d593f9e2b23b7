"""Which settings were changed, for those that have no part in a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import reduce
from typing import Any

Rule = tuple[Any, str, str]
"""Whether it holds; the keys, with blanks between them, that then have no part; and why."""


def unused_lines(config: Any, rules: Iterable[Rule], prefix: str = "") -> list[str]:
    """A line for each setting that was changed and by a rule has no effect; `prefix` is of all keys."""
    return [
        f"algorithm.{path}={value} has no part here: {reason}"
        for holds, keys, reason in rules
        if holds
        for key in keys.split()
        for path, value in _changed_below(config, prefix + key)
    ]


def _changed_below(config: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every setting at or below a key that is not at its default."""
    *parents, last = key.split(".")
    owner = reduce(getattr, parents, config)
    value, default = getattr(owner, last), getattr(type(owner)(), last)
    if value == default:
        return
    if is_dataclass(value) and type(value) is type(default) and not _needed(value):
        for field in fields(value):
            yield from _changed_below(config, f"{key}.{field.name}")
    else:
        yield key, value


def _needed(settings: Any) -> bool:
    """Whether a setting among these has no default."""
    return any(field.default is MISSING and field.default_factory is MISSING for field in fields(settings))

"""Typed reading of a source library's keys: a value, or ConfigError by file, line and key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from canter.compat.settings.section import Section
from canter.core.registry import nearest

Reader = Callable[..., Any]
"""Reads a key of a section by type: `read(section, key, default)`; without a default the key is
required."""


def number(s: Section, key: str, default: float | None = None) -> float:
    """Read a number, which may be written as a word such as 5e-4."""
    value = _resolved(s, key, default, "a number")
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if math.isnan(result):
        known = s.key(key) in s.run.lines or s.has(key)
        raise s.error(key, "a number", "" if known else "it is required")
    return result


def finite(s: Section, key: str, default: float | None = None) -> float:
    """Read a number that is not infinite."""
    return _checked(s, key, default, math.isfinite, "a finite number")


def integer(s: Section, key: str, default: int | None = None) -> int:
    """Read a whole number; 1e6 is one."""
    return int(_checked(s, key, default, float.is_integer, "a whole number"))


def count(s: Section, key: str, default: int | None = None) -> int:
    """Read a whole number above 0."""
    return int(_checked(s, key, default, lambda x: x.is_integer() and x >= 1, "a whole number above 0"))


def _checked(s: Section, key: str, default: float | None, accepts: Callable[[float], bool], expected: str) -> float:
    result = number(s, key, default)
    if not accepts(result):
        raise s.error(key, expected)
    return result


def flag(s: Section, key: str, default: bool | None = None) -> bool:
    """Read true or false."""
    value = _resolved(s, key, default, "true or false")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise s.error(key, "true or false")
    return value


def word(s: Section, key: str, default: str | None = None, expected: str = "a string") -> str:
    """Read a string."""
    value = _resolved(s, key, default, expected)
    if not isinstance(value, str):
        raise s.error(key, expected)
    return value


def one_of(*known: str) -> Reader:
    """Return the reader of one of some words."""
    expected = f"one of {', '.join(known)}"

    def read(s: Section, key: str, default: str | None = None) -> str:
        value = word(s, key, default, expected)
        if value not in known:
            raise s.error(key, expected, nearest(value, known))
        return value

    return read


def widths(s: Section, key: str, default: list[int] | None = None) -> list[int]:
    """Read a list of whole numbers."""
    return _list(s, key, default, int, "a list of whole numbers")


def groups(s: Section, key: str, default: list[str] | None = None) -> list[str]:
    """Read names of observation groups."""
    return _list(s, key, default, str, "a list of observation groups")


def pair(s: Section, key: str, expected: str, default: tuple[float, float] | None = None) -> tuple[float, float]:
    """Read two numbers, the lower first."""
    value = s.raw(key) if s.has(key) or default is None else default
    numbers = [float(x) for x in value if type(x) in (int, float)] if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or len(value) != 2 or not numbers[0] < numbers[1]:
        raise s.error(key, expected)
    return numbers[0], numbers[1]


def _resolved(s: Section, key: str, default: Any, expected: str) -> Any:
    """Read a value that holds no open `${...}`."""
    value = s.raw(key, default)
    if isinstance(value, str) and "${" in value:
        raise s.error(key, expected, f"nothing resolves it: say --set {_name_in(value)}=VALUE")
    return value


def _name_in(value: str) -> str:
    """Return the name that an open `${...}` refers to, as --set takes it."""
    inner = value.partition("${")[2]
    if "${" in inner:
        inner = inner.partition("${")[2].partition("}")[0]
    return inner.rstrip("}").lstrip(".")


def _list(s: Section, key: str, default: Any, kind: type, expected: str) -> list[Any]:
    value = s.raw(key, default)
    if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
        raise s.error(key, expected)
    return list(value)

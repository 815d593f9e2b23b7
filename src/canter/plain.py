"""Settings as plain data and back, checked by the type hints of their dataclasses.

A frozen dataclass becomes a mapping. A union of dataclasses becomes a mapping with `kind`, the snake-case name of the
class; the member that has a single field is written as that field alone, so a constant schedule is a number.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from canter.registry import nearest

MAX_DEPTH = 50
"""How deep free values may be nested."""
MAY_BE_INFINITE = frozenset({"max_grad_norm"})
"""Numbers for which infinity has a meaning: no limit."""

_FLOAT_TEXT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}

C = TypeVar("C")


class ConfigError(ValueError):
    """Settings that cannot be used; the message names the key, and `key` is its path."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def to_plain(config: Any) -> dict[str, Any]:
    """All settings as nested mappings, lists, strings, numbers, booleans and None."""
    return _section_to_plain(config, "")


def from_plain(plain: Any, base: C) -> C:
    """`base` with the settings of a (partial) mapping put over it.

    Mappings merge, also into a schedule of the same kind; lists and free mappings such as `env.options` replace.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"expected a mapping of settings, got {_show(plain)}")
    return _merge(plain, type(base), base, "")


@cache
def config_keys(cls: type) -> dict[str, Any]:
    """The dotted path of every field under a dataclass with its type hint, those of all kinds of a union included."""
    keys: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        classes = _dataclasses(hint)
        if not classes or len(_members(hint)) > 1:
            keys[name] = hint
        if len(classes) > 1:
            keys[f"{name}.kind"] = str
        for member in classes:
            for inner, inner_hint in config_keys(member).items():
                keys.setdefault(f"{name}.{inner}", inner_hint)
    return keys


def is_free(hint: Any) -> bool:
    """Whether a hint is a mapping of the user's own keys."""
    return get_origin(hint) is dict


def accepts_none(hint: Any) -> bool:
    """Whether None is one of a hint's values."""
    return types.NoneType in _members(hint)


def without_none(hint: Any) -> Any:
    """What else a hint with one further member accepts."""
    others = [member for member in _members(hint) if member is not types.NoneType]
    return others[0] if len(others) == 1 else hint


def _section_to_plain(section: Any, key: str) -> dict[str, Any]:
    hints = _hints(type(section))
    return {name: _value_to_plain(getattr(section, name), hint, _join(key, name)) for name, hint in hints.items()}


def _value_to_plain(value: Any, hint: Any, key: str) -> Any:
    if is_dataclass(value):
        plain = _section_to_plain(value, key)
        if len(_dataclasses(hint)) == 1:
            return plain
        return next(iter(plain.values())) if len(plain) == 1 else {"kind": _kind(type(value)), **plain}
    return _free(value, key)


def _merge(plain: Mapping[Any, Any], cls: type[C], base: C | None, key: str, *, kinds: Sequence[type] = ()) -> C:
    """An instance of `cls`: the given settings, then those of `base`, then the defaults."""
    hints, values = _hints(cls), {} if base is None else {name: getattr(base, name) for name in _hints(cls)}
    for name, value in plain.items():
        path = _join(key, name)
        if name not in hints:
            raise ConfigError(f"{path}: unknown key, {_where_else(name, kinds) or nearest(_name(name), hints)}", path)
        current = values[name] if base is not None else _default(_fields(cls)[name])
        values[name] = _convert(value, hints[name], current, path)
    missing = [name for name in hints if name not in values and _default(_fields(cls)[name]) is MISSING]
    if missing:
        raise ConfigError(f"{_join(key, missing[0])}: needs a value", key)
    try:
        return cls(**values)
    except ValueError as error:
        message = str(error).removeprefix(f"{key.rpartition('.')[2]}: ")
        if message.partition("=")[0] in hints:
            raise ConfigError(_join(key, message), _join(key, message.partition("=")[0])) from error
        named = not key or message.startswith(f"{key}.")
        raise ConfigError(message if named else f"{key}: {message}", key) from error


def _where_else(name: Any, kinds: Sequence[type]) -> str:
    """The advice when a key belongs to another kind than the one at hand; empty when it belongs to none."""
    having = [_kind(cls) for cls in kinds if name in _hints(cls)]
    return f"it belongs to kind {' or '.join(having)}: set kind too" if having else ""


def _convert(value: Any, hint: Any, current: Any, key: str) -> Any:
    if value is None and accepts_none(hint):
        return None
    classes = _dataclasses(hint)
    if len(classes) > 1:
        return _convert_union(value, classes, current, key)
    if classes:
        if not isinstance(value, Mapping):
            raise _expected(f"a mapping{' or null' if accepts_none(hint) else ''}", value, key)
        return _merge(value, classes[0], current if type(current) is classes[0] else None, key)
    return _convert_leaf(value, without_none(hint), key, " or null" if accepts_none(hint) else "")


def _convert_union(value: Any, classes: list[type], current: Any, key: str) -> Any:
    by_kind = {_kind(cls): cls for cls in classes}
    if not isinstance(value, Mapping):
        bare = next((cls for cls in classes if len(_hints(cls)) == 1), None)
        if bare is None or value is None or isinstance(value, list | tuple):
            raise _expected(f"a mapping with kind {' or '.join(by_kind)}", value, key)
        (hint,) = _hints(bare).values()
        return bare(_convert_leaf(value, hint, key, f", or a mapping with kind {' or '.join(by_kind)}"))
    kind = value.get("kind", _kind(type(current)) if type(current) in classes else None)
    if kind is None:
        raise ConfigError(f"{key}.kind: needs a value, one of {', '.join(by_kind)}", key)
    if not isinstance(kind, str) or kind not in by_kind:
        raise ConfigError(f"{key}.kind: unknown kind {_show(kind)}, {nearest(_name(kind), by_kind)}", f"{key}.kind")
    cls = by_kind[kind]
    settings = {name: item for name, item in value.items() if name != "kind"}
    return _merge(settings, cls, current if type(current) is cls else None, key, kinds=classes)


def _convert_leaf(value: Any, hint: Any, key: str, or_else: str = "") -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        # A tuple's `in` would take True for 1.
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        advice = nearest(value, map(str, choices)) if isinstance(value, str) else ""
        raise _expected(f"one of {', '.join(map(str, choices))}{or_else}", value, key, advice)
    if origin is tuple:
        return _convert_tuple(value, get_args(hint), key, or_else)
    if is_free(hint):
        if not isinstance(value, Mapping):
            raise _expected(f"a mapping{or_else}", value, key)
        return _free(value, key)
    if hint is float:
        return _number(value, key, or_else)
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e6 is how people write a million
    if hint not in _WORDS:
        raise TypeError(f"{key}: no rule to read the type {hint}")
    if type(value) is not hint:
        raise _expected(_WORDS[hint] + or_else, value, key)
    return _limited(value, key) if isinstance(value, int) and hint is int else value


def _convert_tuple(value: Any, items: tuple[Any, ...], key: str, or_else: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _expected(f"a list{or_else}", value, key)
    if items[-1] is Ellipsis:
        items = items[:1] * len(value)
    if len(value) != len(items):
        raise _expected(f"a list of {len(items)}{or_else}", value, key)
    return tuple(_convert_leaf(value[i], items[i], f"{key}[{i}]") for i in range(len(items)))


def _number(value: Any, key: str, or_else: str = "") -> float:
    # YAML 1.1 reads 1e-3, without a point, as a string.
    is_text = isinstance(value, str) and _FLOAT_TEXT.fullmatch(value)
    if isinstance(value, bool) or not (isinstance(value, int | float) or is_text):
        raise _expected(_WORDS[float] + or_else, value, key)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) and (math.isnan(number) or key.rpartition(".")[2] not in MAY_BE_INFINITE):
        raise _expected("a finite number", value, key)
    return number


def _free(value: Any, key: str, depth: int = 0) -> Any:
    """A copy of a free value, in which tuples have become lists."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{key}: nested deeper than {MAX_DEPTH} levels", key)
    if isinstance(value, Mapping):
        for name in value:
            if type(name) is not str:
                raise ConfigError(f"{key}: expected strings as keys, got {_show(name)}", key)
        return {name: _free(item, _join(key, name), depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_free(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]
    if value is not None and type(value) not in _WORDS:
        raise _expected("a string, a number, true, false, null, a list or a mapping", value, key)
    if isinstance(value, float) and math.isnan(value):
        raise _expected("a number", value, key)
    return _limited(value, key) if type(value) is int else value


def _limited(value: int, key: str) -> int:
    if abs(value) >= 2**63:
        raise _expected("an integer of at most 63 bits", value, key)
    return value


def _expected(what: str, value: Any, key: str, advice: str = "") -> ConfigError:
    return ConfigError(f"{key}: expected {what}, got {_show(value)}{'; ' if advice else ''}{advice}", key)


def _show(value: Any) -> str:
    """A short spelling for a message, as YAML has it where the two languages differ."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest ones
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _join(key: str, name: Any) -> str:
    return f"{key}.{_name(name)}" if key else _name(name)


def _name(name: Any) -> str:
    return name[:200] if isinstance(name, str) else _show(name)


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name, field in _fields(cls).items() if field.init}


@cache
def _fields(cls: Any) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(cls)}


def _default(field: Field[Any]) -> Any:
    """The default of a field; MISSING where it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _dataclasses(hint: Any) -> list[type]:
    return [member for member in _members(hint) if is_dataclass(member) and isinstance(member, type)]


def _kind(cls: type) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

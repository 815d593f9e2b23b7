"""Conversion of settings to plain data and back, checked by the type hints of their dataclasses.

A frozen dataclass becomes a mapping. Where a field is open to all kinds that a registry knows,
`Annotated[Protocol, registry]`, the mapping has a `kind`, the name in the registry; the first kind
that has a single field is written as that field alone, so a constant schedule is a number.
`Annotated[str, registry]` is one of the registry's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from canter.core.hints import (
    accepts_none,
    config_classes,
    config_keys,
    current_name,
    current_value,
    field_defaults,
    field_hints,
    is_free,
    is_text,
    registry_in,
    without_none,
)
from canter.core.registry import Registry, UserError, nearest

MAX_DEPTH = 50
"""Limit of the nesting of free values."""
MAY_BE_INFINITE = frozenset({"max_grad_norm"})
"""Settings for which infinity is allowed and means no limit."""

RANGES: dict[str, Callable[[Any], bool]] = {
    "must be at least 1": lambda value: value >= 1,
    "must be above 0": lambda value: value > 0,
    "must not be negative": lambda value: value >= 0,
    "must be finite and not negative": lambda value: 0 <= value < math.inf,
    "must lie in 0..1": lambda value: 0 <= value <= 1,
    "must lie in 0..1, without 1": lambda value: 0 <= value < 1,
    "must lie above 0 and up to 1": lambda value: 0 < value <= 1,
    "must be widths of at least 1": lambda values: all(value >= 1 for value in values),
}
"""Allowed ranges of numbers, by the text of the error message."""

_FLOAT_TEXT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}

C = TypeVar("C")


class ConfigError(UserError):
    """Invalid settings; the message names the key, and `key` is its dotted path."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def to_plain(config: Any, key: str = "") -> dict[str, Any]:
    """Return all settings as nested mappings, lists, strings, numbers, booleans and None.

    `key` is the key path of `config`, for error messages.
    """
    hints = field_hints(type(config))
    return {name: _value_to_plain(getattr(config, name), hint, _join(key, name)) for name, hint in hints.items()}


def from_plain(plain: Any, base: C | type[C]) -> C:
    """Return `base` with the settings of a (partial) mapping applied.

    If `base` is a class, its defaults are used, and settings without a default must be given.

    Mappings merge, also into a schedule of the same kind; lists and free mappings such as
    `env.options` replace.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"expected a mapping of settings, got {_show(plain)}")
    cls: Any = base if isinstance(base, type) else type(base)
    return _merge(plain, cls, None if cls is base else base, "")


def nest(overrides: Mapping[str, Any], free: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return nested mappings for dotted key paths.

    Keys below a free mapping are added, in order, to the content that `free` has for it.
    """

    def stem(key: str) -> str | None:
        return next((f"{name}." for name in free if key.startswith(f"{name}.")), None)

    tree: dict[str, Any] = {}
    for key, value in sorted(overrides.items(), key=lambda item: stem(item[0]) or item[0]):
        start = stem(key) or ""
        # Dots in `my.module:NAME` are part of the name.
        parts = [*start.split(".")[:-1], *re.split(r"\.(?!.*:)", key[len(start) :])]
        here = tree
        for i, part in enumerate(parts[:-1]):
            path = ".".join(parts[: i + 1])
            here = here.setdefault(part, deepcopy(free.get(path, {})))
            if not isinstance(here, dict):
                raise ConfigError(f"{key}: contradicts the value given for {path}", key)
        here[parts[-1]] = dict(value) if isinstance(value, Mapping) else value
    return tree


def check_settings(cls: Any) -> None:
    """Raise TypeError unless `cls` is a frozen dataclass, as settings with a `kind` must be."""
    own = vars(cls).get("__dataclass_params__") if isinstance(cls, type) else None
    if own is None or not own.frozen:
        raise TypeError(f"expected settings, a class under @dataclass(frozen=True), got {cls!r}")
    if any(field.name == "kind" for field in fields(cls)):
        raise TypeError(f"{cls.__name__}.kind: in settings files this key selects the class")


def check_range(settings: Any, rule: str, *names: str) -> None:
    """Raise UserError if a setting violates a rule of `RANGES`; None satisfies all."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not RANGES[rule](value):
            or_null = ", or null" if accepts_none(field_hints(type(settings))[name]) else ""
            raise UserError(f"{name}={value} {rule}{or_null}")


def _value_to_plain(value: Any, hint: Any, key: str) -> Any:
    if get_origin(hint) is tuple and isinstance(value, tuple):
        inner = get_args(hint)[0]
        return [_value_to_plain(item, inner, f"{key}[{i}]") for i, item in enumerate(value)]
    if not is_dataclass(value):
        return _free(value, key)
    plain = to_plain(value, key)
    registry = registry_in(hint)
    if registry is None:
        return plain
    if type(value) is _bare(registry):
        return next(iter(plain.values()))
    kind = registry.name_of(type(value))
    if kind is None:
        raise ConfigError(
            f"{key}: {type(value).__name__} cannot be written to a file before it has a name: "
            f"decorate it with @canter.register({registry.kind!r}, NAME)",
            key,
        )
    return {"kind": kind, **plain}


def _bare(registry: Registry[Any]) -> type | None:
    """Return the kind that is written as its only field: the first with a single one."""
    return next((cls for cls in registry.items().values() if len(field_hints(cls)) == 1), None)


def _merge(
    plain: Mapping[Any, Any], cls: type[C], base: C | None, key: str, *, kinds: Mapping[str, type] | None = None
) -> C:
    """Return an instance of `cls` from the given settings, then `base`, then the defaults."""
    hints = field_hints(cls)
    values = field_defaults(cls) if base is None else {name: getattr(base, name) for name in hints}
    given: dict[str, Any] = {}
    for written_name, value in plain.items():
        path = _join(key, written_name)
        name = current_name(cls, written_name, key)
        if name not in hints:
            raise ConfigError(f"{path}: unknown key, {_meant(name, cls, key, kinds or {})}", path)
        if name in given:
            raise ConfigError(f"{path}: also given as {given[name]}, another name of this setting; remove one", path)
        given[name] = path
        values[name] = _convert(current_value(cls, name, value, path), hints[name], values.get(name), path)
    missing = next((name for name in hints if name not in values), None)
    if missing is not None:
        raise ConfigError(f"{_join(key, missing)}: needs a value", key)
    try:
        return cls(**values)
    except ValueError as error:
        message = str(error).removeprefix(f"{key.rpartition('.')[2]}: ")
        if message.partition("=")[0] in hints:
            raise ConfigError(_join(key, message), _join(key, message.partition("=")[0])) from error
        named = not key or message.startswith(f"{key}.")
        raise ConfigError(message if named else f"{key}: {message}", key) from error


def _meant(name: Any, cls: type, key: str, kinds: Mapping[str, type]) -> str:
    """Return advice about an unknown key: kinds that have it, deeper paths, or similar names."""
    if having := [kind for kind, other in kinds.items() if name in field_hints(other)]:
        return f"it belongs to kind {' or '.join(having)}: set kind too"
    if deeper := [_join(key, inner) for inner in config_keys(cls) if inner.endswith(f".{name}")]:
        return f"did you mean {' or '.join(deeper[:3])}?"
    return nearest(_name(name), field_hints(cls))


def _convert(value: Any, hint: Any, current: Any, key: str) -> Any:
    if value is None and accepts_none(hint):
        return None
    classes = config_classes(hint)
    registry = registry_in(hint)
    if type(value) in (classes if registry is None else registry.items().values()):
        return value  # a program may give settings as objects
    if registry is not None and is_text(hint):
        return _convert_name(value, registry, key)
    if registry is not None:
        return _convert_kind(value, registry, current, key)
    if classes:
        if not isinstance(value, Mapping):
            raise _expected(f"a mapping{' or null' if accepts_none(hint) else ''}", value, key)
        return _merge(value, classes[0], current if type(current) is classes[0] else None, key)
    return _convert_leaf(value, without_none(hint), key, " or null" if accepts_none(hint) else "")


def _convert_kind(value: Any, registry: Registry[Any], current: Any, key: str) -> Any:
    kinds = registry.items()
    if isinstance(value, str) and value in kinds:
        value = {"kind": value}
    if not isinstance(value, Mapping):
        bare = _bare(registry)
        expected = f"a mapping with kind {' or '.join(kinds)}"
        if bare is None or value is None or isinstance(value, list | tuple):
            raise _expected(expected, value, key)
        ((name, hint),) = field_hints(bare).items()
        return bare(**{name: _convert_leaf(value, hint, key, f", or {expected}")})
    kind = value.get("kind", registry.name_of(type(current)) or registry.default)
    if kind is None:
        raise ConfigError(f"{key}.kind: needs a value, one of {', '.join(kinds)}", key)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{key}.kind: unknown {registry.kind} {_show(kind)}, {_advise(kind, kinds)}", f"{key}.kind")
    cls = kinds[kind]
    settings = {name: item for name, item in value.items() if name != "kind"}
    return _merge(settings, cls, current if type(current) is cls else None, key, kinds=kinds)


def _convert_name(value: Any, registry: Registry[Any], key: str) -> str:
    names = registry.items()
    if not isinstance(value, str) or value not in names:
        raise _expected(f"a registered {registry.kind}", value, key, _advise(value, names))
    return value


def _advise(name: Any, known: Mapping[str, Any]) -> str:
    return f"{nearest(_name(name), known)} (--allow-import MODULE registers your own)"


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
        value = int(value)  # users write a million as 1e6
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
    return tuple(_convert(value[i], items[i], None, f"{key}[{i}]") for i in range(len(items)))


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
    """Return a copy of a free value with lists instead of tuples."""
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
    """Return a short text for a message, as YAML would spell it."""
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

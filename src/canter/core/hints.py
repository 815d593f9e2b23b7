"""Names and types of settings: type hints of config classes, and old names that are still read.

A renamed setting stays readable in old YAML files, flags, run folders and policy files: add a line
to `SETTING_ALIASES`. A renamed public name stays importable for one release: add a line to
`DEPRECATED`.
"""

from __future__ import annotations

import logging
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from canter.core.registry import Registry

SETTING_ALIASES: dict[str, str] = {
    "NetworkConfig.memory": "rnn",
    "NormalizerConfig.eps_on=deviation": "std",
}
"""Old names of settings: `"ConfigClass.old_field": "new_field"`. Old values of settings:
`"ConfigClass.field=old": "new"`. A subclass of `ConfigClass` inherits its aliases."""
DEPRECATED: dict[str, str] = {}
"""Old public names, `"OldName": "NewName"`; `canter.OldName` warns once and is `canter.NewName`."""

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def current_name(cls: type, name: Any, section: str) -> Any:
    """Return the current name of a field of `cls`, and warn if `name` is an old one.

    `section` is the key path above the field.
    """
    alias = _find(cls, str(name))
    if alias is None:
        return name
    prefix = f"{section}." if section else ""
    _warn_once(alias, f"the setting {prefix}{name} is now called {prefix}{SETTING_ALIASES[alias]}")
    return SETTING_ALIASES[alias]


def current_value(cls: type, field: str, value: Any, key: str) -> Any:
    """Return the current name of a value, and warn if `value` is an old one."""
    alias = _find(cls, f"{field}={value}") if isinstance(value, str) else None
    if alias is None:
        return value
    _warn_once(alias, f"the value {value} of the setting {key} is now called {SETTING_ALIASES[alias]}")
    return SETTING_ALIASES[alias]


def old_names(cls: type) -> dict[str, str]:
    """Return the old names of the fields of `cls`, each with the current name."""
    names: dict[str, str] = {}
    for alias, current in SETTING_ALIASES.items():
        owner, _, old = alias.partition(".")
        if "=" not in old and owner in {base.__name__ for base in cls.__mro__}:
            names[old] = current
    return names


def _find(cls: type, name: str) -> str | None:
    """Return the entry of `SETTING_ALIASES` for a name of `cls` or of one of its base classes."""
    aliases = (f"{base.__name__}.{name}" for base in cls.__mro__)
    return next((alias for alias in aliases if alias in SETTING_ALIASES), None)


def _warn_once(alias: str, text: str) -> None:
    if alias not in _warned:
        _warned.add(alias)
        _log.warning("%s; the old name still works, but will be removed", text)


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the type hints of the fields of a dataclass that its constructor takes."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def field_defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass by field."""
    own = {field.name: field for field in fields(cls) if field.init}
    made = {name: field.default_factory() for name, field in own.items() if field.default_factory is not MISSING}
    return {name: field.default for name, field in own.items() if field.default is not MISSING} | made


def config_keys(cls: type, *, with_old_names: bool = False) -> dict[str, Any]:
    """Return the type hint of every field below a dataclass by its dotted path.

    The fields of all registered kinds are included.

    `with_old_names` adds the paths under the old names of `SETTING_ALIASES`, which `from_plain`
    reads too.
    """
    keys: dict[str, Any] = {}
    hints = field_hints(cls)
    if with_old_names:
        hints = hints | {old: hints[current] for old, current in old_names(cls).items()}
    for name, hint in hints.items():
        classes = config_classes(hint)
        is_open = registry_in(hint) is not None
        if not classes or is_open or accepts_none(hint):
            keys[name] = hint
        if classes and is_open:
            keys[f"{name}.kind"] = str
        for member in classes:
            for inner, inner_hint in config_keys(member, with_old_names=with_old_names).items():
                keys.setdefault(f"{name}.{inner}", inner_hint)
    return keys


def is_free(hint: Any) -> bool:
    """Return whether a hint is a mapping with keys chosen by the user."""
    return get_origin(hint) is dict


def accepts_none(hint: Any) -> bool:
    """Return whether a hint accepts None."""
    return types.NoneType in _members(hint)


def without_none(hint: Any) -> Any:
    """Return the other member of `X | None`; any other hint as it is."""
    others = [member for member in _members(hint) if member is not types.NoneType]
    return others[0] if len(others) == 1 else hint


def is_text(hint: Any) -> bool:
    """Return whether a hint is a string, a literal or a registered name."""
    hint = without_none(hint)
    return hint is str or get_origin(hint) is Literal or (get_origin(hint) is Annotated and get_args(hint)[0] is str)


def registry_in(hint: Any) -> Registry[Any] | None:
    """Return the registry in an `Annotated` hint, or None."""
    hint = without_none(hint)
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Registry)), None)


def config_classes(hint: Any) -> list[type]:
    """Return the config dataclasses that a hint allows: one, or all kinds of a registry."""
    hint = without_none(hint)
    registry = registry_in(hint)
    if registry is None:
        return [hint] if is_dataclass(hint) and isinstance(hint, type) else []
    return [] if is_text(hint) else list(registry.items().values())


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)

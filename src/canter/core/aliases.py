"""Old names that are still understood: of settings, and of the public Python API.

A renamed setting stays readable in old YAML files, flags, run folders and policy files: add a line
to `SETTING_ALIASES`. A renamed public name stays importable for one release: add a line to
`DEPRECATED`.
"""

from __future__ import annotations

import logging
from typing import Any

SETTING_ALIASES: dict[str, str] = {
    "NetworkConfig.memory": "rnn",
    "NormalizerConfig.eps_on=deviation": "std",
}
"""Old names of settings: `"ConfigClass.old_field": "new_field"`. Old values, and old kinds of a
registry, of settings: `"ConfigClass.field=old": "new"`. A subclass of `ConfigClass` inherits its
aliases."""
DEPRECATED: dict[str, str] = {
    "Declared": "ReportSpec",
}
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
    """Return the value of a setting, and warn if it was an old string or an old `kind`."""
    word = value.get("kind") if isinstance(value, dict) else value
    alias = _find(cls, f"{field}={word}") if isinstance(word, str) else None
    if alias is None:
        return value
    current = SETTING_ALIASES[alias]
    _warn_once(alias, f"the value {word} of the setting {key} is now called {current}")
    return value | {"kind": current} if isinstance(value, dict) else current


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

"""Rules that turn the settings of a source library into Canter's.

The rows of the tables in this package.

A table is a tuple of rules for one section of the source; `apply` walks it from top to bottom. A
rule is made by one of the names below, or is a function of the section where several keys depend on
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from canter.compat.settings import readers as read
from canter.compat.settings.section import NONE, Section

Rule = Callable[[Section], None]
OFF = (*NONE, False)
"""Values of a switch that is off."""
OMIT = object()
"""Default of a key that sets nothing when it is absent."""


def apply(rules: Iterable[Rule], section: Section) -> None:
    """Apply the rules of a table to one section of the source."""
    for rule in rules:
        rule(section)


@dataclass(frozen=True)
class Copy:
    """A key whose value becomes one or several settings."""

    key: str
    to: str
    """Settings, separated by blanks."""
    read: read.Reader
    default: Any = None
    """Value of the source library when the key is absent; None: the key is required; OMIT: nothing
    is set."""
    convert: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    """The value here, by the value of the source."""
    why: str | Mapping[Any, str] = ""
    """The difference, for a key that means something else here, or for some values of it."""

    def __call__(self, s: Section) -> None:
        """Make the settings and report the key."""
        if self.default is OMIT and not s.has(self.key):
            return
        value = self.read(s, self.key, None if self.default is OMIT else self.default)
        why = self.why if isinstance(self.why, str) else self.why.get(value, "")
        if isinstance(self.convert, Mapping):
            value = self.convert[value]
        elif self.convert is not None:
            value = self.convert(value)
        s.copy(self.key, self.to, value, why)


@dataclass(frozen=True)
class Only:
    """A key that Canter can honour for some values only; others are refused."""

    key: str
    accepts: Collection[Any]
    to: str
    """Setting or part of Canter that does the same for these values."""
    why: str
    """Reason of the refusal, and the remedy."""

    def __call__(self, s: Section) -> None:
        """Report the key."""
        if s.raw(self.key) in self.accepts:
            s.mapped(self.key, self.to)
        else:
            s.refuse(self.key, self.why)


def always(to: str, value: Any) -> Rule:
    """Return the rule for a setting that has one value in the source library, which no key changes."""
    return lambda s: s.set(to, value)


def parity(to: str, value: Any, otherwise: str) -> Rule:
    """Return the rule for something that the source library always does.

    A setting with `--parity`, a reported difference without.
    """
    return lambda s: s.own_form("", {to: value}, otherwise)


def mapped(keys: str, to: str) -> Rule:
    """Return the rule for keys whose work is done elsewhere, or by a rule above."""
    return lambda s: s.mapped(keys, to)


def no_effect(keys: str, why: str = "no code reads it") -> Rule:
    """Return the rule for keys that the source library does not read."""
    return lambda s: s.no_effect(keys, why)


def precision(key: str, to: str, why: str) -> Rule:
    """Return the rule for a switch of half precision; `why` is what else differs."""
    read_as = {True: "bfloat16", False: "float32"}
    return Copy(key, to, read.flag, OMIT, read_as, {True: f"in acting too; {why}"})

"""One set of settings turned into another, with an account of every key.

A parent's keys are read by type, each is given a verdict, and what nobody gave a verdict is refused at the end: so none
is dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from canter.compat.settings.deviations import Deviations, Verdict
from canter.config import TrainConfig
from canter.core.plain import ConfigError, from_plain, nest
from canter.core.registry import nearest

NONE = (None, "None", "none", "null", "")
"""How a parent's file says nothing; YAML reads `None` as a word."""


class ImportRefused(ConfigError):
    """A file of a parent that cannot become a run here; `deviations` says everything about it."""

    def __init__(self, message: str, deviations: Deviations) -> None:
        super().__init__(message)
        self.deviations = deviations


@dataclass
class Translation:
    """Reads a parent's keys, writes Canter's, and keeps account.

    Keys are dotted paths. `lines` has the line of each in the file, for errors. What `without` names is left out at the
    caller's word.
    """

    tree: Mapping[str, Any]
    report: Deviations
    lines: Mapping[str, int] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Canter's settings so far, by path."""
    origin: dict[str, str] = field(default_factory=dict)
    """The parent's key behind each of Canter's settings."""
    judged: set[str] = field(default_factory=set)
    """Keys that have a verdict."""
    asked: set[str] = field(default_factory=set)
    """Names of keys that were looked for: those that the parent knows."""

    @property
    def parity(self) -> bool:
        """Whether the parent's numbers are wanted."""
        return self.report.parity

    # reading ---------------------------------------------------------------------------------------------------------

    def raw(self, key: str, default: Any = None) -> Any:
        """The value at a path as it is."""
        self.asked.add(key.rpartition(".")[2])
        here: Any = self.tree
        for part in key.split("."):
            if not isinstance(here, Mapping) or part not in here:
                return default
            here = here[part]
        return here

    def has(self, key: str) -> bool:
        """Whether there is such a key with something in it; Isaac Lab writes `{}` for what a config leaves open."""
        return self.raw(key) not in (*NONE, {})

    def error(self, key: str, expected: str, advice: str = "") -> ConfigError:
        """A value that makes no sense, by file, line, key and value."""
        place = f"{self.report.source}:{self.lines[key]}" if key in self.lines else self.report.source
        remedy = f"; {advice}" if advice else ""
        return ConfigError(f"{place}: {key}: expected {expected}, got {self.raw(key)!r}{remedy}", key)

    def pair(self, key: str, expected: str) -> tuple[float, float]:
        """Two numbers, the lower first."""
        value = self.raw(key)
        numbers = [float(x) for x in value if type(x) in (int, float)] if isinstance(value, list | tuple) else []
        if len(numbers) != 2 or len(value) != 2 or not numbers[0] < numbers[1]:
            raise self.error(key, expected)
        return numbers[0], numbers[1]

    def number(self, key: str, default: float | None = None) -> float:
        """A number, which may be written as a word such as 5e-4."""
        value = self._resolved(key, default, "a number")
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or math.isnan(number):
            raise self.error(key, "a number", "" if key in self.lines or self.has(key) else "it is required")
        return number

    def finite(self, key: str, default: float | None = None) -> float:
        """A number that is not infinite."""
        number = self.number(key, default)
        if math.isinf(number):
            raise self.error(key, "a finite number")
        return number

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; 1e6 is one."""
        number = self.finite(key, default)
        if number != int(number):
            raise self.error(key, "a whole number")
        return int(number)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._resolved(key, default, "true or false")
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def word(self, key: str, known: Iterable[str] | None = None, default: str | None = None) -> str:
        """A string, one of `known` where that is given."""
        value = self._resolved(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, "a string" if known is None else f"one of {', '.join(known)}")
        if known is not None and value not in known:
            raise self.error(key, f"one of {', '.join(known)}", nearest(value, known))
        return value

    def _resolved(self, key: str, default: Any, expected: str) -> Any:
        """The value at a path, which must not wait for another one."""
        value = self.raw(key, default)
        if isinstance(value, str) and "${" in value:
            raise self.error(key, expected, f"nothing resolves it: say --set {_name_in(value)}=VALUE")
        return value

    def widths(self, key: str, default: Any = None) -> list[int]:
        """A list of whole numbers."""
        return self._list(key, default, int, "a list of whole numbers")

    def groups(self, key: str) -> list[str]:
        """Names of observation groups."""
        return self._list(key, None, str, "a list of observation groups")

    def _list(self, key: str, default: Any, kind: type, expected: str) -> list[Any]:
        value = self.raw(key, default)
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            raise self.error(key, expected)
        return list(value)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        number = self.integer(key, default)
        if number < 1:
            raise self.error(key, "a whole number above 0")
        return number

    def section(self, key: str) -> bool:
        """Whether there is a mapping at a path; anything else there is an error."""
        value = self.raw(key)
        if value in NONE or value == {}:
            return False
        if not isinstance(value, Mapping):
            raise self.error(key, "a mapping")
        return True

    # verdicts --------------------------------------------------------------------------------------------------------

    def put(self, setting: str, value: Any, key: str = "") -> None:
        """Set one of Canter's settings; `key` is where its value came from."""
        self.settings[setting] = value
        if key:
            self.origin[setting] = key

    def to(self, key: str, setting: str, value: Any, why: str = "") -> None:
        """A key became this setting: the same, or with the difference `why`."""
        self.put(setting, value, key)
        self.judge(key, "differs" if why else "mapped", f"{setting}={_show(value)}", why)

    def move(self, key: str, setting: str, read: Callable[..., Any], *default: Any) -> None:
        """A key became this setting, with the same value; `read` is the method above that reads it."""
        self.to(key, setting, read(key, *default))

    def move_given(self, key: str, setting: str, read: Callable[[str], Any]) -> None:
        """The same for a key that may be missing, and then says nothing."""
        if self.has(key):
            self.to(key, setting, read(key))

    def judge(self, key: str, verdict: Verdict, to: str = "", why: str = "") -> None:
        """Give a verdict to a key and all below it, unless they are not in the input or have one."""
        if self.raw(key, _ABSENT) is _ABSENT:
            return
        if verdict == "refused" and self._left_out(key):
            verdict, why = "differs", f"left out at your word (--without): {why}"
        for leaf, value in _leaves(self.raw(key), key):
            if leaf not in self.judged:
                self.judged.add(leaf)
                self.report.add(leaf, value, verdict, to, why)

    def each(self, key: str, names: str, verdict: Verdict, to: str = "", why: str = "") -> None:
        """The same verdict for some keys of a section; others that it has stay unknown."""
        for name in names.split() if isinstance(self.raw(key), Mapping) else ():
            self.judge(f"{key}.{name}", verdict, to, why)
        if not self.section(key):
            self.judge(key, verdict, to, why)

    def dead(self, why: str, *keys: str) -> None:
        """No code of the parent reads these keys."""
        for key in keys:
            self.judge(key, "dead", why=why)

    def refuse(self, key: str, why: str) -> None:
        """Nothing here does what the key asks for."""
        self.judge(key, "refused", why=why)

    def only(self, key: str, fits: bool, to: str, why: str) -> None:
        """A key of which one value can be done here; others are refused."""
        self.judge(key, "mapped", to) if fits else self.refuse(key, why)

    def always(self, why: str, to: str = "") -> None:
        """A difference that comes from no key."""
        self.report.add("", None, "differs", to, why)

    def choose(self, ours: str, setting: str, theirs: Any, key: str = "") -> None:
        """What the parent does in its own way: its form with `parity`, else Canter's, in the words of `ours`."""
        if self.parity:
            self.to(key, setting, theirs) if key else self.put(setting, theirs)
        else:
            self.judge(key, "differs", why=ours) if key else self.always(ours)

    def _left_out(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self.without)

    # the result ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Refuse every key that has no verdict."""
        for leaf, value in _leaves(self.tree, ""):
            if leaf not in self.judged and value == {}:
                self.report.add(leaf, value, "mapped", "nothing, as it is empty")
            elif leaf not in self.judged and self._left_out(leaf):
                self.report.add(leaf, value, "differs", why="left out at your word (--without)")
            elif leaf not in self.judged:
                known = nearest(leaf.rpartition(".")[2], self.asked)
                why = f"unknown key, {known}; leave it out with --without {leaf}"
                self.report.add(leaf, value, "refused", why=why)

    def config(self) -> TrainConfig:
        """Canter's settings; raises `ImportRefused` where a key was refused, ConfigError where values do not fit."""
        refused = self.report.of("refused")
        if refused:
            shown = "; ".join(self._placed(entry.key) + entry.line() for entry in refused[:3])
            more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise ImportRefused(f"{self.report.source}: refused: {shown}{more}", self.report)
        try:
            return from_plain(nest(self.settings, {"env.options": {}}), TrainConfig())
        except ConfigError as error:
            raise ConfigError(f"{self.report.source}: {self._source_of(error)}{error}", error.key) from error

    def _placed(self, key: str) -> str:
        return f"line {self.lines[key]}: " if key in self.lines else ""

    def _source_of(self, error: ConfigError) -> str:
        """The parent's key behind a setting that was refused, with its value."""
        path = error.key
        while path and path not in self.origin:
            path = path.rpartition(".")[0]
        inside = (source for setting, source in self.origin.items() if setting.startswith(f"{error.key}."))
        key = self.origin.get(path) or next(inside, "")
        return f"{self._placed(key)}{key}={self.raw(key)!r} became " if key else ""


_ABSENT = object()


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Path and value of everything that is no mapping, or an empty one."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name_in(value: Any) -> str:
    """The name that an unresolved `${...}` asks for, in the words of --set."""
    inner = str(value).partition("${")[2]
    return inner.partition("${")[2].partition("}")[0].lstrip(".") if "${" in inner else inner.rstrip("}").lstrip(".")

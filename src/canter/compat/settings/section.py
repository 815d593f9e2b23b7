"""Sections of a source library's settings, read by type, and the report of every key.

A key is read, becomes settings, and gets a status in the report; the first status of a key stands.
A key without a status is refused at the end, so no key is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from canter.compat.settings.python_syntax import Unread
from canter.compat.settings.rl_games_releases import RELEASES, Release
from canter.config import TrainConfig
from canter.core.plain import ConfigError, from_plain, nest
from canter.core.registry import nearest

Status = Literal["mapped", "changed", "no_effect", "refused"]
HEADLINES: dict[Status, str] = {
    "mapped": "Mapped, with the same meaning",
    "no_effect": "Without effect in the source library, so left out",
    "changed": "Mapped with a difference",
    "refused": "Refused",
}
"""In the order in which the report shows them, the most important last."""
SHOWN_CHARACTERS = 60
"""Longer values are cut off in the report."""


@dataclass(frozen=True)
class Entry:
    """One key of the source, or one difference that no key controls."""

    key: str
    """Dotted path in the source; empty for a difference that no key controls."""
    value: Any
    status: Status
    to: str = ""
    """`setting=value` here, or the part of Canter that does the work of the key."""
    why: str = ""
    """The difference, or the reason of a refusal and its remedy."""

    def line(self) -> str:
        """Return the entry as one line of text."""
        name = f"{self.key}={_shorten(self.value)}" if self.key else "(always)"
        target = f" -> {self.to}" if self.to else ""
        reason = f": {self.why}" if self.why else ""
        return f"{name}{target}{reason}"


@dataclass
class ImportReport:
    """The status of every key of the source, in the order in which the keys were read."""

    source: str
    """Imported file or object."""
    dialect: str
    """Source library and the generation of its settings."""
    parity: bool
    """The import requested the source library's numbers."""
    entries: list[Entry] = field(default_factory=list)

    def add(self, key: str, value: Any, status: Status, to: str = "", why: str = "") -> None:
        """Append the entry of one key, or of a difference that was not reported before."""
        entry = Entry(key, value, status, to, why)
        if key or entry not in self.entries:
            self.entries.append(entry)

    def of(self, status: Status) -> list[Entry]:
        """Return all entries with one status."""
        return [entry for entry in self.entries if entry.status == status]

    def counts(self) -> dict[str, int]:
        """Return the number of entries of each status."""
        return {status: len(self.of(status)) for status in get_args(Status)}

    def text(self) -> str:
        """Return the whole report as text, refused keys last."""
        numbers = "Canter's own forms (--parity for the source library's)"
        if self.parity:
            numbers = "the source library's numbers (--parity)"
        lines = [f"{self.source}: {self.dialect}, with {numbers}"]
        for status, headline in HEADLINES.items():
            entries = self.of(status)
            if entries:
                lines.append(f"{headline} ({len(entries)}):")
                lines += [f"  {entry.line()}" for entry in entries]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """Return the report as plain data, for a JSON file."""
        entries = [{**asdict(entry), "value": _plain(entry.value)} for entry in self.entries]
        return {"source": self.source, "dialect": self.dialect, "parity": self.parity, "entries": entries}


class ImportRefused(ConfigError):
    """The settings hold a key that Canter cannot honour; `report` has every key."""

    def __init__(self, message: str, report: ImportReport) -> None:
        super().__init__(message)
        self.report = report

    @property
    def deviations(self) -> ImportReport:
        """Former name of `report`."""
        return self.report


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else _shorten(value)


NONE = (None, "None", "none", "null", "")
"""Values that mean nothing; YAML reads `None` as a word."""
ABSENT = object()


@dataclass
class Import:
    """One import.

    The source as plain data, what the caller knows, and the settings and the report so far.
    """

    tree: Mapping[str, Any]
    report: ImportReport
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key in the file, for errors."""
    without: tuple[str, ...] = ()
    """Keys that the caller leaves out though they are refused."""
    env: str | None = None
    """Environment id from the caller."""
    num_envs: int | None = None
    """Number of environments from the caller."""
    agents: int = 1
    """Agents in each environment."""
    release: Release = RELEASES["1.6.5"]
    """Release of rl_games that its settings are read as."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Canter's settings so far, by path."""
    origin: dict[str, str] = field(default_factory=dict)
    """Source key of each of these settings."""
    reported: set[str] = field(default_factory=set)
    """Keys that have a status."""
    looked_for: set[str] = field(default_factory=set)
    """Keys that were looked for: those that the source library knows."""
    values_read: set[str] = field(default_factory=set)
    """Keys whose values were read."""
    unread: set[str] = field(default_factory=set)
    """Keys that the source library does not read: they count as absent."""

    @property
    def root(self) -> Section:
        """Section of the whole source, with settings by their full path."""
        return Section(self, "", "")

    @property
    def samples_per_step(self) -> int | None:
        """Environments times agents; None if the number of environments is unknown."""
        num_envs = self.settings.get("env.num_envs")
        return None if num_envs is None else num_envs * self.agents

    def section(self, at: str, to: str = "") -> Section:
        """Return the section at a path of the source, for settings below `to`."""
        return Section(self, at, to)

    def left_out(self, key: str) -> bool:
        """Return True for keys that the caller leaves out."""
        return any(key == name or key.startswith(f"{name}.") for name in self.without)

    def check_left_out(self) -> None:
        """Raise ConfigError for a key to leave out that the source does not have."""
        leaves = [leaf for leaf, _ in _leaves(self.tree, "")]
        for name in self.without:
            if not any(f"{leaf}.".startswith(f"{name}.") for leaf in leaves):
                raise ConfigError(f"--without {name}: {self.report.source} has no such key, {nearest(name, leaves)}")

    def finish_report(self) -> None:
        """Report the other keys.

        Mapped if their values were read, refused if nothing knows them.
        """
        targets: dict[str, list[str]] = {}
        for setting, key in self.origin.items():
            targets.setdefault(key, []).append(f"{setting}={self.settings.get(setting)}")
        for leaf, value in _leaves(self.tree, ""):
            if leaf in self.reported:
                continue
            if leaf in self.values_read:
                self.report.add(leaf, value, "mapped", ", ".join(targets.get(leaf, [])))
            elif value == {} or (value in NONE and any(f"{key}.".startswith(f"{leaf}.") for key in self.looked_for)):
                self.report.add(leaf, value, "mapped", "nothing, as it is empty")
            elif self.left_out(leaf):
                self.report.add(leaf, value, "changed", why="left out by --without")
            else:
                names = {key.rpartition(".")[2] for key in self.looked_for}
                suggestion = nearest(leaf.rpartition(".")[2], names)
                near = f", {suggestion}" if suggestion.startswith("did") else ""
                self.report.add(leaf, value, "refused", why=f"unknown key{near}")

    def config(self) -> TrainConfig:
        """Return the settings.

        Raise `ImportRefused` for a refused key, ConfigError for values that do not fit.
        """
        refused = self.report.of("refused")
        if refused:
            shown = "; ".join(self._line(entry.key) + entry.line() for entry in refused[:3])
            more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
            unknown = [entry.key for entry in refused if entry.why.startswith("unknown key")]
            flags = " ".join(f"--without {key}" for key in unknown)
            advice = f"; leave out what is not known: {flags} (ignore={unknown} in a script)" if unknown else ""
            raise ImportRefused(f"{self.report.source}: refused: {shown}{more}{advice}", self.report)
        try:
            return from_plain(nest(self.settings, {"env.options": {}}), TrainConfig())
        except ConfigError as error:
            raise ConfigError(f"{self.report.source}: {self._source_of(error)}{error}", error.key) from error

    def _line(self, key: str) -> str:
        return f"line {self.lines[key]}: " if key in self.lines else ""

    def _source_of(self, error: ConfigError) -> str:
        """Return the source key and value behind a setting that was rejected."""
        path = error.key
        while path and path not in self.origin:
            path = path.rpartition(".")[0]
        inner = (source for setting, source in self.origin.items() if setting.startswith(f"{error.key}."))
        key = self.origin.get(path) or next(inner, "")
        return f"{self._line(key)}{key}={self.root.raw(key)!r} became " if key else ""


@dataclass(frozen=True)
class Section:
    """One section of the source; its keys are relative to `at`, its settings to `to`."""

    run: Import
    at: str
    to: str

    def inner(self, at: str, to: str = "") -> Section:
        """Return a section below this one."""
        return Section(self.run, self.key(at), self.setting(to))

    def key(self, name: str) -> str:
        """Return the full path of a key."""
        return f"{self.at}.{name}" if self.at and name else self.at or name

    def setting(self, name: str) -> str:
        """Return the full path of a setting."""
        return f"{self.to}.{name}" if self.to and name else self.to or name

    @property
    def parity(self) -> bool:
        """Return True if the import requested the source library's numbers."""
        return self.run.report.parity

    # reading: typed values by the functions below
    # ---------------------------------------------------------------------

    def raw(self, key: str, default: Any = None) -> Any:
        """Read the value of a key as it is; raise ConfigError if it has none unless its file runs."""
        value = self._look(key, default)
        if isinstance(value, Unread):
            raise ConfigError(f"{self.key(key)}: {value}; write it out, or add --without with this key", self.key(key))
        self.run.values_read.add(self.key(key))
        return value

    def _look(self, key: str, default: Any = None) -> Any:
        """Return the value of a key without reading it for a setting."""
        key = self.key(key)
        self.run.looked_for.add(key)
        value: Any = {} if key in self.run.unread else self.run.tree
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if isinstance(value, Unread) and self.run.left_out(key) else value

    def has(self, key: str) -> bool:
        """Return True for a key with a value.

        Isaac Lab writes `{}` for what a config leaves open.
        """
        return self._look(key) not in (*NONE, {})

    def has_section(self, key: str) -> bool:
        """Return True for a mapping that is not empty; raise ConfigError for any other value."""
        value = self._look(key)
        if value in NONE or value == {}:
            return False
        if not isinstance(value, Mapping):
            raise self.error(key, "a mapping")
        return True

    def error(self, key: str, expected: str, advice: str = "") -> ConfigError:
        """Return the error of a value that makes no sense, with file, line, key and value."""
        path = self.key(key)
        line = f":{self.run.lines[path]}" if path in self.run.lines else ""
        remedy = f"; {advice}" if advice else ""
        text = f"{self.run.report.source}{line}: {path}: expected {expected}, got {self._look(key)!r}{remedy}"
        return ConfigError(text, path)

    # settings and statuses
    # --------------------------------------------------------------------------------------------

    def get(self, setting: str, default: Any = None) -> Any:
        """Return a setting made so far."""
        return self.run.settings.get(self.setting(setting), default)

    def set(self, setting: str, value: Any, key: str = "") -> None:
        """Make a setting; `key` is where its value came from."""
        path = self.setting(setting)
        self.run.settings[path] = value
        if key:
            self.run.origin[path] = self.key(key)

    def copy(self, key: str, settings: str, value: Any, why: str = "") -> None:
        """Make settings of a key's value, with the same meaning or with the difference `why`."""
        for setting in settings.split():
            self.set(setting, value, key)
        targets = ", ".join(f"{self.setting(setting)}={value}" for setting in settings.split())
        self.report(key, "changed" if why else "mapped", targets, why)

    def report(self, keys: str, status: Status, to: str = "", why: str = "") -> None:
        """Give a status to keys and all below them, except absent ones and those that have one.

        Blanks separate keys; "" stands for a difference that no key controls.
        """
        if not keys:
            self.run.report.add("", None, status, to, why)
        for key in keys.split():
            self._report(key, status, to, why)

    def _report(self, key: str, status: Status, to: str, why: str) -> None:
        value = self._look(key, ABSENT)
        if value is ABSENT:
            return
        path = self.key(key)
        if status == "refused" and self.run.left_out(path):
            status = "changed"
            why = f"left out by --without: {why}"
        for leaf, item in _leaves(value, path):
            if leaf not in self.run.reported:
                self.run.reported.add(leaf)
                self.run.report.add(leaf, item, status, to, why)

    def own_form(self, key: str, settings: Mapping[str, Any], otherwise: str) -> None:
        """Make the settings of the source library's own form with parity.

        Otherwise report Canter's form.
        """
        if not self.parity:
            self.changed(key, otherwise)
            return
        for setting, value in settings.items():
            self.set(setting, value, key)
        if key:
            self.mapped(key, ", ".join(f"{self.setting(setting)}={value}" for setting, value in settings.items()))

    def mapped(self, keys: str, to: str = "") -> None:
        """Report keys that mean the same here."""
        self.report(keys, "mapped", to)

    def changed(self, keys: str, why: str, to: str = "") -> None:
        """Report keys that mean something else here."""
        self.report(keys, "changed", to, why)

    def no_effect(self, keys: str, why: str) -> None:
        """Report keys that the source library does not read."""
        if keys:
            self.report(keys, "no_effect", why=why)

    def refuse(self, keys: str, why: str) -> None:
        """Report keys that nothing here can honour."""
        self.report(keys, "refused", why=why)

    def each(self, key: str, names: str, status: Status, to: str = "", why: str = "") -> None:
        """Give one status to some keys of a section; its other keys stay unknown."""
        keys = [f"{key}.{name}" for name in names.split()] if self.has_section(key) else [key]
        self.report(" ".join(keys), status, to, why)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of everything that is no mapping, or an empty one."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value

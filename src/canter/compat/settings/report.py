"""The report of an import: what became of every key of the source library's settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from canter.core.plain import ConfigError

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
    """The import asked for the source library's numbers."""
    entries: list[Entry] = field(default_factory=list)

    def add(self, key: str, value: Any, status: Status, to: str = "", why: str = "") -> None:
        """Append the entry of one key."""
        self.entries.append(Entry(key, value, status, to, why))

    def of(self, status: Status) -> list[Entry]:
        """Return all entries with one status."""
        return [entry for entry in self.entries if entry.status == status]

    def counts(self) -> dict[str, int]:
        """Return the number of entries of each status."""
        counted = Counter(entry.status for entry in self.entries)
        return {status: counted[status] for status in get_args(Status)}

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
        """The former name of `report`."""
        return self.report


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else _shorten(value)

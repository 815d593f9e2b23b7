"""What became of every key of a parent's settings: the report that an import leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["mapped", "differs", "dead", "refused"]
HEADLINES = {
    "mapped": "Mapped, with the same meaning",
    "differs": "Mapped with a difference",
    "dead": "Without effect in the parent, and so left out",
    "refused": "Refused",
}


@dataclass(frozen=True)
class Entry:
    """One key of the input, or one thing that the parent does whatever its keys say."""

    key: str
    """Dotted path in the parent's file; empty for what is no key."""
    value: Any
    verdict: Verdict
    to: str = ""
    """What it became: `setting=value`, or where it is applied."""
    why: str = ""
    """The difference, or the reason and the remedy."""

    def line(self) -> str:
        """The entry in one line."""
        name = f"{self.key}={_short(self.value)}" if self.key else "(always)"
        arrow = f" -> {self.to}" if self.to else ""
        return f"{name}{arrow}{': ' if self.why else ''}{self.why}"


@dataclass
class Deviations:
    """Every key of the input with its verdict, in the order in which it was looked at."""

    source: str
    """File or object that was imported."""
    dialect: str
    """Library and generation that it was written for."""
    parity: bool
    """Whether the parent's numbers were asked for."""
    entries: list[Entry] = field(default_factory=list)

    def add(self, key: str, value: Any, verdict: Verdict, to: str = "", why: str = "") -> None:
        """Take note of a key."""
        self.entries.append(Entry(key, value, verdict, to, why))

    def of(self, verdict: Verdict) -> list[Entry]:
        """All entries with one verdict."""
        return [entry for entry in self.entries if entry.verdict == verdict]

    def counts(self) -> dict[str, int]:
        """How many entries each verdict has."""
        found = Counter(entry.verdict for entry in self.entries)
        return {verdict: found[verdict] for verdict in get_args(Verdict)}

    def text(self) -> str:
        """The whole report, what matters most last: it is what a terminal still shows."""
        form = "the parent's numbers (--parity)" if self.parity else "Canter's own forms (--parity for the parent's)"
        lines = [f"{self.source}: {self.dialect}, with {form}"]
        for verdict in ("mapped", "dead", "differs", "refused"):
            found = self.of(verdict)
            if found:
                lines += [f"{HEADLINES[verdict]} ({len(found)}):", *(f"  {entry.line()}" for entry in found)]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """The report as plain data, for a file."""
        entries = [{**asdict(entry), "value": _plain(entry.value)} for entry in self.entries]
        return {"source": self.source, "dialect": self.dialect, "parity": self.parity, "entries": entries}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else _short(value)

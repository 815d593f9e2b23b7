"""The lineage of a population: an append-only file of JSON lines, from which everything else follows.

Lines, in order: `start` with the settings of all members; `score` of a member at a comparison;
`round` with the decisions of a comparison, written before they are acted on; `copied` once they
are; and `spent`, the seconds of work. A line that a kill cut off does not count.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.app.tuning.study import remove_partial_line
from canter.core.storage.files import append, parse_json, read_untrusted

LINEAGE = "lineage.jsonl"
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Change:
    """A member with other weights, other settings or both after a comparison."""

    member: int
    source: int
    """Member whose weights it has now; itself if it keeps its own."""
    settings: dict[str, str]


class Lineage:
    """The events of a population so far."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / LINEAGE
        self.initial: list[dict[str, str]] = []
        """Texts of the initial settings of each member, by key."""
        self.scores: dict[tuple[int, int], dict[str, Any]] = {}
        """`score`, `return` and `seconds` by member and steps."""
        self.rounds: list[tuple[int, list[Change]]] = []
        """Steps and changes of each comparison."""
        self.copied = 0
        """Comparisons whose decisions have been carried out."""
        self.spent = 0.0
        self._read_bytes = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that have been added by this and other processes."""
        if not self.file.is_file():
            return
        content = read_untrusted(self.file, MAX_BYTES)
        whole = content.rfind(b"\n") + 1
        for line in content[self._read_bytes : whole].splitlines():
            self._apply(parse_json(line))
        self._read_bytes = whole

    def _apply(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start":
                self.initial = event["settings"]
            case "score":
                self.scores[event["member"], event["steps"]] = event
            case "round":
                changes = [Change(change["member"], change["from"], change["settings"]) for change in event["changes"]]
                self.rounds.append((event["steps"], changes))
            case "copied":
                self.copied = event["round"]
            case "spent":
                self.spent = event["seconds"]

    def add(self, event: str, **facts: Any) -> None:
        """Append an event and wait until it is on the disk; other processes must not write meanwhile."""
        remove_partial_line(self.file)
        append(self.file, json.dumps({"event": event, **facts}, allow_nan=False).encode() + b"\n")
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
        self.refresh()

    def add_round(self, steps: int, changes: list[Change]) -> None:
        """Append the decisions of a comparison."""
        plain = [{"member": change.member, "from": change.source, "settings": change.settings} for change in changes]
        self.add("round", round=len(self.rounds) + 1, steps=steps, changes=plain)

    def settings(self, member: int, rounds: int | None = None) -> dict[str, str]:
        """Return the texts of a member's settings by key, after some comparisons or all of them."""
        settings = self.initial[member]
        for _, changes in self.rounds[:rounds]:
            settings = next((change.settings for change in changes if change.member == member), settings)
        return settings

    def ancestors(self, member: int) -> list[int]:
        """Return who had the weights of a member: one in each interval, itself at the end."""
        line = [member]
        for _, changes in reversed(self.rounds):
            line.insert(0, next((change.source for change in changes if change.member == line[0]), line[0]))
        return line

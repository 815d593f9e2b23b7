"""Settings of a run that is resumed: which changed, which may not, and the record of the changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canter.core.plain import from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import Malformed, append, parse, parse_json, read_untrusted
from canter.core.storage.validity import flatten
from canter.runs.policies import ProgressSnapshot
from canter.runs.records import CONFIG

logger = logging.getLogger(__name__)

EDITS = "edits.jsonl"
MAX_EDITS_BYTES = 1 << 20
ABSENT = "(absent)"
FIXED = {
    "seed": "the random streams of the run go on from where they are",
    "env.id": "another task is another run: canter train ENV --init-from RUN begins one with these weights",
    "env.num_envs": "the checkpoint holds what each of them was doing",
    "algorithm.kind": "the checkpoint is of this algorithm",
    "algorithm.model": "the weights of the checkpoint are of these networks",
    "algorithm.policy": "the weights of the checkpoint are of these networks",
    "algorithm.critic": "the weights of the checkpoint are of these networks",
    "self_play": "the opponents are part of the run",
}
"""Settings that cannot change when a run is resumed, and why."""


def flat_settings(config: Any) -> dict[str, str]:
    """Return the `repr` of every setting by key."""
    return {key: repr(value) for key, value in flatten(to_plain(config)).items()}


def changed_settings(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys whose values differ, each with the old and the new value."""
    pairs = {key: [old.get(key, ABSENT), new.get(key, ABSENT)] for key in {**old, **new}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def format_changes(changes: Mapping[str, list[str]]) -> str:
    """Return the changes as `key old -> new`, separated by commas."""
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())


def refuse_fixed(keys: Iterable[str], spell: Callable[[str], str] = str) -> None:
    """Raise UserError if one of the changed settings cannot change; `spell` writes its key as the user types it."""
    for key in keys:
        reason = next((reason for fixed, reason in FIXED.items() if f"{key}.".startswith(f"{fixed}.")), None)
        if reason is not None:
            raise UserError(f"{spell(key)} cannot change when a run goes on: {reason}")


@dataclass
class ChangeCheck:
    """Compares the settings of a run with those of its checkpoint; a `RunFolder` calls it before it resumes.

    Edits of the settings file since the checkpoint are refused unless accepted, as are settings
    that cannot change and a budget that is used up. Other changes are recorded with the iteration
    from which they hold.
    """

    path: Path
    """The run's folder."""
    config: Any
    """Settings with which the run continues."""
    stored: Any = None
    """Settings in the run's file if they are the base of `config`; None if `config` stands alone."""
    accept_edits: bool = False
    """Accept edits of the settings file."""
    notify: Callable[[str], Any] = logger.warning
    """Takes the line about changes."""

    def __call__(self, settings: str | None, progress: ProgressSnapshot) -> None:
        """Check the text of the checkpoint's settings; None if it has none."""
        trained = self.stored
        if settings is not None:
            trained = from_plain(parse(settings, f"checkpoint of {self.path}")[0], type(self.config))
        if trained is None:
            return
        in_checkpoint = flat_settings(trained)
        # A kill before the next checkpoint leaves changes that were recorded, but are in no
        # checkpoint.
        known = in_checkpoint | _recorded_edits(self.path, progress.iteration)
        if self.stored is not None:
            self._refuse_edits(in_checkpoint, known, progress)
        changes = changed_settings(known, flat_settings(self.config))
        refuse_fixed(changes)
        done = progress.env_steps
        if "total_steps" in changes and (self.config.total_steps or done) < done:
            raise UserError(f"total_steps={self.config.total_steps} is below the {done:,} steps that are done")
        if changes:
            self.notify(f"From iteration {progress.iteration} on: {format_changes(changes)}")
            date = f"{datetime.now(UTC):%FT%TZ}"
            note = {"iteration": progress.iteration, "date": date, "changes": changes}
            append(self.path / EDITS, json.dumps(note).encode() + b"\n")

    def _refuse_edits(self, in_checkpoint: dict[str, str], known: dict[str, str], progress: ProgressSnapshot) -> None:
        in_file = flat_settings(self.stored)
        edits = {} if in_file == in_checkpoint else changed_settings(known, in_file)
        if edits and not self.accept_edits:
            raise UserError(
                f"{self.path / CONFIG} was edited since iteration {progress.iteration}: {format_changes(edits)}; "
                f"to go on with that: canter resume {self.path} --accept-edits"
            )


def _recorded_edits(path: Path, iteration: int) -> dict[str, str]:
    """Return the changes recorded at this iteration or later: the last value of each key."""
    edits: dict[str, str] = {}
    lines: list[bytes] = []
    with suppress(OSError):
        lines = read_untrusted(path / EDITS, MAX_EDITS_BYTES, within=path).splitlines()
    for line in lines:
        with suppress(Malformed, TypeError, ValueError, LookupError):
            note = parse_json(line)
            if note["iteration"] >= iteration:
                edits |= {str(key): str(new) for key, (_, new) in dict(note["changes"]).items()}
    return edits

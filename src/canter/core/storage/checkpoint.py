"""Atomic checkpoints: a folder with tensors, plain values and the hashes of both files.

A checkpoint is written to a folder whose name starts with a dot, forced to the disk, and moved into
place by one rename. A process that dies at any moment leaves earlier checkpoints unchanged. Reading
verifies every byte before interpreting it, and nothing in a checkpoint can name code.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.core.registry import UserError
from canter.core.storage.files import Corrupt, Malformed, parse_json, read_untrusted, sync_folder, write_synced
from canter.core.storage.lock import is_alive
from canter.core.storage.tree import decode, encode
from canter.core.storage.validity import flatten

SCHEMA = 1
"""Version of the layout; readers refuse other versions."""
TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
MAX_BYTES = {TENSORS: 64 << 30, STATE: 256 << 20, MANIFEST: 4096}
"""Larger files are refused unread."""
FILES = MAX_BYTES.keys()

_log = logging.getLogger(__name__)
_HOST = re.sub(r"\W", "_", socket.gethostname())[:64] or "unknown"
_TOKEN = secrets.token_hex(4)
"""Distinguishes this process from an earlier one with the same pid, as after a container
restart."""
_counter = itertools.count()
_SCRATCH = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old|trash)-(?P<host>\w+)-(?P<pid>\d+)-(?P<token>\w+)-\d+")


class CheckpointCorrupt(Corrupt):
    """A damaged checkpoint: `path` is its folder, `reason` says what is wrong."""

    kind = "checkpoint"


class NoCheckpoint(UserError):
    """A folder without a usable checkpoint; the message names the corrupt ones."""


def save_checkpoint(folder: Path, tree: dict[str, Any], *, replace: bool = False) -> None:
    """Write a tree of tensors and plain values (see `encode`) as the checkpoint `folder`.

    Afterwards the checkpoint is on the disk; if this raises, nothing has changed. An existing
    folder is an error or, with `replace`, is removed after the new one is in place.
    """
    if os.path.lexists(folder) and not (replace and _looks_like_checkpoint(folder)):
        raise FileExistsError(f"{folder} exists" + (" and is not a checkpoint" if replace else ""))
    tensors, state = encode(tree)
    contents = {TENSORS: tensors, STATE: state}
    for name, data in contents.items():
        if len(data) > MAX_BYTES[name]:
            raise UserError(f"{name} would have {len(data)} bytes, more than the allowed {MAX_BYTES[name]}")
    contents[MANIFEST] = json.dumps(_manifest(contents), indent=1).encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = _scratch(folder, "partial")
    try:
        partial.mkdir()
        for name, data in contents.items():
            write_synced(partial / name, data)
        sync_folder(partial)
        _put_in_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the tree saved as `folder`, on the CPU; raise CheckpointCorrupt if it is damaged."""
    location = _location(folder)
    contents = _read_verified(location)
    try:
        return decode(contents[TENSORS], contents[STATE])
    except Malformed as error:
        raise CheckpointCorrupt(location, str(error)) from error


@dataclass
class CheckpointStore:
    """The checkpoints of one run, `step-000000001234` and so on.

    The newest `keep_last` and the marked ones are kept. There must be one writer at a time (see
    `RunLock`) and may be any number of readers.
    """

    folder: Path
    keep_last: int = 3

    def save(self, step: int, tree: dict[str, Any], *, keep: bool = False) -> Path:
        """Save a checkpoint, replacing one of the same step; with `keep` it is never removed.

        Raises OSError if writing fails, and CheckpointCorrupt if reading back returns other bytes.
        In both cases older checkpoints are unchanged.
        """
        path = self.path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        _sweep(self.folder)
        if keep:
            # Before the checkpoint, so that a kill in between never leaves it without its mark.
            self._mark(step).touch()
        save_checkpoint(path, tree, replace=True)
        _read_verified(path)
        self._rotate(step)
        return path

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, usable or not, in ascending order."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        set_aside = (match["name"] for name in names if (match := _SCRATCH.fullmatch(name)) and match["kind"] == "old")
        matches = (re.fullmatch(r"step-(\d{12,})", name) for name in (*names, *set_aside))
        return sorted({int(match[1]) for match in matches if match})

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"step-{step:012d}"

    def load_latest(self) -> tuple[int, dict[str, Any]]:
        """Return step and tree of the newest usable checkpoint; log newer ones that are corrupt."""
        skipped: list[CheckpointCorrupt] = []
        for step in reversed(self.steps()):
            try:
                tree = load_checkpoint(self.path(step))
            except CheckpointCorrupt as error:
                _log.warning("%s; trying the one before", error)
                skipped.append(error)
                continue
            if skipped:
                _log.warning("continuing from %s, %d newer skipped as corrupt", self.path(step), len(skipped))
            return step, tree
        reasons = "; ".join(f"{error.path.name}: {error.reason}" for error in skipped) or "there is none"
        raise NoCheckpoint(f"no usable checkpoint in {self.folder} ({reasons})")

    def _mark(self, step: int) -> Path:
        return self.folder / f"{self.path(step).name}.keep"

    def _rotate(self, newest: int) -> None:
        """Remove checkpoints older than the last `keep_last` up to `newest`.

        Later steps, left by a run that was resumed from an earlier one, are not counted.
        """
        steps = [step for step in self.steps() if step <= newest]
        for step in steps[: -self.keep_last]:
            if self._mark(step).exists():
                continue
            try:
                _discard(self.path(step))
            except OSError as error:
                _log.warning("an old checkpoint could not be removed: %s", error)
        for mark in self.folder.glob("step-*.keep"):
            if not mark.with_suffix("").exists():
                mark.unlink(missing_ok=True)


def _manifest(contents: dict[str, bytes]) -> dict[str, Any]:
    """Return the sizes and hashes of the files, which are verified when they are read."""
    files = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    return {"schema": SCHEMA, "files": files}


def _read_verified(folder: Path) -> dict[str, bytes]:
    """Return the bytes of both files after comparing them with the manifest."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise CheckpointCorrupt(folder, "it is not a folder; links are not followed")
        names = set(os.listdir(folder))
        if names != FILES:
            missing = sorted(FILES - names)
            unexpected = sorted(names - FILES)[:3]
            raise CheckpointCorrupt(folder, f"missing files {missing}, unexpected files {unexpected}")
        contents = {name: read_untrusted(folder / name, limit, within=folder) for name, limit in MAX_BYTES.items()}
        expected = flatten(parse_json(contents.pop(MANIFEST)))
    except OSError as error:
        raise CheckpointCorrupt(folder, f"it cannot be read ({error})") from error
    except (Malformed, RecursionError) as error:
        raise CheckpointCorrupt(folder, f"{MANIFEST}: {error}") from error
    here = flatten(_manifest(contents))
    for field in here | expected:
        if repr(expected.get(field)) != repr(here.get(field)):  # repr, because True == 1
            name, _, what = field.removeprefix("files.").rpartition(".")
            values = f"{here.get(field)} here, {expected.get(field)} in the manifest"
            raise CheckpointCorrupt(folder, f"{name or MANIFEST} has another {what}: {values}"[:500])
    return contents


def _put_in_place(partial: Path, folder: Path) -> None:
    old = _scratch(folder, "old") if os.path.lexists(folder) else None
    if old:
        os.rename(folder, old)
    try:
        os.rename(partial, folder)
    except BaseException:
        if old:
            os.rename(old, folder)
        raise
    sync_folder(folder.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def _looks_like_checkpoint(folder: Path) -> bool:
    """Return whether a folder may be replaced: it is empty or has files of a checkpoint."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = set(os.listdir(folder))
    return not names or bool(names & FILES)


def _location(folder: Path) -> Path:
    """Return the folder to read: the old one if a kill interrupted its replacement."""
    if not os.path.lexists(folder):
        with contextlib.suppress(OSError):
            for path, match in _scratch_of(folder.parent, "old"):
                if match["name"] == folder.name:
                    return path
    return folder


def _scratch(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}-{_HOST}-{os.getpid()}-{_TOKEN}-{next(_counter)}")


def _scratch_of(folder: Path, *kinds: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for name in os.listdir(folder) if folder.is_dir() else []:
        match = _SCRATCH.fullmatch(name)
        if match and match["kind"] in kinds:
            yield folder / name, match


def _discard(folder: Path) -> None:
    """Remove a checkpoint; rename it first, so that no half-removed one can be found."""
    trash = _scratch(folder, "trash")
    os.rename(folder, trash)
    shutil.rmtree(trash)


def _sweep(folder: Path) -> None:
    """Remove what dead writers of this machine left, and restore what they had moved away."""
    for path, match in _scratch_of(folder, "partial", "trash", "old"):
        if not _is_dead(match["host"], int(match["pid"]), match["token"]):
            continue
        with contextlib.suppress(OSError):
            if match["kind"] == "old" and not os.path.lexists(folder / match["name"]):
                os.rename(path, folder / match["name"])
            else:
                shutil.rmtree(path)


def _is_dead(host: str, pid: int, token: str) -> bool:
    if host != _HOST:
        return False
    return token != _TOKEN if pid == os.getpid() else not is_alive(pid)

"""Checkpoints that are either whole or not there: a folder of tensors, plain values and the hashes of both.

A checkpoint is written beside its place under a name that starts with a dot, forced to the disk, and moved into place
by one rename. A process that dies at any moment leaves the earlier checkpoints as they were. Reading verifies every
byte before it is interpreted, and nothing in a checkpoint can name code.
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
from pathlib import Path
from typing import Any

from canter.core.registry import UserError
from canter.core.storage.files import read_untrusted, sync_folder, write_synced
from canter.core.storage.lock import is_alive
from canter.core.storage.tree import Malformed, decode, encode, parse_json
from canter.core.storage.validity import flatten

SCHEMA = 1
"""Version of the layout; readers refuse what they do not know."""
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
MAX_BYTES = {TENSORS: 64 << 30, STATE: 256 << 20, MANIFEST: 4096}
"""Larger files are refused unread."""
FILES = MAX_BYTES.keys()

_log = logging.getLogger(__name__)
_HOST = re.sub(r"\W", "_", socket.gethostname())[:64] or "unknown"
_TOKEN = secrets.token_hex(4)
"""Tells this process from an earlier one with the same number, as after a container's restart."""
_counter = itertools.count()
_SCRATCH = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old|trash)-(?P<host>\w+)-(?P<pid>\d+)-(?P<token>\w+)-\d+")


class CheckpointCorrupt(UserError):
    """A checkpoint that is not what was written: `path` is its folder, `reason` says what is wrong."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} cannot be used: {reason}")
        self.path, self.reason = path, reason


class NoCheckpoint(UserError):
    """A folder in which no checkpoint can be used; the message names those that are corrupt."""


def save_checkpoint(folder: Path, tree: dict[str, Any], *, replace: bool = False) -> None:
    """Write `tree`, nested dicts, lists and tuples of tensors, numbers, strings and None, as the checkpoint `folder`.

    Afterwards the checkpoint is on the disk; if this raises, what was there before is there still. An existing folder
    is an error, or with `replace` set aside and removed once the new one is in place.
    """
    if os.path.lexists(folder) and not (replace and _looks_like_checkpoint(folder)):
        raise FileExistsError(f"{folder} exists" + (" and is no checkpoint" if replace else ""))
    tensors, state = encode(tree)
    contents = {TENSORS: tensors, STATE: state}
    for name, data in contents.items():
        if len(data) > MAX_BYTES[name]:
            raise UserError(f"{name} would have {len(data)} bytes, more than the allowed {MAX_BYTES[name]}")
    contents[MANIFEST] = json.dumps(_manifest(contents), indent=1).encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = _scratch(folder, "partial")
    try:
        partial.mkdir(mode=0o700)
        for name, data in contents.items():
            write_synced(partial / name, data)
        sync_folder(partial)
        _put_in_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The tree that was saved as `folder`, its tensors on the CPU; `CheckpointCorrupt` if a single byte differs."""
    location = _location(folder)
    contents = _read_verified(location)
    try:
        return decode(contents[TENSORS], contents[STATE])
    except Malformed as error:
        raise CheckpointCorrupt(location, str(error)) from error


class CheckpointStore:
    """The checkpoints of one run: `step-000000001234` and so on, of which the last few and the marked ones are kept.

    `keep_last` is how many of the newest stay. There must be one writer at a time (see `RunLock`), and any number of
    readers.
    """

    def __init__(self, folder: Path, keep_last: int = 3) -> None:
        self.folder, self.keep_last = folder, keep_last

    def save(self, step: int, tree: dict[str, Any], *, keep: bool = False) -> Path:
        """Save a checkpoint, replacing an earlier one of the same step; with `keep` it is never rotated away.

        Raises `OSError` when the disk refuses, and `CheckpointCorrupt` when it does not give back what was written;
        older checkpoints are untouched by either.
        """
        path = self.path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        _sweep(self.folder)
        if keep:
            # Before the checkpoint: a kill in between leaves a mark without a checkpoint, never the reverse.
            self._mark(step).touch(mode=0o600)
        save_checkpoint(path, tree, replace=True)
        _read_verified(path)
        self._rotate(step)
        return path

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, usable or not, in ascending order."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        set_aside = (match["name"] for name in names if (match := _SCRATCH.fullmatch(name)) and match["kind"] == "old")
        matches = (re.fullmatch(r"step-(\d{12,})", name) for name in (*names, *set_aside))
        return sorted({int(match[1]) for match in matches if match})

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:012d}"

    def load_latest(self) -> tuple[int, dict[str, Any]]:
        """Step and tree of the newest checkpoint that can be used; says which newer ones could not."""
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
        found = "; ".join(f"{error.path.name}: {error.reason}" for error in skipped) or "there is none"
        raise NoCheckpoint(f"no usable checkpoint in {self.folder} ({found})")

    def _mark(self, step: int) -> Path:
        return self.folder / f"{self.path(step).name}.keep"

    def _rotate(self, newest: int) -> None:
        """Remove what is older than the last few; later steps, left by a run that was wound back, are not counted."""
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
    """What is written beside the files, and must be true of them when they are read."""
    files = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    return {"schema": SCHEMA, "files": files}


def _read_verified(folder: Path) -> dict[str, bytes]:
    """The bytes of both files, once the manifest is theirs; names are fixed, so none can lead out of the folder."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise CheckpointCorrupt(folder, "it is no folder; links are not followed")
        names = set(os.listdir(folder))
        if names != FILES:
            missing, extra = sorted(FILES - names), sorted(names - FILES)
            raise CheckpointCorrupt(folder, f"missing files {missing}, unexpected files {extra[:3]}")
        contents = {name: read_untrusted(folder / name, limit, within=folder) for name, limit in MAX_BYTES.items()}
        told = flatten(parse_json(contents.pop(MANIFEST)))
    except OSError as error:
        raise CheckpointCorrupt(folder, f"it cannot be read ({error})") from error
    except (Malformed, RecursionError) as error:
        raise CheckpointCorrupt(folder, f"{MANIFEST}: {error}") from error
    here = flatten(_manifest(contents))
    for field in here | told:
        if repr(told.get(field)) != repr(here.get(field)):  # True is no 1
            name, _, what = field.removeprefix("files.").rpartition(".")
            values = f"{here.get(field)} here, {told.get(field)} in the manifest"
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
    """Whether a folder may be replaced: it has some of a checkpoint's files, or nothing at all."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = set(os.listdir(folder))
    return not names or bool(names & FILES)


def _location(folder: Path) -> Path:
    """Where a checkpoint is to be read: a kill in the middle of replacing it leaves it under the name it was given."""
    if not os.path.lexists(folder):
        with contextlib.suppress(OSError):
            for path, match in _scratch_of(folder.parent, "old"):
                if match["name"] == folder.name:
                    return path
    return folder


def _scratch(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}-{_HOST}-{os.getpid()}-{_TOKEN}-{next(_counter)}")


def _scratch_of(parent: Path, *kinds: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for name in os.listdir(parent) if parent.is_dir() else []:
        match = _SCRATCH.fullmatch(name)
        if match and match["kind"] in kinds:
            yield parent / name, match


def _discard(folder: Path) -> None:
    """Remove a checkpoint; it is gone by name before its first file is."""
    trash = _scratch(folder, "trash")
    os.rename(folder, trash)
    shutil.rmtree(trash)


def _sweep(parent: Path) -> None:
    """Clean up after writers of this machine that died."""
    for path, match in _scratch_of(parent, "partial", "trash", "old"):
        if not _is_dead(match["host"], int(match["pid"]), match["token"]):
            continue
        with contextlib.suppress(OSError):
            if match["kind"] == "old" and not os.path.lexists(parent / match["name"]):
                os.rename(path, parent / match["name"])
            else:
                shutil.rmtree(path)


def _is_dead(host: str, pid: int, token: str) -> bool:
    if host != _HOST:
        return False
    return token != _TOKEN if pid == os.getpid() else not is_alive(pid)

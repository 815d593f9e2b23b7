"""Locks: one process at a time owns a run folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from canter.core.plain import from_plain
from canter.core.registry import UserError
from canter.core.storage.files import read_json, write_synced

LOCK = "run.lock"
MUTEX = ".run.lock.guard"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The process that owns a run folder."""

    pid: int
    host: str
    since: str
    """Time when the lock was acquired, ISO 8601, UTC."""
    birth: str
    """Start of the process by its machine's clock, to tell it from a later one with the same pid;
    may be empty."""
    token: str


class RunLocked(UserError):
    """Another process, `owner`, owns the run folder; None if the lock cannot be read."""

    def __init__(self, path: Path, owner: Owner | None, advice: str) -> None:
        process = f"process {owner.pid} on {owner.host} since {owner.since}" if owner else "an unknown process"
        super().__init__(f"{path.parent} is in use by {process}; {advice}")
        self.path = path
        self.owner = owner


class RunLock:
    """Locks a run folder inside its `with` block; any other process that tries raises `RunLocked`.

    A lock whose process has died on this machine is taken over. A lock of another machine is left
    alone, because its process cannot be checked from here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK
        self.owner: Owner | None = None

    def __enter__(self) -> Self:
        """Acquire the lock or raise `RunLocked`."""
        if self.owner:
            raise RuntimeError(f"{self.path} is already locked by this object")
        self.folder.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = Owner(pid, socket.gethostname(), since, _birth(pid), secrets.token_hex(8))
        with folder_mutex(self.folder):
            if os.path.lexists(self.path):
                self._remove_stale(owner.host)
            try:
                _create(self.path, json.dumps(asdict(owner)).encode())
            except FileExistsError:  # by another machine, which may not share the mutex
                raise RunLocked(self.path, _read(self.path), "it took the lock first") from None
        self.owner = owner
        return self

    def __exit__(self, *raised: object) -> None:
        """Release the lock if this process still owns it."""
        owner = self.owner
        self.owner = None
        if owner is None or owner.pid != os.getpid():
            return
        with folder_mutex(self.folder):
            if _read(self.path) == owner:
                self.path.unlink()
            else:
                _log.warning("%s was removed or replaced by another process while this one owned it", self.path)

    def _remove_stale(self, host: str) -> None:
        """Remove the lock if its process is known to be dead; otherwise raise RunLocked."""
        owner = _read(self.path)
        by_hand = f"if you know that it is no longer running, remove {self.path} by hand"
        if owner is None:
            raise RunLocked(self.path, None, f"the lock cannot be read; {by_hand}")
        if owner.host != host:
            raise RunLocked(self.path, owner, f"this is {host}, from where that process cannot be seen; {by_hand}")
        if is_alive(owner.pid, owner.birth):
            raise RunLocked(self.path, owner, "wait for it, stop it, or use another folder")
        fate = f"process {owner.pid}, its owner since {owner.since}, died without releasing it"
        _log.warning("taking over the lock %s: %s", self.path, fate)
        self.path.unlink()


def is_locked(folder: Path) -> bool:
    """Return whether a process owns a run folder that is alive or may be, on another machine."""
    owner = _read(folder / LOCK)
    if owner is None:
        return os.path.lexists(folder / LOCK)
    return owner.host != socket.gethostname() or is_alive(owner.pid, owner.birth)


def owner_text(folder: Path) -> str | None:
    """Return which process owns a run folder, and how to end a stale lock; None if it is free."""
    if not is_locked(folder):
        return None
    path = folder / LOCK
    return str(RunLocked(path, _read(path), f"waiting for it; if it no longer runs, remove {path}"))


def is_alive(pid: int, birth: str = "") -> bool:
    """Return whether a process of this machine runs and, given its `birth`, is the same one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = _birth(pid)
    return now != "zombie" and (not birth or not now or now == birth)


def _birth(pid: int) -> str:
    """Return boot and tick of a process's start, "zombie" if it has ended, "" if unknown."""
    try:
        # The second field, the name in brackets, may contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "zombie" if fields[0] in "ZX" else f"{boot}:{fields[19]}"


@contextlib.contextmanager
def folder_mutex(folder: Path) -> Iterator[None]:
    """Wait for other processes of this machine that use a folder, and exclude them in the block.

    Without it, two processes that find the same stale lock could each remove it, the second one the
    new lock of the first. The system releases the mutex when its process dies.
    """
    fd = os.open(folder / MUTEX, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        # Some network file systems have no locks; creating the file is exclusive still.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _create(path: Path, data: bytes) -> None:
    """Create a file with its content, atomically; raise FileExistsError if it exists."""
    host = re.sub(r"\W", "_", socket.gethostname())  # one per machine, since machines may not share the mutex
    draft = path.with_name(f".{path.name}.draft-{host}")
    draft.unlink(missing_ok=True)
    write_synced(draft, data)
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_synced(path, data)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> Owner | None:
    try:
        owner = from_plain(read_json(path), Owner)
    except (OSError, ValueError):
        return None
    return owner if owner.pid > 0 else None

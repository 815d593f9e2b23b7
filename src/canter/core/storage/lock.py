"""One owner per run folder."""

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
from canter.core.storage.files import write_synced
from canter.core.storage.strict import read_json

LOCK, GUARD = "run.lock", ".run.lock.folder_mutex"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Who holds a run folder."""

    pid: int
    host: str
    since: str
    """When the lock was taken, ISO 8601, UTC."""
    birth: str
    """When the process started, by its machine's clock; tells it from a later one with the same pid. May be empty."""
    token: str


class RunLocked(UserError):
    """Another process owns the run folder; `owner` says which, None if the lock cannot be read."""

    def __init__(self, path: Path, owner: Owner | None, advice: str) -> None:
        who = f"process {owner.pid} on {owner.host} since {owner.since}" if owner else "an unknown process"
        super().__init__(f"{path.parent} is in use by {who}; {advice}")
        self.path, self.owner = path, owner


class RunLock:
    """Holds a run folder while in its `with` block; whoever else wants to write there gets `RunLocked`.

    A lock whose process has died on this machine is taken over. Of a process on another machine nobody here can tell
    whether it lives, so its lock is left alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.owner: Owner | None = None

    def __enter__(self) -> Self:
        """Take the lock or raise `RunLocked`."""
        if self.owner:
            raise RuntimeError(f"{self.path} is already held by this very lock")
        self.folder.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = Owner(pid, socket.gethostname(), since, _birth(pid), secrets.token_hex(8))
        with folder_mutex(self.folder):
            if os.path.lexists(self.path):
                self._remove_stale(owner.host)
            try:
                _create(self.path, json.dumps(asdict(owner)).encode())
            except FileExistsError:  # only from another machine, where the folder_mutex may not reach
                raise RunLocked(self.path, _read(self.path), "it took the lock first") from None
        self.owner = owner
        return self

    def __exit__(self, *raised: object) -> None:
        """Give the lock back, if it is still this one's and this is still the process that took it."""
        owner, self.owner = self.owner, None
        if owner is None or owner.pid != os.getpid():
            return
        with folder_mutex(self.folder):
            if _read(self.path) == owner:
                self.path.unlink()
            else:
                _log.warning("%s was removed or taken by another process while this one held it", self.path)

    def _remove_stale(self, host: str) -> None:
        """Make room if the holder is known to be dead; else raise."""
        owner = _read(self.path)
        by_hand = f"if you know that it is no longer running, remove {self.path} by hand"
        if owner is None:
            raise RunLocked(self.path, None, f"the lock cannot be read; {by_hand}")
        if owner.host != host:
            raise RunLocked(self.path, owner, f"this is {host}, from where that process cannot be seen; {by_hand}")
        if is_alive(owner.pid, owner.birth):
            raise RunLocked(self.path, owner, "wait for it, stop it, or use another folder")
        fate = f"process {owner.pid}, which held it since {owner.since}, died without giving it back"
        _log.warning("taking over %s: %s", self.path, fate)
        self.path.unlink()


def is_locked(folder: Path) -> bool:
    """Whether a process holds a run folder: one that lives, or one that nobody here can tell to be dead."""
    owner = _read(folder / LOCK)
    if owner is None:
        return os.path.lexists(folder / LOCK)
    return owner.host != socket.gethostname() or is_alive(owner.pid, owner.birth)


def is_alive(pid: int, birth: str = "") -> bool:
    """Whether a process of this machine runs; with the `birth` noted earlier, whether it is the same one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = _birth(pid)
    return now != "zombie" and (not birth or not now or now == birth)


def _birth(pid: int) -> str:
    """Boot and tick at which a process began, "zombie" if it has ended, empty where the system does not tell."""
    try:
        # The name, in brackets, may itself hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "zombie" if fields[0] in "ZX" else f"{boot}:{fields[19]}"


@contextlib.contextmanager
def folder_mutex(folder: Path) -> Iterator[None]:
    """Processes of one machine look at a folder and change it one after the other; each waits for its turn.

    Without it, two that find the same stale lock could each remove it, the second removing the lock of the first. The
    system lets go of the folder_mutex when its holder dies.
    """
    fd = os.open(folder / GUARD, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no such locks; creation is exclusive still
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _create(path: Path, data: bytes) -> None:
    """Create a file that did not exist, with its content from the start: a kill leaves all of it or nothing."""
    host = re.sub(r"\W", "_", socket.gethostname())  # each machine its own: the folder_mutex may not reach beyond one
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

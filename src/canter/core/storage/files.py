"""Reading files that anybody may have written: plain ones, of limited size, from where they claim to be.

Files that are either whole or not there, whenever the process or the machine dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from canter.core.machine import available_memory
from canter.core.registry import UserError


class Unreadable(UserError, OSError):
    """A file that is not read; the message names it and says why."""


def open_untrusted(path: Path, limit: int, within: Path | None = None) -> BinaryIO:
    """A plain file of at most `limit` bytes, open for reading.

    No pipe is waited for and no device is read. A file that belongs to the folder `within` must lie there, wherever
    links lead; where nothing is said of a folder, the user has named the file, and may have named a link.
    """
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise Unreadable(f"{path} is a link out of {within}, which is not followed")
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Unreadable(f"{path} is no plain file")
        if info.st_size > limit:
            raise Unreadable(f"{path} has {info.st_size:,} bytes, more than the {limit:,} allowed")
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_untrusted(path: Path, limit: int, within: Path | None = None) -> bytes:
    """All bytes of such a file; refused unread where memory would not hold it."""
    with open_untrusted(path, limit, within) as file:
        size, room = os.fstat(file.fileno()).st_size, available_memory()
        if size > room:
            raise Unreadable(f"{path} has {size:,} bytes, more than the memory here ({room:,.0f})")
        return file.read(size)


def write_synced(path: Path, data: bytes | Iterable[bytes], mode: int = 0o600) -> None:
    """Write a new file, of one piece or several, by default for its owner only, and wait until it is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a plain file, all or nothing as far as the disk allows."""
    # No link is followed, and no pipe waited for.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | flags, 0o666)
    try:
        end, rest = os.fstat(fd).st_size, memoryview(data)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.ftruncate(fd, end)
            raise
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes | Iterable[bytes], mode: int = 0o600) -> None:
    """Put a whole new file in the place of the old one; if this raises, the old one is there still.

    There must be one writer of `path` at a time. What a killed one left under a name that starts with a dot is
    overwritten by the next.
    """
    fresh = path.with_name(f".{path.name}.partial")
    fresh.unlink(missing_ok=True)
    try:
        write_synced(fresh, data, mode)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)

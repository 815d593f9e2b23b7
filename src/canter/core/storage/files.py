"""Safe file access: reading untrusted files within limits, and writing files atomically.

A file that is read must be a regular one, of limited size and inside its folder. A file that is
written is complete or absent, even if the process or the machine dies meanwhile.
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
    """A file that is refused unread; the message says which and why."""


def open_untrusted(path: Path, limit: int, within: Path | None = None) -> BinaryIO:
    """Open a regular file of at most `limit` bytes for reading; pipes and devices are refused.

    With `within`, the file must lie in that folder after resolving links. Without it, the user
    named the file, which may be a link.
    """
    if within is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within)):
        raise Unreadable(f"{path} is a link out of {within}, which is not followed")
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Unreadable(f"{path} is not a regular file")
        if info.st_size > limit:
            raise Unreadable(f"{path} has {info.st_size:,} bytes, more than the {limit:,} allowed")
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_untrusted(path: Path, limit: int, within: Path | None = None) -> bytes:
    """Return the bytes of such a file; raise Unreadable if they would not fit into memory."""
    with open_untrusted(path, limit, within) as file:
        size = os.fstat(file.fileno()).st_size
        free = available_memory()
        if size > free:
            raise Unreadable(f"{path} has {size:,} bytes, more than the free memory ({free:,.0f})")
        return file.read(size)


def write_synced(path: Path, data: bytes | Iterable[bytes], mode: int = 0o600) -> None:
    """Write a new file from one or several pieces and wait until it is on the disk.

    By default only its owner may read it.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Wait until the directory entries of a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append(path: Path, data: bytes) -> None:
    """Append to a regular file; if that fails, remove what was appended."""
    # Refuse links, and do not wait for pipes.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | flags, 0o666)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.ftruncate(fd, info.st_size)
            raise
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes | Iterable[bytes], mode: int = 0o600) -> None:
    """Replace a file atomically and durably; if this raises, the old file is unchanged.

    There must be one writer of `path` at a time. The partial file of a killed writer, whose name
    starts with a dot, is overwritten by the next.
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

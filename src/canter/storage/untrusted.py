"""Reading files that anybody may have written: plain ones, of limited size, from where they claim to be."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from canter.machine import available_memory


class Unreadable(OSError):
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

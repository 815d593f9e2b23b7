"""Files that are either whole or not there, whenever the process or the machine dies."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file, readable by its owner only, and wait until it is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Put a whole new file in the place of the old one; if this raises, the old one is there still.

    There must be one writer of `path` at a time. What a killed one left under a name that starts with a dot is
    overwritten by the next.
    """
    fresh = path.with_name(f".{path.name}.partial")
    fresh.unlink(missing_ok=True)
    try:
        write_synced(fresh, data)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)

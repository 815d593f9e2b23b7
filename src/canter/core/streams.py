"""Standard output and standard error while the code of an environment runs.

An environment that closes them would let the next file that is opened receive what is printed, and
one that writes without end would hide the run's own lines.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)

FLOOD_CHARACTERS = 4_000
"""Characters that environments may write to standard error within `FLOOD_SECONDS`."""
FLOOD_SECONDS = 60.0
STREAMS = {1: "standard output", 2: "standard error"}
"""Names of the file descriptors that are kept open."""
OWN_FILES = (str(Path(__file__).parents[1]), logging.__file__)
"""Beginnings of the names of files that write for others."""
_spares: dict[int, int] = {}
"""Copies of the file descriptors."""
_warned: set[tuple[str, int]] = set()
"""Environments that were warned of, with the file descriptor that they closed."""
_running: list[str] = []
"""Calls of environments that are under way, in words."""


@contextmanager
def guarded_streams(env_id: str, call: str) -> Iterator[None]:
    """Run a call of an environment; open streams again that it closes, and log that it did."""
    for number in STREAMS:
        if number not in _spares:
            with suppress(OSError):  # closed before the program began
                _spares[number] = os.dup(number)
    _running.append(f"{env_id}, in {call},")
    try:
        yield
    finally:
        _running.pop()
        for number in _spares:
            if not _is_open(number):
                _reopen(number)
                if (env_id, number) in _warned:
                    continue
                _warned.add((env_id, number))
                _log.warning("%s closed %s in %s; it was opened again", env_id, STREAMS[number], call)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _reopen(number: int) -> None:
    """Open a stream again, or the null device in its place if its copy was closed too."""
    spare = _spares[number]
    if not _is_open(spare):
        null = os.open(os.devnull, os.O_WRONLY)
        _spares[number] = spare = os.dup(null)
        if null not in STREAMS:
            os.close(null)
    os.dup2(spare, number)


class FloodLimit:
    """Limits what environments write to a stream, and names the first that writes too much."""

    def __init__(self) -> None:
        self.since = -math.inf
        self.characters = 0
        self.named = False

    def limited(self, text: str) -> str:
        """Return the part of a text to write; a text of the run itself is not limited."""
        if not _running:
            return text
        if time.monotonic() - self.since > FLOOD_SECONDS:
            self.since = time.monotonic()
            self.characters = 0
        kept = text[: max(0, FLOOD_CHARACTERS - self.characters)]
        self.characters += len(text)
        if len(kept) == len(text) or self.named:
            return kept
        self.named = True
        limit = f"{FLOOD_CHARACTERS:,} characters of it in {FLOOD_SECONDS:.0f} s"
        return f"{kept}\ncanter: {_running[-1]} writes much to standard error ({_place()}); at most {limit} are shown\n"


def _place() -> str:
    """Return `file:line` of the code that writes."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

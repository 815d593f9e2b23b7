"""Text on its way to a terminal: nothing in it moves the cursor, and nobody reading any longer ends no run."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str, keep: str = "") -> str:
    """The text with what a terminal might obey spelled out, but for the characters in `keep`.

    Names of files and runs, keys, ids and messages of others may hold anything: escapes, marks that turn the direction
    of writing, and halves of characters that cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def two_columns(things: Mapping[str, str]) -> str:
    """A line for each name and what there is to say about it."""
    width = max(map(len, things))
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in things.items())


class PrintableStream:
    """A stream that takes any text and shows it as `printable` does; colours are left out.

    Once nobody takes what is written, as in `| head`, or the disk under it is full, the rest goes nowhere: what a
    command does is worth more than what it says. `lost` is the error that it began with.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write it, as far as anybody reads."""
        self._try("write", printable(_COLOUR.sub("", text), keep="\n\t"))
        return len(text)

    def flush(self) -> None:
        """Hand over what is held back."""
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        if self.lost is not None:
            return
        try:
            getattr(self.stream, method)(*arguments)
        except OSError as error:
            self.lost = error
            # What is held back would be tried again, and fail again, when Python ends.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_output() -> Iterator[PrintableStream]:
    """Standard output and errors as such streams; gives that of the output."""
    before = sys.stdout, sys.stderr
    out, err = PrintableStream(before[0]), PrintableStream(before[1])
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def terminal_stream() -> Any:
    """Where to draw on the terminal; what is drawn there must be `printable` already."""
    return getattr(sys.stdout, "stream", sys.stdout)

"""Numbers as people read them.

Text on its way to a terminal: nothing in it moves the cursor, and nobody reading any longer ends no run.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO


def number(value: float | None) -> str:
    """About four significant digits; a hyphen for none."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 1 else 4}f}"


def percent(value: float | None) -> str:
    """A fraction as a percentage; a hyphen for none."""
    return "-" if value is None else f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; hours only where there are some; a hyphen for none."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def in_units(seconds: float | None) -> str:
    """A time as one or two units: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return "\N{EN DASH}"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    index = next(i for i, (_, size) in enumerate(units) if seconds >= size - 0.5)
    (big, size), (small, part) = units[index], units[index + 1]
    whole, rest = divmod(round(seconds / part) * part, size)
    return f"{whole} {big}" + (f" {rest // part} {small}" if rest else "")


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

"""Text for a terminal: numbers and times for people, and output that cannot move the cursor.

Output that nobody reads any more, as after `| head`, does not end a run.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from canter.core.streams import FloodLimit

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def format_number(value: float | None) -> str:
    """Return a number with about four significant digits; a hyphen for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4f}"


def format_percent(value: float | None) -> str:
    """Return a fraction as a percentage; a hyphen for None."""
    if value is None:
        return "-"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def format_clock(seconds: float | None) -> str:
    """Return a time as 1:02:05, or 2:05 below an hour; a hyphen for None."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_duration(seconds: float | None) -> str:
    """Return a time in one or two units: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return "\N{EN DASH}"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    index = next(i for i, (_, size) in enumerate(_UNITS) if seconds >= size - 0.5)
    large_unit, large_size = _UNITS[index]
    small_unit, small_size = _UNITS[index + 1]
    whole, rest = divmod(round(seconds / small_size) * small_size, large_size)
    return f"{whole} {large_unit}" + (f" {rest // small_size} {small_unit}" if rest else "")


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit: 61.4 kB, 3 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural."""
    plural = f"{noun}es" if noun.endswith("ch") and noun != "epoch" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def printable(text: str, keep: str = "") -> str:
    """Return the text with control characters escaped, except for those in `keep`.

    Names of files and runs, keys, ids and messages of others may contain anything: escape
    sequences, marks that turn the direction of writing, and halves of characters that cannot be
    encoded.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def two_columns(entries: Mapping[str, str]) -> str:
    """Return a line for each name and its description."""
    width = max(map(len, entries))
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in entries.items())


class PrintableStream:
    """A stream that accepts any text and writes it as `printable` does, without colours.

    What environments write to it is limited by `flood`. It stays open if they close it.

    When the reader is gone, as after `| head`, or the disk is full, the rest is discarded: the work
    of a command matters more than its output. `lost` is the first such error.
    """

    def __init__(self, stream: TextIO, flood: FloodLimit | None = None) -> None:
        self.stream = stream
        self.flood_limit = flood
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text, unless the output is lost."""
        shown = text if self.flood_limit is None else self.flood_limit.limited(text)
        self._try("write", printable(_COLOUR.sub("", shown), keep="\n\t"))
        return len(text)

    def close(self) -> None:
        """Flush the stream; it belongs to the process, so it stays open."""
        self.flush()

    def flush(self) -> None:
        """Flush the stream, unless the output is lost."""
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        if self.lost is not None:
            return
        try:
            getattr(self.stream, method)(*arguments)
        except OSError as error:
            self.lost = error
            # Buffered text would be written again when Python exits, and fail again.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(null, self.stream.fileno())
                os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_output() -> Iterator[PrintableStream]:
    """Make standard output and errors printable streams inside the block; yield the output."""
    stdout = sys.stdout
    stderr = sys.stderr
    out = PrintableStream(stdout)
    err = PrintableStream(stderr, FloodLimit())
    sys.stdout = out  # type: ignore[assignment]
    sys.stderr = err  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout = stdout
        sys.stderr = stderr


def terminal_stream() -> Any:
    """Return the stream of the terminal; only text that is `printable` already may be written."""
    return sys.stdout.stream if isinstance(sys.stdout, PrintableStream) else sys.stdout

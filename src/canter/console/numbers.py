"""Numbers as people read them."""

from __future__ import annotations

import math


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

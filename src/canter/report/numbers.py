"""Numbers for people: round ticks on axes, thousands and millions, seconds and hours."""

from __future__ import annotations

import itertools
import math

from canter.console.numbers import in_units as duration

__all__ = ["duration", "human", "tick_texts", "ticks"]

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers from `low` to `high`: steps are 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_texts(places: list[float]) -> list[str]:
    """Ticks in one common unit and with as many digits as they need to differ."""
    largest = max(map(abs, places), default=0.0)
    step = min((b - a for a, b in itertools.pairwise(places)), default=largest)
    if 0 < largest < 1e-3:
        return [_signed(f"{place:.0e}".replace("e-0", "e-")) if place else "0" for place in places]
    scale, unit = _unit(largest)
    if step < scale / 100:  # in that unit they would look alike
        scale, unit = 1.0, ""
    digits = max(0, -math.floor(math.log10(step / scale) + 1e-9)) if step > 0 else 0
    return [_signed(f"{place / scale:,.{digits}f}{unit}") if place else "0" for place in places]


def human(value: float | None, digits: int = 4) -> str:
    """A number in about `digits` digits: 0.00012, 487.3, 1,024, 3.2 M."""
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else _signed(f"{value}")
    size = abs(value)
    if size < 1e-3:
        return _signed(f"{value:.{digits - 2}e}".replace("e-0", "e-"))
    scale, unit = _unit(size)
    if unit:
        return _signed(f"{value / scale:,.{digits}g}{unit}")
    if float(value).is_integer() or size >= 10 ** (digits - 1):
        return _signed(f"{value:,.0f}")
    return _signed(f"{value:.{digits}g}")


def _unit(size: float) -> tuple[float, str]:
    """What to divide a number of this size by, and what to write behind it."""
    return next(((scale, f"{THIN}{unit}") for scale, unit in _UNITS if size >= max(scale, 1e4)), (1.0, ""))


def _signed(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text

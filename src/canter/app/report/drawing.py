"""Numbers for people: round ticks on axes, thousands and millions, seconds and hours.

HTML and SVG as nested calls; whatever is no markup already is escaped.

Small charts as SVG: lines with bands, and one stacked bar. Colours come from the page's style sheet.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from canter.app.console.text import in_units as duration

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


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_VOID = frozenset({"meta", "br", "img", "rect", "line", "path", "circle"})
"""Elements without content, written `<br/>`, which is right in HTML and in SVG."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(content: object) -> Markup:
    """Content as markup: names of runs and values of settings may hold anything."""
    if isinstance(content, Markup):
        return content
    # Names of files may hold bytes that are no text.
    text = str(content).encode("utf-8", "replace").decode()
    return Markup(html.escape(_CONTROL.sub("\ufffd", text)))


def joined(children: Iterable[object]) -> Markup:
    """Markup of all children, one after the other; None is nothing."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element; `class_` is written `class`, `stroke_width` is `stroke-width`, None leaves an attribute out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = name + "".join(f' {key}="{_attribute(value)}"' for key, value in given.items())
    return Markup(f"<{head}/>" if name in _VOID else f"<{head}>{joined(children)}</{name}>")


def _attribute(value: object) -> Markup:
    # A tenth of a pixel is enough, and pages stay small.
    return Markup(f"{value:.1f}".removesuffix(".0")) if isinstance(value, float) else escaped(value)


COLORS = 7
"""Colours that the style sheet has: classes `c0`, `c1`, ..."""
MAX_POINTS = 400
"""A line of more points is drawn by the means of so many."""
LINE_HEIGHT, BAR_HEIGHT = 15.0, 26.0


def css_color(number: int) -> str:
    """The class of a colour, which come round again."""
    return f"c{number % COLORS}"


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    faint: bool = False
    """Drawn thin behind the others, and not in the legend: one of several runs, or what was not smoothed."""
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    """A band around it."""

    @property
    def css(self) -> str:
        """The class of its colour."""
        return css_color(self.color)


@dataclass(frozen=True)
class Frame:
    """Size of a chart, and what its axes show."""

    title: str
    width: float
    height: float
    x_label: str = ""
    """Written below the x axis; empty leaves no room for it."""
    threshold: float | None = None
    """A value to mark with a dashed line."""
    floor: float = -math.inf
    """The y axis ends there at the lowest; what lies below is cut off."""
    readouts: int = 48
    """Places at which pointing shows the values."""


@dataclass(frozen=True)
class Axes:
    """Where numbers lie on the paper."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    y_ticks: list[float]

    def x(self, value: np.ndarray | float) -> np.ndarray:
        """Horizontal place."""
        low, high = self.x_range
        return self.left + (np.asarray(value) - low) / (high - low) * (self.right - self.left)

    def y(self, value: np.ndarray | float) -> np.ndarray:
        """Vertical place; far outside of the paper is as good as further."""
        low, high = self.y_range
        return self.bottom - np.clip((np.asarray(value) - low) / (high - low), -9, 9) * (self.bottom - self.top)


def line_chart(lines: Sequence[Line], frame: Frame) -> Markup:
    """A chart of lines over a common x axis; pointing at it shows the values there."""
    lines = [thinned(line) for line in lines if len(line.x)]
    if not lines:
        return Markup("")
    axes, clear = _axes(lines, frame), [line for line in lines if not line.faint]
    bands = [_band(line, axes) for line in lines]
    strokes = [_stroke(line, axes) for line in sorted(lines, key=lambda line: not line.faint)]
    x, y, width, height = axes.left, axes.top - 2, axes.right - axes.left + 3, axes.bottom - axes.top + 4
    # What is drawn outside of a nested svg is cut off.
    box = f"{x:.1f} {y:.1f} {width:.1f} {height:.1f}"
    inside = element("svg", *bands, *strokes, x=x, y=y, width=width, height=height, viewBox=box)
    return element(
        "svg",
        _grid(axes, frame),
        inside,
        _threshold(axes, frame.threshold),
        _readouts(clear, axes, frame),
        class_="chart",
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
        aria_label=_described(clear, frame),
    )


def stacked_bar(parts: Sequence[tuple[str, float]], width: float) -> Markup:
    """Parts of a whole side by side, each in its colour with its share on it where there is room."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup("")
    pieces, left = [], 0.0
    for index, (label, value) in enumerate(parts):
        share = value / total
        wide = share * width
        tip = element("title", f"{label}: {share:.1%}")
        text = element("text", f"{share:.0%}", x=left + wide / 2, y=BAR_HEIGHT / 2 + 4, class_="on")
        # A fill needs no gap: a hairline in the colour of the paper parts the pieces.
        rectangle = element("rect", x=left, y=0, width=max(wide - 1, 0.5), height=BAR_HEIGHT)
        pieces.append(element("g", tip, rectangle, text if wide > 36 else None, class_=f"part {css_color(index)}"))
        left += wide
    shares = ", ".join(f"{label} {value / total:.0%}" for label, value in parts)
    box = f"0 0 {width:g} {BAR_HEIGHT:g}"
    return element("svg", *pieces, class_="bar", viewBox=box, role="img", aria_label=f"Shares: {shares}")


def thinned(line: Line) -> Line:
    """The same line with at most `MAX_POINTS` points; each is the mean of its neighbours, the last one stays."""
    if len(line.x) <= MAX_POINTS:
        return line
    edges = np.unique(np.linspace(0, len(line.x) - 1, MAX_POINTS).astype(int))
    means: dict[str, np.ndarray] = {}
    for name in ("x", "y", "low", "high"):
        values = getattr(line, name)
        if values is not None:
            sums = np.add.reduceat(values[:-1], edges[:-1])
            means[name] = np.append(sums / np.diff(edges), values[-1])
    return replace(line, **means)


def _axes(lines: Sequence[Line], frame: Frame) -> Axes:
    ys = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    if frame.threshold is not None:
        ys.append(np.array([frame.threshold]))
    low, high = min(float(y.min()) for y in ys), max(float(y.max()) for y in ys)
    low = max(low, frame.floor) if high > frame.floor else low
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # Where all is positive and zero is near, zero is shown.
    y_range = (0.0 if 0 <= low < 0.4 * high else low - pad, high + pad)
    start, end = min(float(line.x[0]) for line in lines), max(float(line.x[-1]) for line in lines)
    start = 0.0 if 0 <= start < 0.1 * end else start
    y_ticks = ticks(*y_range, max(4, round(frame.height / 60)))
    left = 10.0 + 6.6 * max(map(len, tick_texts(y_ticks)))
    bottom = frame.height - (36 if frame.x_label else 22)
    return Axes(left, frame.width - 12, 12.0, bottom, (start, end if end > start else start + 1), y_range, y_ticks)


def _grid(axes: Axes, frame: Frame) -> Markup:
    xs = ticks(*axes.x_range, max(3, round((axes.right - axes.left) / 110)))
    parts: list[Markup] = []
    for place, text in zip(axes.y_ticks, tick_texts(axes.y_ticks), strict=True):
        y = float(axes.y(place))
        parts.append(element("line", x1=axes.left, x2=axes.right, y1=y, y2=y))
        parts.append(element("text", text, x=axes.left - 7, y=y + 4, class_="end"))
    for place, text in zip(xs, tick_texts(xs), strict=True):
        x = float(axes.x(place))
        # A label in the corner would be cut off by the edge of the paper.
        anchor = "end" if x > axes.right - 14 else "mid"
        parts.append(element("line", x1=x, x2=x, y1=axes.bottom, y2=axes.bottom + 4, class_="tick"))
        parts.append(element("text", text, x=min(x, axes.right), y=axes.bottom + 17, class_=anchor))
    if frame.x_label:
        middle = (axes.left + axes.right) / 2
        parts.append(element("text", frame.x_label, x=middle, y=axes.bottom + 32, class_="mid"))
    return element("g", *parts, class_="grid", aria_hidden="true")


def _places(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _stroke(line: Line, axes: Axes) -> Markup:
    x, y = axes.x(line.x), axes.y(line.y)
    if len(x) == 1:
        return element("circle", cx=float(x[0]), cy=float(y[0]), r=3, class_=f"dot {line.css}")
    return element("path", d=f"M{_places(x, y)}", class_=f"line {line.css}{' faint' if line.faint else ''}")


def _band(line: Line, axes: Axes) -> Markup | None:
    if line.low is None or line.high is None or len(line.x) < 2:
        return None
    x = axes.x(line.x)
    there, back = _places(x, axes.y(line.high)), _places(x[::-1], axes.y(line.low)[::-1])
    return element("path", d=f"M{there} {back}Z", class_=f"band {line.css}")


def _threshold(axes: Axes, value: float | None) -> Markup | None:
    if value is None:
        return None
    y = float(axes.y(value))
    stroke = element("line", x1=axes.left, x2=axes.right, y1=y, y2=y)
    return element("g", stroke, element("text", human(value), x=axes.left + 5, y=y - 5), class_="threshold")


def _readouts(lines: Sequence[Line], axes: Axes, frame: Frame) -> Markup:
    """Invisible columns; the one that is pointed at shows a hairline, dots, and the values."""
    wide = (axes.right - axes.left) / (frame.readouts - 1)
    columns: list[Markup] = []
    for place in np.linspace(*axes.x_range, frame.readouts).tolist():
        here = [(line, float(np.interp(place, line.x, line.y))) for line in lines if line.x[0] <= place <= line.x[-1]]
        if here:
            text = f"{human(place)} {frame.x_label or 'env steps'}"
            columns.append(_readout(float(axes.x(place)), wide, text, here, axes))
    return element("g", *columns, aria_hidden="true")


def _readout(x: float, wide: float, place: str, here: Sequence[tuple[Line, float]], axes: Axes) -> Markup:
    left = x > (axes.left + axes.right) / 2
    at = x - 8 if left else x + 8
    texts = [element("tspan", place, x=at, y=axes.top + 12, class_="muted")]
    dots: list[Markup] = []
    for number, (line, value) in enumerate(here, 1):
        label = f"{line.label} {human(value)}" if len(here) > 1 else human(value)
        texts.append(element("tspan", label, x=at, y=axes.top + 12 + number * LINE_HEIGHT, class_=line.css))
        y = float(axes.y(value))
        if axes.top - 2 <= y <= axes.bottom + 2:
            dots.append(element("circle", cx=x, cy=y, r=3.5, class_=f"dot {line.css}"))
    hit = element("rect", x=x - wide / 2, y=axes.top, width=wide, height=axes.bottom - axes.top)
    hairline = element("line", x1=x, x2=x, y1=axes.top, y2=axes.bottom)
    tip = element("g", hairline, *dots, element("text", *texts, class_="end" if left else None), class_="tip")
    return element("g", hit, tip, class_="read")


def _described(lines: Sequence[Line], frame: Frame) -> str:
    """What a reader who cannot see the chart is told."""
    ends = [f"{line.label} from {human(float(line.y[0]))} to {human(float(line.y[-1]))}" for line in lines]
    return f"{frame.title} over {frame.x_label or 'env steps'}: {'; '.join(ends)}"


def key_mark(color: int) -> Markup:
    """A dash in a line's colour."""
    return element("i", class_=f"key {css_color(color)}")


def legend(lines: Sequence[Line]) -> Markup:
    """Names and colours of the lines that are not faint; nothing for a single one."""
    named = [line for line in lines if not line.faint]
    if len(named) < 2:
        return Markup("")
    return element("ul", *(element("li", key_mark(line.color), line.label) for line in named), class_="legend")

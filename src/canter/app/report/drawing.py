"""Drawing for reports: axis labels and short numbers, HTML elements, and charts as SVG.

Markup is built by nested calls; everything that is not `Markup` is escaped. Colours come from the
page's style sheet.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

_SI_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"
COLORS = 7
"""Colours in the style sheet: classes `c0`, `c1`, ..."""
MAX_POINTS = 400
"""Points of a line; a longer line is downsampled."""
LINE_HEIGHT = 15.0
BAR_HEIGHT = 26.0
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_VOID = frozenset({"meta", "br", "img", "rect", "line", "path", "circle"})
"""Elements without content, written `<br/>`, which is valid in HTML and SVG."""


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`, in steps of 1, 2 or 5 x 10^k."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_texts(values: list[float]) -> list[str]:
    """Return labels of ticks in one common unit, with as many digits as they need to differ."""
    largest = max(map(abs, values), default=0.0)
    step = min((b - a for a, b in itertools.pairwise(values)), default=largest)
    if 0 < largest < 1e-3:
        return [_with_minus(f"{value:.0e}".replace("e-0", "e-")) if value else "0" for value in values]
    scale, unit = _si_unit(largest)
    if step < scale / 100:  # in that unit they would look alike
        scale = 1.0
        unit = ""
    digits = max(0, -math.floor(math.log10(step / scale) + 1e-9)) if step > 0 else 0
    return [_with_minus(f"{value / scale:,.{digits}f}{unit}") if value else "0" for value in values]


def format_si(value: float | None, digits: int = 4) -> str:
    """Return a number in about `digits` digits: 0.00012, 487.3, 1,024, 3.2 M; a dash for None."""
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return _with_minus(f"{value}")
    size = abs(value)
    if size < 1e-3:
        return _with_minus(f"{value:.{digits - 2}e}".replace("e-0", "e-"))
    scale, unit = _si_unit(size)
    if unit:
        return _with_minus(f"{value / scale:,.{digits}g}{unit}")
    if float(value).is_integer() or size >= 10 ** (digits - 1):
        return _with_minus(f"{value:,.0f}")
    return _with_minus(f"{value:.{digits}g}")


def _si_unit(size: float) -> tuple[float, str]:
    """Return the divisor and the suffix for numbers of this size."""
    for scale, unit in _SI_UNITS:
        if size >= max(scale, 1e4):
            return scale, f"{THIN}{unit}"
    return 1.0, ""


def _with_minus(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


class Markup(str):
    """Text that is markup already and needs no escaping."""

    __slots__ = ()


def escape(content: object) -> Markup:
    """Return content as markup: names of runs and values of settings may contain anything."""
    if isinstance(content, Markup):
        return content
    # File names may contain bytes that are not valid text.
    text = str(content).encode("utf-8", "replace").decode()
    return Markup(html.escape(_CONTROL.sub("\ufffd", text)))


def join(children: Iterable[object]) -> Markup:
    """Return the markup of all children in sequence, without those that are None."""
    return Markup("".join(escape(child) for child in children if child is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element; attributes that are None are left out.

    `class_` becomes `class`, `stroke_width` becomes `stroke-width`.
    """
    head = name
    for key, value in attributes.items():
        if value is not None:
            head += f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
    return Markup(f"<{head}/>" if name in _VOID else f"<{head}>{join(children)}</{name}>")


def _attribute(value: object) -> Markup:
    # A tenth of a pixel is enough, and pages stay small.
    return Markup(f"{value:.1f}".removesuffix(".0")) if isinstance(value, float) else escape(value)


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    faint: bool = False
    """Drawn thin behind the others and left out of the legend, e.g. one of several runs."""
    low: np.ndarray | None = None
    """Lower edge of the band around the curve."""
    high: np.ndarray | None = None
    """Upper edge of the band around the curve."""

    @property
    def css(self) -> str:
        """Class of its colour."""
        return css_color(self.color)


@dataclass(frozen=True)
class Frame:
    """Size and axes of a chart."""

    title: str
    width: float
    height: float
    x_label: str = ""
    """Label below the x axis; empty leaves no space for it."""
    threshold: float | None = None
    """Value marked by a dashed line."""
    floor: float = -math.inf
    """Lowest possible end of the y axis; lower values are cut off."""
    readouts: int = 48
    """Positions at which pointing shows the values."""


@dataclass(frozen=True)
class Axes:
    """Mapping from values to positions in the drawing."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    y_ticks: list[float]

    def x(self, value: np.ndarray | float) -> np.ndarray:
        """Return the horizontal position."""
        low, high = self.x_range
        return self.left + (np.asarray(value) - low) / (high - low) * (self.right - self.left)

    def y(self, value: np.ndarray | float) -> np.ndarray:
        """Return the vertical position, clipped far outside of the drawing."""
        low, high = self.y_range
        return self.bottom - np.clip((np.asarray(value) - low) / (high - low), -9, 9) * (self.bottom - self.top)


def drawing(width: float, height: float, label: str, *content: Markup | None, class_: str = "chart") -> Markup:
    """Return a drawing of that size; `label` describes it for readers who cannot see it."""
    box = f"0 0 {width:g} {height:g}"
    return element("svg", *content, class_=class_, viewBox=box, role="img", aria_label=label)


def line_chart(lines: Sequence[Line], frame: Frame) -> Markup:
    """Return a chart of lines over a common x axis; pointing at it shows the values there."""
    lines = [downsample(line) for line in lines if len(line.x)]
    if not lines:
        return Markup("")
    axes = _axes(lines, frame)
    prominent = [line for line in lines if not line.faint]
    bands = [_band(line, axes) for line in lines]
    strokes = [_stroke(line, axes) for line in sorted(lines, key=lambda line: not line.faint)]
    parts = [
        _grid(axes, frame),
        _clipped([*bands, *strokes], axes),
        _threshold(axes, frame.threshold),
        _readouts(prominent, axes, frame),
    ]
    return drawing(frame.width, frame.height, _description(prominent, frame), *parts)


def stacked_bar(parts: Sequence[tuple[str, float]], width: float) -> Markup:
    """Return a bar of the parts of a whole, each in its colour and with its share if it fits."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup("")
    pieces: list[Markup] = []
    left = 0.0
    for index, (label, value) in enumerate(parts):
        share = value / total
        length = share * width
        tip = element("title", f"{label}: {share:.1%}")
        text = element("text", f"{share:.0%}", x=left + length / 2, y=BAR_HEIGHT / 2 + 4, class_="on")
        # One pixel of background separates the pieces.
        rectangle = element("rect", x=left, y=0, width=max(length - 1, 0.5), height=BAR_HEIGHT)
        color = css_color(index)
        pieces.append(element("g", tip, rectangle, text if length > 36 else None, class_=f"part {color}"))
        left += length
    shares = ", ".join(f"{label} {value / total:.0%}" for label, value in parts)
    return drawing(width, BAR_HEIGHT, f"Shares: {shares}", *pieces, class_="bar")


def legend(lines: Sequence[Line]) -> Markup:
    """Return names and colours of the lines that are not faint; nothing for a single one."""
    named = [line for line in lines if not line.faint]
    if len(named) < 2:
        return Markup("")
    return element("ul", *(element("li", key_mark(line.color), line.label) for line in named), class_="legend")


def key_mark(color: int) -> Markup:
    """Return a dash in the colour of a line."""
    return element("i", class_=f"key {css_color(color)}")


def css_color(number: int) -> str:
    """Return the class of a colour; colours repeat after `COLORS`."""
    return f"c{number % COLORS}"


def downsample(line: Line) -> Line:
    """Return the line with at most `MAX_POINTS` points: means of neighbours, and the last point."""
    if len(line.x) <= MAX_POINTS:
        return line
    edges = np.unique(np.linspace(0, len(line.x) - 1, MAX_POINTS).astype(int))

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.add.reduceat(values[:-1], edges[:-1])
        return np.append(sums / np.diff(edges), values[-1])

    low = None if line.low is None else mean(line.low)
    high = None if line.high is None else mean(line.high)
    return replace(line, x=mean(line.x), y=mean(line.y), low=low, high=high)


def _axes(lines: Sequence[Line], frame: Frame) -> Axes:
    """Return axes that show all lines and the threshold."""
    ys = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    if frame.threshold is not None:
        ys.append(np.array([frame.threshold]))
    low = min(float(y.min()) for y in ys)
    high = max(float(y.max()) for y in ys)
    if high > frame.floor:
        low = max(low, frame.floor)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # If all values are positive and zero is near, the axis begins at zero.
    y_range = (0.0 if 0 <= low < 0.4 * high else low - pad, high + pad)
    start = min(float(line.x[0]) for line in lines)
    end = max(float(line.x[-1]) for line in lines)
    if 0 <= start < 0.1 * end:
        start = 0.0
    y_ticks = ticks(*y_range, max(4, round(frame.height / 60)))
    return Axes(
        left=10.0 + 6.6 * max(map(len, tick_texts(y_ticks))),
        right=frame.width - 12,
        top=12.0,
        bottom=frame.height - (36 if frame.x_label else 22),
        x_range=(start, end if end > start else start + 1),
        y_range=y_range,
        y_ticks=y_ticks,
    )


def _clipped(content: Sequence[Markup | None], axes: Axes) -> Markup:
    """Return the content, cut off outside of the axes as a nested svg is."""
    x = axes.left
    y = axes.top - 2
    width = axes.right - axes.left + 3
    height = axes.bottom - axes.top + 4
    box = f"{x:.1f} {y:.1f} {width:.1f} {height:.1f}"
    return element("svg", *content, x=x, y=y, width=width, height=height, viewBox=box)


def _grid(axes: Axes, frame: Frame) -> Markup:
    x_ticks = ticks(*axes.x_range, max(3, round((axes.right - axes.left) / 110)))
    parts: list[Markup] = []
    for value, text in zip(axes.y_ticks, tick_texts(axes.y_ticks), strict=True):
        y = float(axes.y(value))
        parts.append(element("line", x1=axes.left, x2=axes.right, y1=y, y2=y))
        parts.append(element("text", text, x=axes.left - 7, y=y + 4, class_="end"))
    for value, text in zip(x_ticks, tick_texts(x_ticks), strict=True):
        x = float(axes.x(value))
        # A centred label in the corner would be cut off by the edge of the drawing.
        anchor = "end" if x > axes.right - 14 else "mid"
        parts.append(element("line", x1=x, x2=x, y1=axes.bottom, y2=axes.bottom + 4, class_="tick"))
        parts.append(element("text", text, x=min(x, axes.right), y=axes.bottom + 17, class_=anchor))
    if frame.x_label:
        middle = (axes.left + axes.right) / 2
        parts.append(element("text", frame.x_label, x=middle, y=axes.bottom + 32, class_="mid"))
    return element("g", *parts, class_="grid", aria_hidden="true")


def points(x: Iterable[float], y: Iterable[float]) -> str:
    """Return the points of a path, for its attribute `d`."""
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _stroke(line: Line, axes: Axes) -> Markup:
    x = axes.x(line.x)
    y = axes.y(line.y)
    if len(x) == 1:
        return element("circle", cx=float(x[0]), cy=float(y[0]), r=3, class_=f"dot {line.css}")
    return element("path", d=f"M{points(x, y)}", class_=f"line {line.css}{' faint' if line.faint else ''}")


def _band(line: Line, axes: Axes) -> Markup | None:
    if line.low is None or line.high is None or len(line.x) < 2:
        return None
    x = axes.x(line.x)
    forward = points(x, axes.y(line.high))
    back = points(x[::-1], axes.y(line.low)[::-1])
    return element("path", d=f"M{forward} {back}Z", class_=f"band {line.css}")


def _threshold(axes: Axes, value: float | None) -> Markup | None:
    if value is None:
        return None
    y = float(axes.y(value))
    stroke = element("line", x1=axes.left, x2=axes.right, y1=y, y2=y)
    return element("g", stroke, element("text", format_si(value), x=axes.left + 5, y=y - 5), class_="threshold")


def _readouts(lines: Sequence[Line], axes: Axes, frame: Frame) -> Markup:
    """Return invisible columns; pointing at one shows a vertical line, dots and the values."""
    width = (axes.right - axes.left) / (frame.readouts - 1)
    columns: list[Markup] = []
    for x in np.linspace(*axes.x_range, frame.readouts).tolist():
        values = [(line, float(np.interp(x, line.x, line.y))) for line in lines if line.x[0] <= x <= line.x[-1]]
        if values:
            text = f"{format_si(x)} {frame.x_label or 'env steps'}"
            columns.append(_readout(float(axes.x(x)), width, text, values, axes))
    return element("g", *columns, aria_hidden="true")


def _readout(x: float, width: float, x_text: str, values: Sequence[tuple[Line, float]], axes: Axes) -> Markup:
    on_left = x > (axes.left + axes.right) / 2
    text_x = x - 8 if on_left else x + 8
    texts = [element("tspan", x_text, x=text_x, y=axes.top + 12, class_="muted")]
    dots: list[Markup] = []
    for number, (line, value) in enumerate(values, 1):
        label = f"{line.label} {format_si(value)}" if len(values) > 1 else format_si(value)
        texts.append(element("tspan", label, x=text_x, y=axes.top + 12 + number * LINE_HEIGHT, class_=line.css))
        y = float(axes.y(value))
        if axes.top - 2 <= y <= axes.bottom + 2:
            dots.append(element("circle", cx=x, cy=y, r=3.5, class_=f"dot {line.css}"))
    target = element("rect", x=x - width / 2, y=axes.top, width=width, height=axes.bottom - axes.top)
    hairline = element("line", x1=x, x2=x, y1=axes.top, y2=axes.bottom)
    tip = element("g", hairline, *dots, element("text", *texts, class_="end" if on_left else None), class_="tip")
    return element("g", target, tip, class_="read")


def _description(lines: Sequence[Line], frame: Frame) -> str:
    """Return a description for readers who cannot see the chart."""
    ends = [f"{line.label} from {format_si(float(line.y[0]))} to {format_si(float(line.y[-1]))}" for line in lines]
    return f"{frame.title} over {frame.x_label or 'env steps'}: {'; '.join(ends)}"

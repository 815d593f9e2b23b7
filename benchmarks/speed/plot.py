"""Draws the results of `gpu.py` as SVG: bars of steps per second, and cost against the number of environments.

    python benchmarks/speed/plot.py

Writes `speed-bars.svg` and `speed-scale.svg` to docs/_static/.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from canter.app.report.drawing import Markup, element, format_si

RESULTS = Path(__file__).parent / "results" / "gpu.json"
TARGET = Path(__file__).parents[2] / "docs" / "_static"
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #1c2026 }
.end { text-anchor: end } .mid { text-anchor: middle } .muted { fill: #667080 } .title { font-weight: 650 }
.own { fill: #0072b2; stroke: #0072b2 } .peer { fill: #97a1b0; stroke: #97a1b0 } .grid { stroke: #e4e7ec }
path.own, path.peer { fill: none; stroke-width: 2 } rect { stroke: none }
text.own, text.peer { stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7ec } .muted { fill: #97a1b0 } .grid { stroke: #2b313a }
  .own { fill: #56b4e9; stroke: #56b4e9 } .peer { fill: #667080; stroke: #667080 }
}
"""
WIDTH = 720


def picture(height: float, title: str, *children: object) -> Markup:
    """A file of its own, with its colours for light and dark pages."""
    return element(
        "svg",
        element("style", Markup(STYLE)),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_label=title,
    )


def own(name: str) -> str:
    return "own" if name.startswith("Canter") else "peer"


def bars(widths: dict[str, Any]) -> Markup:
    """Steps per second of every trainer, a group of bars for each width of the networks."""
    parts, y, left, room = [], 8.0, 190.0, 390.0
    most = max(result.get("steps_per_second", 0) for results in widths.values() for result in results.values())
    for width, results in widths.items():
        parts.append(element("text", f"two networks {width}, steps per second", x=8, y=y + 16, class_="title"))
        y += 28
        good = {name: result for name, result in results.items() if "error" not in result}
        for name, result in sorted(good.items(), key=lambda item: -item[1]["steps_per_second"]):
            rate = result["steps_per_second"]
            length = room * rate / most
            parts.append(element("text", name, x=left - 8, y=y + 15, class_="end"))
            parts.append(element("rect", x=left, y=y + 2, width=round(length, 1), height=18, class_=own(name)))
            label = f"{format_si(rate, 3)}  ({result['iteration_ms']:.1f} ms)"
            parts.append(element("text", label, x=round(left + length + 6, 1), y=y + 15, class_="muted"))
            y += 24
        y += 14
    return picture(y, "Steps per second of PPO trainers", *parts)


class LogAxes:
    """Logarithmic axes over all points of some curves, in a frame on the paper."""

    def __init__(self, curves: dict[str, list[tuple[float, float]]], left: float, top: float) -> None:
        xs, ys = zip(*(point for curve in curves.values() for point in curve), strict=True)
        self.x_range, self.y_range = (min(xs), max(xs)), (min(ys), max(ys))
        self.left, self.right, self.top, self.bottom = left, left + 270, top, top + 220

    def x(self, value: float) -> float:
        """Horizontal place."""
        return self.left + share(value, *self.x_range) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Vertical place."""
        return self.bottom - share(value, *self.y_range) * (self.bottom - self.top)


def share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, 0 to 1, by its logarithm."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def curve_chart(curves: dict[str, list[tuple[float, float]]], title: str, left: float) -> list[Markup]:
    """Straight is proportional: both axes are logarithmic."""
    axes = LogAxes(curves, left, 56)
    parts = [element("text", title, x=left, y=22, class_="title")]
    powers = range(math.ceil(math.log10(axes.y_range[0])), math.floor(math.log10(axes.y_range[1])) + 1)
    for value in (10.0**power for power in powers):
        y = round(axes.y(value), 1)
        parts.append(element("line", x1=axes.left, x2=axes.right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", format_si(value), x=axes.left - 6, y=y + 4, class_="end muted"))
    for value in sorted({point[0] for curve in curves.values() for point in curve})[::2]:
        parts.append(
            element("text", format_si(value), x=round(axes.x(value), 1), y=axes.bottom + 20, class_="mid muted")
        )
    for name, curve in curves.items():
        places = [(round(axes.x(x), 1), round(axes.y(y), 1)) for x, y in curve]
        parts.append(element("path", d="M" + " ".join(f"{x},{y}" for x, y in places), class_=own(name)))
        parts += [element("circle", cx=x, cy=y, r=3, class_=own(name)) for x, y in places]
        parts.append(element("text", name, x=places[-1][0], y=places[-1][1] - 8, class_=f"end {own(name)}"))
    return parts


def scale(results: dict[str, Any]) -> Markup:
    """Milliseconds and megabytes of an iteration against the number of environments."""
    parts: list[Markup] = []
    titles = {"iteration_ms": "ms per iteration", "peak_memory_mb": "peak memory, MB"}
    for column, (key, title) in enumerate(titles.items()):
        curves = {
            name: [
                (float(size), float(one[key])) for size, one in sizes.items() if isinstance(one, dict) and key in one
            ]
            for name, sizes in results.items()
        }
        curves = {name: curve for name, curve in curves.items() if curve}
        if curves:
            parts += curve_chart(curves, f"{title}, by environments", 60 + 360 * column)
    return picture(306, "Cost of an iteration against the number of environments", *parts)


def main() -> None:
    document = json.loads(RESULTS.read_text())["parts"]
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, part, draw in (("speed-bars", "speed", bars), ("speed-scale", "scale", scale)):
        if "error" not in document.get(part, {"error": "not run"}):
            (TARGET / f"{name}.svg").write_text(draw(document[part]) + "\n")
            print(TARGET / f"{name}.svg")


if __name__ == "__main__":
    main()

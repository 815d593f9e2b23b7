"""Draw learning curves as SVG, for the other scripts here."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT, EDGE = 640, 300, 50
BLUE, GREY = "#2563eb", "#9ca3af"

Curve = Sequence[tuple[float, float]]


def chart(curves: dict[tuple[str, str], list[Curve]], across: range, up: range, label: str, left: int = 0) -> str:
    """Return a chart with a line for each curve, keyed by name and colour; the ranges are the ticks of both axes."""
    x = lambda value: left + EDGE + (WIDTH - EDGE - 26) * (value - across[0]) / (across[-1] - across[0])  # noqa: E731
    y = lambda value: HEIGHT - EDGE - (HEIGHT - EDGE - 14) * (value - up[0]) / (up[-1] - up[0])  # noqa: E731
    lines = []
    for value in across:
        lines.append(f'<text x="{x(value):.0f}" y="{HEIGHT - 30}" text-anchor="middle">{value:,}</text>')
    for value in up:
        lines.append(f'<path d="M{left + EDGE} {y(value):.1f}H{left + WIDTH - 26}" stroke="#8884"/>')
        lines.append(f'<text x="{left + EDGE - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,}</text>')
    for number, ((name, colour), several) in enumerate(curves.items()):
        for curve in several:
            seen = [(a, min(max(b, up[0]), up[-1])) for a, b in curve if a <= across[-1]]
            points = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in seen)
            lines.append(f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        row = HEIGHT - EDGE - 12 - 18 * number
        lines.append(f'<text x="{left + WIDTH - 36}" y="{row}" text-anchor="end" fill="{colour}">{name}</text>')
    lines.append(f'<text x="{left + WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    return "\n".join(lines)


def svg(*charts: str) -> str:
    """Return charts side by side; each is drawn `WIDTH` to the left of the next."""
    size = f"{WIDTH * len(charts)} {HEIGHT}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12"'
    return f'{head} fill="#888">\n{chr(10).join(charts)}\n</svg>\n'

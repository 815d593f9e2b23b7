"""Draw `docs/_static/learning-curves.svg`: the curves of the leaderboard, one panel for each of its rows.

    python docs/pictures/learning.py

The line is the mean over seeds, the band their range; read from `benchmarks/learning/results`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from curves import BLUE

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "learning"))

from table import algorithm_of, documents  # noqa: E402

PICTURE = Path(__file__).parents[1] / "_static" / "learning-curves.svg"
COLUMNS, WIDTH, HEIGHT = 4, 240, 150
LEFT, TOP, RIGHT, BOTTOM = 48, 26, 12, 22


def panel(document: dict[str, Any], left: int, top: int) -> str:
    """Return one panel with axes from the first to the last step and over the range of returns."""
    curves = [[point for point in run["curve"] if point[1] is not None] for run in document["runs"]]
    steps = np.linspace(max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves), 40)
    returns = np.array([np.interp(steps, *np.array(curve, dtype=float).T[:2]) for curve in curves])
    low, high = float(returns.min()), float(returns.max())
    x = left + LEFT + (WIDTH - LEFT - RIGHT) * steps / steps[-1]
    y = lambda values: top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (values - low) / (high - low or 1)  # noqa: E731

    def line(values: np.ndarray, backwards: bool = False) -> str:
        points = [f"{a:.0f} {b:.0f}" for a, b in zip(x, y(values), strict=True)]
        return "L".join(points[::-1] if backwards else points)

    band = line(returns.max(0)) + "L" + line(returns.min(0), backwards=True)
    seeds = f"{len(curves)} seed{'s' * (len(curves) > 1)}"
    title = f"{document['env'].removeprefix('tensor:')}, {algorithm_of(document)}, {seeds}"
    return "\n".join(
        [
            f'<text x="{left + LEFT}" y="{top + 16}">{title}</text>',
            f'<path d="M{band}Z" fill="{BLUE}" opacity="0.2"/>',
            f'<path d="M{line(returns.mean(0))}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>',
            f'<text x="{left + LEFT - 4}" y="{y(high) + 4:.0f}" text-anchor="end">{high:,.0f}</text>',
            f'<text x="{left + LEFT - 4}" y="{y(low) + 4:.0f}" text-anchor="end">{low:,.0f}</text>',
            f'<text x="{left + WIDTH - RIGHT}" y="{top + HEIGHT - 6}" text-anchor="end">{steps[-1] / 1e6:.2g} M</text>',
        ]
    )


def main() -> None:
    rows = documents()
    panels = [panel(row, WIDTH * (i % COLUMNS), HEIGHT * (i // COLUMNS)) for i, row in enumerate(rows)]
    size = f"{WIDTH * COLUMNS} {HEIGHT * -(-len(rows) // COLUMNS)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="10"'
    PICTURE.write_text(f'{head} fill="#888">\n{chr(10).join(panels)}\n</svg>\n')


if __name__ == "__main__":
    main()

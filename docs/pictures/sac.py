"""Draw `docs/_static/sac-curves.svg`: SAC and PPO on Pendulum-v1, by steps and by seconds.

    python docs/pictures/sac.py

Each seed is a line, read from `benchmarks/learning/results/sac`: evaluations without noise.
"""

from __future__ import annotations

import json
from pathlib import Path

from curves import BLUE, GREY, WIDTH, Curve, chart, svg

PICTURE = Path(__file__).parents[1] / "_static" / "sac-curves.svg"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "learning" / "results" / "sac"


def curves(by_seconds: bool) -> dict[tuple[str, str], list[Curve]]:
    """Return the curves of all seeds, by label and colour."""
    found: dict[tuple[str, str], list[Curve]] = {}
    for label, preset in ((("SAC", BLUE), "Pendulum-sac"), (("PPO", GREY), "Pendulum")):
        runs = json.loads((RESULTS / f"Pendulum-v1-{preset}.json").read_text())["runs"]
        at = 2 if by_seconds else 0
        found[label] = [[(point[at], point[1]) for point in run["curve"]] for run in runs]
    return found


if __name__ == "__main__":
    up = range(-1600, 1, 400)
    by_steps = chart(curves(by_seconds=False), range(0, 120_001, 20_000), up, "steps")
    by_seconds = chart(curves(by_seconds=True), range(0, 81, 10), up, "seconds", left=WIDTH)
    PICTURE.write_text(svg(by_steps, by_seconds))

"""Draw `docs/_static/report.png` and `report-comparison.png`: reports of real runs.

python docs/pictures/report.py          needs Chromium; trains CartPole-v1 six times unless an earlier call did
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from canter.app.report import write_report

STATIC = Path(__file__).parents[1] / "_static"
WIDTH = 1200
SETTINGS = {"preset": [], "short-sighted": ["--algorithm.gamma", "0.9"]}
SEEDS = (1, 2, 3)
CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def main() -> None:
    folder = Path(tempfile.gettempdir()) / "canter-report-picture"
    runs = {name: [folder / f"{name}-{seed}" for seed in SEEDS] for name in SETTINGS}
    for name, flags in SETTINGS.items():
        for seed, path in zip(SEEDS, runs[name], strict=True):
            if not path.exists():
                train(path, seed, flags)
    STATIC.mkdir(exist_ok=True)
    picture(runs["preset"][:1], STATIC / "report.png", height=1430)
    picture([path for paths in runs.values() for path in paths], STATIC / "report-comparison.png", height=1180)


def train(path: Path, seed: int, flags: list[str]) -> None:
    place = ["--run-dir", str(path.parent), "--name", path.name, "--seed", str(seed), "--console", "quiet"]
    subprocess.run([sys.executable, "-m", "canter", "train", "CartPole-v1", *place, *flags], check=True)


def picture(paths: list[Path], target: Path, height: int) -> None:
    """Write the upper part of a report as a PNG."""
    with tempfile.TemporaryDirectory() as scratch:
        page = write_report(paths, Path(scratch) / "report.html")
        shot = Path(scratch) / "shot.png"
        size = (f"--window-size={WIDTH},{height}", f"--screenshot={shot}", f"--user-data-dir={scratch}/profile")
        subprocess.run([*CHROMIUM, *size, page.as_uri()], check=True, capture_output=True)
        Image.open(shot).convert("RGB").save(target, optimize=True)


if __name__ == "__main__":
    main()

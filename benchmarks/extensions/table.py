"""Print the results of `run.py` as the tables of docs/algorithms.

python benchmarks/extensions/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"


def row(name: str, study: dict[str, Any]) -> str:
    """One study: how many runs reached the goal, when, and how symmetric the policies became."""
    runs = study["runs"]
    reached = [run["steps_to_goal"] for run in runs if run["steps_to_goal"] is not None]
    steps = ", ".join(f"{steps / 1000:.0f}k" for steps in reached) or "never"
    cells = [name, f"{len(reached)} of {len(runs)}", steps]
    if "asymmetry" in runs[0]:
        cells.append(f"{median(run['asymmetry'] for run in runs):.2g}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Both tables."""
    for name, further in (("rnd", ""), ("symmetry", " asymmetry (median) |")):
        document = json.loads((RESULTS / f"{name}.json").read_text())
        print(f"\n| study | reached its goal | after steps |{further}")
        print("|" + " --- |" * (4 if further else 3))
        print("\n".join(row(study, entry) for study, entry in document.items()))


if __name__ == "__main__":
    main()

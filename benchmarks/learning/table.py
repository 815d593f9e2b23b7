"""Print the leaderboard: what `run.py`, `agents.py` and `sac.py` recorded, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from canter.functional.statistics import bootstrap_interval, interquartile_mean

RESULTS = Path(__file__).parent / "results"
HEAD = (
    "| task | algorithm | steps | evaluation: mean; IQM (95 %) | training: mean; IQM (95 %) | seeds "
    "| goal, reached by | minutes | machine | date |"
)


def summary(values: list[float]) -> str:
    """Return the mean over seeds, the interquartile mean and its bootstrap interval."""
    scores = np.array(values)
    low, high = bootstrap_interval(scores)
    digits = 0 if abs(scores.mean()) >= 40 else 1
    numbers = [f"{value:,.{digits}f}" for value in (scores.mean(), interquartile_mean(scores), low, high)]
    if len(values) < 3:
        return numbers[0]
    return "{}; {} ({} to {})".format(*numbers)


def algorithm_of(document: dict[str, Any]) -> str:
    """Return the name of the algorithm, with the size of SAC's networks."""
    preset = document.get("preset", "")
    if "-sac" not in preset:
        return "PPO"
    return "SAC, large" if preset.endswith("-large") else "SAC"


def row(document: dict[str, Any], machines: list[str]) -> str:
    """Return the line of one file; a machine is named by its letter in `machines`."""
    runs = document["runs"]
    if document["machine"] not in machines:
        machines.append(document["machine"])
    seconds = [run["seconds"] for run in runs if run.get("seconds")]
    goal = document["threshold"]
    reached = sum(run["steps_to_threshold"] is not None for run in runs)
    cells = (
        document["env"],
        algorithm_of(document),
        f"{runs[0].get('env_steps') or document['config']['total_steps']:,}",
        summary([run["evaluation_return"] for run in runs]),
        summary([run["training_return"] for run in runs]),
        str(len(runs)),
        "-" if goal is None else f"{goal:,g}: {reached}",
        f"{median(seconds) / 60:.1f}" if seconds else "-",
        chr(ord("A") + machines.index(document["machine"])),
        document["date"],
    )
    return f"| {' | '.join(cells)} |"


def documents() -> list[dict[str, Any]]:
    """Return the recorded tasks, sorted by task and algorithm."""
    found = [json.loads(path.read_text()) for path in [*RESULTS.glob("*.json"), *RESULTS.glob("sac/*-sac*.json")]]
    rows = [document for document in found if "threshold" in document]
    return sorted(rows, key=lambda document: (document["env"], algorithm_of(document), len(document["command"])))


if __name__ == "__main__":
    machines: list[str] = []
    print(HEAD)
    print("|" + " --- |" * (HEAD.count("|") - 1))
    for document in documents():
        print(row(document, machines))
    print("\nMachines: " + "; ".join(f"{chr(ord('A') + number)}, {name}" for number, name in enumerate(machines)) + ".")

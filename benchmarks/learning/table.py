"""Prints the results of `run.py` as a Markdown table."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"


def row(document: dict[str, Any]) -> str:
    training = [run["training_return"] for run in document["runs"]]
    evaluation = [run["evaluation_return"] for run in document["runs"]]
    reached = sum(run["steps_to_threshold"] is not None for run in document["runs"])
    steps = f"{document['config']['total_steps']:,}"
    seeds = ", ".join(f"{value:,.0f}" for value in training)
    return (
        f"| {document['env']} | {steps} | {mean(training):,.0f} | {mean(evaluation):,.0f} | {seeds} "
        f"| {document['threshold']:,} | {reached} of {len(training)} |"
    )


if __name__ == "__main__":
    print("| task | steps | training return | evaluation return | training return by seed | goal | reached by |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        if "threshold" in document:  # one of `run.py`
            print(row(document))

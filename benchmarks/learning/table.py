"""Print the results of `run.py` as a Markdown table."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from canter.functional.statistics import bootstrap_interval, interquartile_mean

RESULTS = Path(__file__).parent / "results"


def row(document: dict[str, Any]) -> str:
    training = np.array([run["training_return"] for run in document["runs"]])
    evaluation = [run["evaluation_return"] for run in document["runs"]]
    reached = sum(run["steps_to_threshold"] is not None for run in document["runs"])
    low, high = bootstrap_interval(training)
    cells = (
        document["env"],
        f"{document['config']['total_steps']:,}",
        f"{training.mean():,.0f} of {len(training)}",
        f"{interquartile_mean(training):,.0f} ({low:,.0f} to {high:,.0f})",
        f"{training.min():,.0f} to {training.max():,.0f}",
        f"{mean(evaluation):,.0f}",
        f"{document['threshold']:,}",
        f"{reached} of {len(training)}",
    )
    return f"| {' | '.join(cells)} |"


HEAD = "| task | steps | mean of seeds | interquartile mean, 95 % | range | evaluation, mean | goal | reached by |"

if __name__ == "__main__":
    print(HEAD)
    print("|" + " --- |" * (HEAD.count("|") - 1))
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        if "threshold" in document:  # one of `run.py`
            print(row(document))

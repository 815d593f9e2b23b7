"""Logs of healthy and faulty runs that the tests read."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jobs import RULES, Job, read_outcome
from judge import diagnose_outcome
from single import ALL

from faults import HEALTHY

STORED = Path(__file__).parents[2] / "tests/algorithms/doctor/streams.json.gz"
KEPT = ("total_steps", "env.num_envs", "env.finite_horizon", "success.", "until.", "self_play.", "algorithm.")


def store(folders: list[Path], jobs_of: Callable[[str], Iterable[Job]]) -> None:
    """Write one healthy run of each task and preset, and one faulty run of each rule, with what rules read.

    Logs in the file of which there is no newer run are kept.
    """
    source = "".join(path.read_text() for path in RULES.glob("*.py"))
    metrics = set(re.findall(r'"((?:[a-z_]+/)?[a-z_]+)"', source))

    def shorten(outcome: dict[str, Any], title: str) -> dict[str, Any]:
        settings = {k: x for k, x in outcome["settings"].items() if k.startswith(KEPT) and x not in (None, {}, [])}
        rows = [
            {
                name: float(f"{x:.4g}") if isinstance(x, float) else x
                for name, x in row.items()
                if name in metrics or name.startswith("optim/learning_rate")
            }
            for row in outcome["rows"]
        ]
        return {"name": title, "settings": settings, "rows": rows}

    content: dict[str, Any] = {"faulty": {}, "healthy": []}
    stored: set[tuple[str, str]] = set()
    for stage in ("report", "fit", "presets", "single"):
        for job in jobs_of(stage):
            outcome = read_outcome(folders, job)
            if outcome is None or "rows" not in outcome:
                continue
            if job.fault in (HEALTHY, "preset"):
                if (job.task, job.fault) not in stored:
                    stored.add((job.task, job.fault))
                    content["healthy"].append(shorten(outcome, job.name))
                continue
            found = diagnose_outcome(job, outcome).at
            for rule in ALL[job.fault].rules:
                if rule in found and rule not in content["faulty"]:
                    content["faulty"][rule] = shorten(outcome, job.name)
    before = json.loads(gzip.decompress(STORED.read_bytes()))
    content["faulty"] = before["faulty"] | content["faulty"]
    new = {re.sub(r"-\d+$", "", run["name"]) for run in content["healthy"]}
    content["healthy"] += [run for run in before["healthy"] if re.sub(r"-\d+$", "", run["name"]) not in new]
    STORED.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))

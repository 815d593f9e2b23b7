"""Draw `docs/_static/doctor-GROUP.svg`: for each rule of `canter doctor` the metric that shows its fault.

    python docs/pictures/doctor.py

Faulty runs are blue, a healthy run of the task grey, the threshold dashed; read from the logs of the doctor's tests.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from curves import BLUE, GREY

from canter.algorithms.doctor.amp import AMP_RULES
from canter.algorithms.doctor.findings import Evidence, Rule, Signals
from canter.algorithms.doctor.ppo import PPO_RULES
from canter.algorithms.doctor.sac import SAC_RULES
from canter.algorithms.doctor.task import TASK_RULES

ROOT = Path(__file__).parents[2]
STREAMS = json.loads(gzip.decompress((ROOT / "tests/algorithms/doctor/streams.json.gz").read_bytes()))
COLUMNS, WIDTH, HEIGHT = 4, 240, 130
LEFT, TOP, RIGHT, BOTTOM = 44, 38, 12, 14
OTHER_METRICS = {
    "warm_up": "return",
    "few_updates": "return",
    "narrow_support": "value/mean",
    "noisy_rate": "optim/learning_rate/model",
}
"""Metrics of rules whose evidence is not in the log."""


def groups() -> dict[str, list[Rule]]:
    """Return the rules of each picture."""
    by_group = {name: rules + PPO_RULES.groups[name] for name, rules in TASK_RULES.groups.items()}
    sac = [rule for rules in SAC_RULES.groups.values() for rule in rules]
    return by_group | {"sac": sac, "amp": AMP_RULES.groups["settings"]}


def evidence_of(rule: Rule, stream: dict[str, Any]) -> Evidence | None:
    """Return the last evidence of a rule in a run."""
    for end in range(len(stream["rows"]), 3, -1):
        finding = rule(Signals(stream["settings"], stream["rows"][:end]))
        if finding is not None:
            return finding.evidence[0]
    return None


def curve(stream: dict[str, Any], metric: str) -> np.ndarray:
    """Return completed fractions and values `[2, rows]`."""
    points = [(row["env_steps"], row[metric]) for row in stream["rows"] if row.get(metric) is not None]
    return np.array(points, dtype=float).T.reshape(2, -1) / [[stream["settings"]["total_steps"]], [1.0]]


def panel(rule: Rule, left: int, top: int) -> str:
    """Return the panel of one rule."""
    name = rule.__name__
    stream = STREAMS["faulty"][name]
    evidence = evidence_of(rule, stream)
    metric = OTHER_METRICS.get(name, "" if evidence is None else evidence.metric)
    task = stream["name"].split("-")[0]
    healthy = next((run for run in STREAMS["healthy"] if run["name"].startswith(task)), None)
    faulty = curve(stream, metric)
    values = list(faulty[1])
    if evidence is not None and metric == evidence.metric:
        values.append(evidence.threshold)
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1.0, high + 1.0

    def path(points: np.ndarray, style: str) -> str:
        x = left + LEFT + (WIDTH - LEFT - RIGHT) * points[0].clip(0.0, 1.0)
        y = top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (points[1].clip(low, high) - low) / (high - low)
        line = "L".join(f"{a:.0f} {b:.0f}" for a, b in zip(x, y, strict=True))
        return f'<path d="M{line}" fill="none" {style}/>'

    lines = [f'<text x="{left + LEFT}" y="{top + 16}">{name}</text>']
    lines.append(f'<text x="{left + LEFT}" y="{top + 30}" font-size="9">{metric}, {task}</text>')
    if healthy is not None and curve(healthy, metric).size:
        lines.append(path(curve(healthy, metric), f'stroke="{GREY}"'))
    lines.append(path(faulty, f'stroke="{BLUE}" stroke-width="1.5"'))
    if len(values) > faulty.shape[1]:
        limit = np.array([[0.0, 1.0], [values[-1]] * 2])
        lines.append(path(limit, 'stroke="#dc2626" stroke-dasharray="4 3"'))
    for value, at in ((high, top + TOP + 4), (low, top + HEIGHT - BOTTOM + 4)):
        lines.append(f'<text x="{left + LEFT - 4}" y="{at}" text-anchor="end" font-size="9">{value:.3g}</text>')
    return "\n".join(lines)


def picture(rules: Iterable[Rule]) -> str:
    """Return the panels of some rules as SVG."""
    known = [rule for rule in rules if rule.__name__ in STREAMS["faulty"]]
    panels = [panel(rule, WIDTH * (i % COLUMNS), HEIGHT * (i // COLUMNS)) for i, rule in enumerate(known)]
    size = f"{WIDTH * COLUMNS} {HEIGHT * -(-len(panels) // COLUMNS)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11"'
    return f'{head} fill="#888">\n{chr(10).join(panels)}\n</svg>\n'


if __name__ == "__main__":
    for group, rules in groups().items():
        (ROOT / f"docs/_static/doctor-{group}.svg").write_text(picture(rules))

"""The diagnosis of a stored run, finished or running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canter.algorithms.base import report_spec_for
from canter.algorithms.doctor.findings import Finding, Signals, diagnose_signals
from canter.algorithms.doctor.task import TASK_RULES
from canter.app.experiments.session import TrainingResult, program
from canter.config import TrainConfig
from canter.core.plain import with_current_names
from canter.core.registry import UserError
from canter.runs.metrics import METRICS, read_rows
from canter.runs.records import CONFIG, RUNS, find_run, read_settings


def diagnose(run: str | Path | TrainingResult, *, run_dir: str | Path = RUNS) -> list[Finding]:
    """Return at most three findings about a run, the cause first; [] if it is healthy.

    `run` is a run's folder, its name, `latest`, or the result of `canter.train`.

        for finding in canter.diagnose("latest"):
            print(finding.title, finding.flags)
    """
    if isinstance(run, TrainingResult):
        if run.path is None:
            raise UserError("diagnose: this run has no folder; read report.findings in on_iteration instead")
        run = run.path
    path = find_run(str(run), Path(run_dir))
    signals = read_signals(path)
    rules = report_spec_for(signals.setting("algorithm.kind")).rules
    return diagnose_signals(signals, (TASK_RULES, *rules))


def read_signals(path: Path) -> Signals:
    """Return the settings of a run and the rows of its log; raise UserError if it has none."""
    rows = list(read_rows(path / METRICS))
    if not rows:
        raise UserError(f"{path}: no metrics to diagnose; {METRICS} is missing, empty or has no readable row")
    return Signals(read_settings(path / CONFIG, _with_current_names), rows)


def _with_current_names(content: Any) -> Any:
    try:
        return with_current_names(content, TrainConfig)
    except (TypeError, ValueError):
        return content


def format_findings(findings: list[Finding], path: Path) -> str:
    """Return findings as text, one paragraph each, or that there are none."""
    if not findings:
        return f"{path}: nothing found"
    paragraphs = []
    for finding in findings:
        lines = [finding.title, *(f"  evidence  {evidence}" for evidence in finding.evidence)]
        lines += [f"  why       {finding.why}", f"  change    {finding.flags or finding.advice}"]
        if finding.flags:
            lines.append(f"  try it    {program()} doctor {path} --try")
        paragraphs.append("\n".join([*lines, f"  more      docs/doctor.md#{finding.anchor}"]))
    return "\n\n".join(paragraphs)


def findings_json(findings: list[Finding], path: Path) -> str:
    """Return findings as JSON."""
    return json.dumps({"run": str(path), "findings": [finding.plain() for finding in findings]}, indent=1)

"""The diagnosis of a stored run, finished or running."""

from __future__ import annotations

import json
from pathlib import Path

from canter.algorithms.doctor.findings import Finding
from canter.app.experiments.session import TrainingResult, program
from canter.app.report.data import findings_of
from canter.core.registry import UserError
from canter.runs.records import RUNS, find_run


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
    return findings_of(find_run(str(run), Path(run_dir)))


def format_findings(findings: list[Finding], run: Path | None = None) -> str:
    """Return findings as text, one paragraph each, or that there are none; `run` is theirs, None before a run."""
    if not findings:
        return "nothing found" if run is None else f"{run}: nothing found"
    paragraphs = []
    for finding in findings:
        lines = [finding.title, *(f"  evidence  {evidence}" for evidence in finding.evidence)]
        lines += [f"  why       {finding.why}", f"  change    {finding.flags or finding.advice}"]
        if finding.flags and run is not None:
            lines.append(f"  try it    {program()} doctor {run} --try")
        paragraphs.append("\n".join([*lines, f"  more      docs/doctor.md#{finding.anchor}"]))
    return "\n\n".join(paragraphs)


def findings_json(findings: list[Finding], path: Path) -> str:
    """Return findings as JSON."""
    return json.dumps({"run": str(path), "findings": [finding.plain() for finding in findings]}, indent=1)

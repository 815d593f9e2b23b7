"""The findings of `canter doctor` about a stored run."""

from __future__ import annotations

from pathlib import Path

from canter.algorithms.base import report_spec_for
from canter.algorithms.doctor.findings import Finding, Signals, diagnose_signals
from canter.algorithms.doctor.task import TASK_RULES
from canter.app.report.data import with_known_names
from canter.core.registry import UserError
from canter.runs.metrics import METRICS, read_rows
from canter.runs.records import CONFIG, read_settings


def findings_of(path: Path) -> list[Finding]:
    """Return the findings about a run, finished or running; raise UserError if it has no metrics."""
    rows = list(read_rows(path / METRICS))
    if not rows:
        raise UserError(f"{path}: no metrics to diagnose; {METRICS} is missing, empty or has no readable row")
    signals = Signals(read_settings(path / CONFIG, with_known_names), rows)
    return diagnose_signals(signals, (TASK_RULES, *report_spec_for(signals.setting("algorithm.kind")).rules))

"""What the doctor found in the runs of the benchmark, and whether its first change repaired them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import PRESETS, Job, read_outcome
from single import ALL
from tasks import FIT_PRESETS, FIT_SEEDS, REPORT_PRESETS, REPORT_SEEDS

from canter.algorithms.base import report_spec_for
from canter.algorithms.doctor.findings import Signals, diagnose_signals
from canter.algorithms.doctor.task import TASK_RULES
from faults import FAULTS, HEALTHY

HERE = Path(__file__).parent
LOOK = "doctor/"
"""Prefix of metrics of the rows at which a running run is diagnosed."""
EFFECT = 0.9
"""Share of the healthy gain over an untrained policy from which a fault has no effect, or is repaired."""
EARLY = 0.15
HEALTHY_RUNS = (HEALTHY, *PRESETS)
"""Kinds of runs in which any finding is a false alarm."""


@dataclass
class Diagnosis:
    """Rules that were found in a run."""

    at: dict[str, float] = field(default_factory=dict)
    """Fraction of the run at which each was found first."""
    change: dict[str, Any] = field(default_factory=dict)
    """First change that was suggested when the cause was named."""
    named: float | None = None
    """Fraction of the run at which the cause was named; None if never."""
    wrong_first: bool = False
    """Another rule was found at an earlier look."""


def diagnose_outcome(job: Job, outcome: dict[str, Any]) -> Diagnosis:
    """Diagnose a run as it was while it trained: at each look, with the rows up to there."""
    diagnosis = Diagnosis()
    fault = ALL.get(job.fault, FAULTS[HEALTHY])
    if "refused" in outcome and fault.refused:
        return Diagnosis({"refused": 0.0}, {}, 0.0)
    if "rows" not in outcome:
        return diagnosis
    rows = outcome["rows"]
    settings = outcome["settings"]
    tables = (TASK_RULES, *report_spec_for(settings["algorithm.kind"]).rules)
    for end, row in enumerate(rows, 1):
        if end < len(rows) and not any(name.startswith(LOOK) for name in row):
            continue
        findings = diagnose_signals(Signals(settings, rows[:end]), tables)
        fraction = row["env_steps"] / settings["total_steps"]
        right = any(finding.rule in fault.rules for finding in findings)
        if right and diagnosis.named is None:
            diagnosis.named = fraction
            diagnosis.wrong_first = bool(diagnosis.at)
            diagnosis.change = next((dict(finding.change) for finding in findings if finding.change), {})
        for finding in findings:
            diagnosis.at.setdefault(finding.rule, round(fraction, 3))
    return diagnosis


def repair_of(job: Job, folders: list[Path]) -> dict[str, Any]:
    """Return the first change that was suggested for a fault that a setting can repair; {} if there is none."""
    if not FAULTS[job.fault].repair:
        return {}
    outcome = read_outcome(folders, job)
    return {} if outcome is None else diagnose_outcome(job, outcome).change


class Table:
    """Diagnoses and returns of a set of runs, by fault and task."""

    def __init__(self, jobs: list[Job], folders: list[Path]) -> None:
        self.runs: dict[tuple[str, str], list[tuple[Job, dict[str, Any], Diagnosis]]] = defaultdict(list)
        for job in jobs:
            outcome = read_outcome(folders, job)
            if outcome is not None:
                self.runs[job.fault, job.task].append((job, outcome, diagnose_outcome(job, outcome)))

    def score(self, task: str, outcome: dict[str, Any] | None) -> float | None:
        """Return the gain over an untrained policy as a share of the healthy runs' mean gain; None if unknown."""
        healthy = [outcome for _, outcome, _ in self.runs.get((HEALTHY, task), []) if "last" in outcome]
        if not healthy or outcome is None:
            return None
        if "last" not in outcome:
            return 0.0
        first = statistics.mean(outcome["first"] for outcome in healthy)
        last = statistics.mean(outcome["last"] for outcome in healthy)
        return (outcome["last"] - first) / (last - first)

    def harms(self, fault: str, task: str) -> bool:
        """Return whether a fault has an effect: its runs reach on average less than 90 % of the healthy gain."""
        scores = [self.score(task, outcome) for _, outcome, _ in self.runs.get((fault, task), [])]
        known = [score for score in scores if score is not None]
        return not known or statistics.mean(known) < EFFECT


def show_runs(table: Table) -> None:
    """Print each run: score, and what was found when."""
    for (fault, task), runs in table.runs.items():
        for job, outcome, diagnosis in runs:
            score = table.score(task, outcome)
            mark = "" if fault in HEALTHY_RUNS else ("ok  " if diagnosis.named is not None else "MISS")
            mark = mark or ("ALARM" if diagnosis.at else "quiet")
            mark += " (no effect)" if fault not in HEALTHY_RUNS and not table.harms(fault, task) else ""
            shown = "?" if score is None else f"{score:.2f}"
            failed = outcome.get("failed", "")
            print(
                f"{mark:16} {fault:20} {task:26} {job.seed:4} score {shown:6} {diagnosis.at} "
                f"{diagnosis.change} {failed}"
            )


def judge_fit(jobs: list[Job], folders: list[Path]) -> None:
    """Print what was found in the runs for thresholds."""
    jobs = [job for job in jobs if job.fault != "preset" or (job.task in FIT_PRESETS and job.seed in FIT_SEEDS)]
    table = Table(jobs, folders)
    show_runs(table)
    print(json.dumps(summary_of(table), indent=1))


def judge_report(jobs: list[Job], folders: list[Path], *, some: bool = False) -> None:
    """Print what was found in the reported runs and the table of docs/doctor.md, and write results.json.

    With `some`, these are runs of some faults that were trained again after a change of their rules.
    """
    jobs = [job for job in jobs if job.fault != "preset" or (job.task in REPORT_PRESETS and job.seed in REPORT_SEEDS)]
    table = Table(jobs, folders)
    show_runs(table)
    repairs = repairs_of(table, folders)
    summary = summary_of(table) | ({} if some else repair_summary(table, repairs))
    print(json.dumps(summary, indent=1))
    runs = {
        f"{job.fault} | {job.task} | {job.seed}": {
            "score": rounded(table.score(task, outcome)),
            "found": diagnosis.at,
            "named_at": rounded(diagnosis.named),
            "change": diagnosis.change,
            "restored": rounded(repairs.get(job)),
        }
        for (_, task), runs in table.runs.items()
        for job, outcome, diagnosis in runs
    }
    sections = {"summary": summary, "runs": runs}
    write_results(**{"again": sections} if some else sections)
    print(markdown(table, repairs))


def judge_whole(jobs: list[Job], folders: list[Path]) -> None:
    """Print what was found in healthy runs of presets with their whole budgets, and add it to results.json."""
    table = Table(jobs, folders)
    show_runs(table)
    runs = {
        f"{job.task} | {job.seed}": {"return": last_return(outcome["rows"]), "found": diagnosis.at}
        for group in table.runs.values()
        for job, outcome, diagnosis in group
        if "rows" in outcome
    }
    alarms = sum(bool(run["found"]) for run in runs.values())
    print(
        f"{alarms} of {len(runs)} healthy runs with a false alarm; {len(jobs) - len(runs)} runs failed or are missing"
    )
    write_results(whole={"healthy_runs": len(runs), "false_alarms": alarms, "runs": runs})


def last_return(rows: list[dict[str, Any]]) -> float:
    """Return the mean return of the last 100 episodes in a log."""
    return next(row["return"] for row in reversed(rows) if "return" in row)


def write_results(**sections: Any) -> None:
    """Replace sections of results.json."""
    path = HERE / "results.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | sections, indent=1) + "\n")


def rounded(value: float | None) -> float | None:
    """Return three digits."""
    return None if value is None else round(value, 3)


def repairs_of(table: Table, folders: list[Path]) -> dict[Job, float | None]:
    """Return the scores of the runs with the first change, by the job of the faulty run; None if there is no change.

    Runs of a fault without effect, and of one that no setting repairs, are left out.
    """
    scores: dict[Job, float | None] = {}
    for (fault, task), runs in table.runs.items():
        if FAULTS.get(fault, FAULTS[HEALTHY]).repair and table.harms(fault, task):
            for job, _, diagnosis in runs:
                changed = Job(job.task, job.fault, job.seed, diagnosis.change)
                outcome = read_outcome(folders, changed) if diagnosis.change else None
                scores[job] = table.score(task, outcome)
    return scores


def repair_summary(table: Table, repairs: dict[Job, float | None]) -> dict[str, Any]:
    """Return how many runs and how many pairs of fault and task were restored.

    A fault of the environment is repaired by removing it, which leaves the healthy run: such a run counts as
    restored in `named_or_restored_runs` if the fault was named, and not at all in the other counts.
    """
    cases: dict[tuple[str, str], list[float]] = defaultdict(list)
    for job, score in repairs.items():
        cases[job.fault, job.task].append(score or 0.0)
    named = [
        diagnosis.named is not None
        for (fault, task), runs in table.runs.items()
        if fault not in HEALTHY_RUNS and not FAULTS[fault].repair | FAULTS[fault].refused
        if table.harms(fault, task)
        for _, _, diagnosis in runs
    ]
    restored = sum((score or 0.0) >= EFFECT for score in repairs.values())
    healthy = [
        score
        for (fault, task), runs in table.runs.items()
        if fault == HEALTHY
        for _, outcome, _ in runs
        if (score := table.score(task, outcome)) is not None
    ]
    return {
        "repairable_runs": len(repairs),
        "restored_runs": restored,
        "repairable_cases": len(cases),
        "restored_cases": sum(statistics.mean(scores) >= EFFECT for scores in cases.values()),
        "unrepairable_runs": len(named),
        "named_unrepairable_runs": sum(named),
        "named_or_restored_runs": f"{restored + sum(named)} of {len(repairs) + len(named)}",
        "healthy_runs_with_that_score": f"{sum(score >= EFFECT for score in healthy)} of {len(healthy)}",
    }


def summary_of(table: Table) -> dict[str, Any]:
    """Return recall, false alarms and when faults were found."""
    healthy = [run for (fault, _), runs in table.runs.items() if fault in HEALTHY_RUNS for run in runs]
    quiet = [not diagnosis.at for _, outcome, diagnosis in healthy if "rows" in outcome]
    named: list[float | None] = []
    refused = 0
    without: list[float | None] = []
    for (fault, task), runs in table.runs.items():
        if fault in HEALTHY_RUNS:
            continue
        if FAULTS[fault].refused:
            refused += sum(d.named is not None for _, _, d in runs)
        else:
            (named if table.harms(fault, task) else without).extend(d.named for _, _, d in runs)
    found = [at for at in named if at is not None]
    return {
        "healthy_runs": len(quiet),
        "false_alarms": len(quiet) - sum(quiet),
        "faulty_runs": len(named),
        "found": len(found),
        "recall": rounded(len(found) / max(len(named), 1)),
        "found_before_15_percent": rounded(sum(at < EARLY for at in found) / max(len(named), 1)),
        "median_fraction_of_budget": rounded(statistics.median(found)) if found else None,
        "refused_before_the_start": refused,
        "runs_without_effect": len(without),
        "found_without_effect": sum(at is not None for at in without),
    }


def markdown(table: Table, repairs: dict[Job, float | None]) -> str:
    """Return a table of faults and tasks: found of effective runs, and restored of those that a setting repairs."""
    tasks = list(dict.fromkeys(task for fault, task in table.runs if fault == HEALTHY))
    lines = [f"| planted fault | {' | '.join(tasks)} | restored |", "| --- " * (len(tasks) + 2) + "|"]
    for fault, planted in FAULTS.items():
        if fault == HEALTHY:
            continue
        cells = []
        for task in tasks:
            runs = table.runs.get((fault, task), [])
            count = f"{sum(diagnosis.named is not None for _, _, diagnosis in runs)} of {len(runs)}"
            if not runs:
                count = "-"
            elif planted.refused:
                count = "refused" if all(diagnosis.named == 0.0 for _, _, diagnosis in runs) else count
            elif not table.harms(fault, task):
                count = f"({count})"
            cells.append(count)
        tried = [score for job, score in repairs.items() if job.fault == fault]
        restored = f"{sum((score or 0.0) >= EFFECT for score in tried)} of {len(tried)}" if tried else "-"
        lines.append(f"| {fault} | {' | '.join(cells)} | {restored} |")
    return "\n".join(lines) + "\n"

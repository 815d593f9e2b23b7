"""The diagnosis of a stored run, finished or running, and trials of the changes that it advises.

A trial continues copies of the run with and without a change, and compares their returns. The run
itself is only read. Its newest checkpoint is copied to a new folder for each copy; a run that is
nearly over, or whose change does not fit the checkpoint, is tried from its start.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from canter.algorithms.base import plan_of
from canter.algorithms.doctor.findings import Finding
from canter.app.experiments.folders import numbered_names, open_run, stored_config
from canter.app.experiments.session import TrainingResult, program
from canter.app.experiments.settings import with_overrides
from canter.app.report.data import findings_of
from canter.config import TrainConfig
from canter.core.registry import UserError
from canter.core.seeding import PURPOSES, derive_seed
from canter.core.storage.checkpoint import CheckpointCorrupt
from canter.core.storage.validity import Mismatch
from canter.functional.statistics import MeanDifference, welch_difference
from canter.runs.metrics import METRICS, read_last_row
from canter.runs.records import CONFIG, RECORD, RUNS, find_run
from canter.runs.run_folder import CHECKPOINTS, RunFolder
from canter.training.progress import UntilConfig
from canter.training.trainer import Trainer

SEEDS = 3
SHARE = 0.1
"""Share of the run that a try takes by default."""
NEARLY_OVER = 0.8
"""Fraction of the run from which a try begins at the start."""
COPIED = (CONFIG, RECORD, METRICS)


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


@dataclass(frozen=True)
class Trial:
    """Returns with and without a change, of several seeds of the noise."""

    finding: Finding
    iterations: int
    without: list[float]
    changed: list[float]
    difference: MeanDifference | None
    """Changed minus without; None if there is no spread."""
    go_on: str
    """Command that continues with the change."""

    def __str__(self) -> str:
        means = [sum(values) / len(values) for values in (self.without, self.changed)]
        text = f"{self.finding.flags}\n  return after {self.iterations} iterations, {len(self.changed)} seeds: "
        text += f"{means[1]:.4g} with the change, {means[0]:.4g} without"
        better = means[1] > means[0]
        if self.difference is not None:
            found = self.difference
            text += f"; difference {found.difference:.4g}, 95 % interval {found.low:.4g} to {found.high:.4g} (Welch)"
            better = found.low > 0
        advice = f"To go on with it: {self.go_on}" if better else "The change is not shown to help"
        return f"{text}\n  {advice}"


def try_change(path: Path, finding: Finding, iterations: int | None = None, seeds: int = SEEDS) -> Trial:
    """Continue a run with and without the change of a finding; return both returns.

    `iterations` is by default a tenth of the run's.
    """
    if not finding.change:
        raise UserError(f"{finding.title}: no setting to try; {finding.advice}")
    stored = stored_config(path)
    changed = with_overrides(stored, finding.change)
    total = stored.total_steps
    rollout = plan_of(stored.algorithm).horizon * stored.env.num_envs
    if iterations is None:
        iterations = 20 if total is None else max(math.ceil(SHARE * total / rollout), 5)
    done = read_last_row(path / METRICS).get("env_steps", 0.0)
    if total is None or done + iterations * rollout < NEARLY_OVER * total:
        try:
            return _try_from_checkpoint(path, finding, stored, changed, iterations, seeds)
        except (Mismatch, CheckpointCorrupt):  # other networks than those of the checkpoint
            pass
    without, with_change = (
        [_from_start(config, iterations, seed) for seed in range(seeds)] for config in (stored, changed)
    )
    go_on = f"{program()} train --config {shlex.quote(str(path / CONFIG))} {finding.flags}"
    return Trial(finding, iterations, without, with_change, welch_difference(without, with_change), go_on)


def _try_from_checkpoint(
    path: Path, finding: Finding, stored: TrainConfig, changed: TrainConfig, iterations: int, seeds: int
) -> Trial:
    folders = (path.parent / name for name in numbered_names(f"{path.name}-try"))
    root = next(folder for folder in folders if not folder.exists())
    without: list[float] = []
    with_change: list[float] = []
    for name, config, returns in (("changed", changed, with_change), ("without", stored, without)):
        for seed in range(seeds):
            fork = _fork(path, root / f"{name}-{seed}")
            try:
                returns.append(_continue(fork, stored, config, iterations, seed))
            except (Mismatch, CheckpointCorrupt):
                shutil.rmtree(root)
                raise
    best = with_change.index(max(with_change))
    go_on = f"{program()} resume {shlex.quote(str(root / f'changed-{best}'))}"
    return Trial(finding, iterations, without, with_change, welch_difference(without, with_change), go_on)


def _fork(path: Path, fork: Path) -> Path:
    """Copy settings, record, log and the newest checkpoint of a run to a new folder."""
    steps = RunFolder(path).store.steps()
    if not steps:
        raise UserError(f"{path}: there is no checkpoint to try a change on")
    newest = RunFolder(path).store.path(max(steps))
    fork.mkdir(parents=True)
    for name in COPIED:
        shutil.copyfile(path / name, fork / name)
    shutil.copytree(newest, fork / CHECKPOINTS / newest.name)
    return fork


def _continue(fork: Path, stored: TrainConfig, config: TrainConfig, iterations: int, seed: int) -> float:
    returns: list[float | None] = []
    folder = open_run(fork, stored, config, notify=lambda text: None)  # the finding names the changed settings
    with Trainer(config, lambda report: returns.append(report.rollout_return), folder=folder) as trainer:
        # Other noise for each seed, equal with and without the change.
        for generator, purpose in zip(trainer.algorithm.generators(), PURPOSES, strict=False):
            generator.manual_seed(derive_seed(config.seed + seed + 1, purpose))
        trainer.learn(iterations)
    return _mean_of_last_half(returns, iterations)


def _from_start(config: TrainConfig, iterations: int, seed: int) -> float:
    returns: list[float | None] = []
    config = replace(config, seed=config.seed + 1 + seed, until=UntilConfig())
    with Trainer(config, lambda report: returns.append(report.rollout_return)) as trainer:
        trainer.learn(iterations)
    return _mean_of_last_half(returns, iterations)


def _mean_of_last_half(returns: list[float | None], iterations: int) -> float:
    """Return the mean of as many returns as half of the iterations, the last ones that are known."""
    known = [value for value in returns if value is not None][-max(iterations // 2, 1) :]
    if not known:
        raise UserError(f"no episode ended in {iterations} iterations: try more of them, such as --try 50")
    return sum(known) / len(known)

"""One training run of the benchmark: its settings, the run, and the file that keeps its log."""

from __future__ import annotations

import copy
import gzip
import json
import math
import re
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from single import ALL, SINGLE
from tasks import FIT_PRESETS, FIT_TASKS, GOALS, REPORT_PRESETS, REPORT_TASKS, WHOLE_PRESETS

import canter
from canter import Trainer
from canter.algorithms import doctor
from canter.app.experiments.settings import base_config, with_overrides
from canter.config import TrainConfig
from canter.config.presets import presets
from canter.core.plain import to_plain
from canter.core.registry import UserError
from canter.nn.normalizer import Normalizer
from canter.play.evaluation import evaluate
from canter.runs.records import flatten
from faults import BROKEN_ENV, FAULTS, HEALTHY, Fault, FaultyEnv

TASKS = FIT_TASKS | REPORT_TASKS
PRESETS = {"preset": FIT_PRESETS | REPORT_PRESETS, "whole preset": WHOLE_PRESETS}
"""Settings of the healthy runs of presets beside the preset's own, by kind of run."""
RULES = Path(doctor.__file__).parent
MORE_ENVS = 16
"""A broken environment is one of 16 at least."""
EVALUATIONS = 12
EVALUATED_EPISODES = 4
LAST = 0.15
"""Share of a run, at its end, whose episodes are its return."""
FIRST_EPISODES = 16
"""Episodes that show how good an untrained policy is."""


@dataclass(frozen=True)
class Job:
    """A run of a task with a fault, or of a preset; a restored one has the change of a finding, too."""

    task: str
    fault: str
    seed: int
    change: dict[str, Any] | None = field(default=None, hash=False, compare=False)

    @property
    def name(self) -> str:
        """Name of its file."""
        kind = "" if self.change is None else "+"
        return re.sub(r"[^A-Za-z0-9.+-]", "_", f"{self.task}-{self.fault}{kind}-{self.seed}")


def config_of(job: Job) -> TrainConfig:
    """Return the settings of a run."""
    if job.fault in PRESETS:
        return with_overrides(base_config(None, job.task)[0], {**PRESETS[job.fault][job.task], "seed": job.seed})
    fault = ALL[job.fault]
    config, _ = base_config(None, job.task) if job.task in presets else base_config(job.task, None)
    config = with_overrides(config, SINGLE[job.fault][1] if job.fault in SINGLE else TASKS[job.task])
    settings = {**fault.settings, "seed": job.seed}
    if fault.one_env and config.env.num_envs < MORE_ENVS:
        horizon = config.algorithm.horizon * config.env.num_envs // MORE_ENVS
        settings |= {"env.num_envs": MORE_ENVS, "algorithm.horizon": horizon}
    if "algorithm.critic_optimizer" in settings:
        section = to_plain(config.algorithm.optimizer) | settings.pop("algorithm.critic_optimizer")
        settings |= {f"algorithm.critic_optimizer.{key}": value for key, value in section.items()}
    config = with_overrides(config, settings)
    if fault.rate != 1.0:
        rate = to_plain(config.algorithm.optimizer.learning_rate)
        rate["start" if "start" in rate else "value"] *= fault.rate
        config = with_overrides(config, {"algorithm.optimizer.learning_rate": rate})
    if fault.amp:
        (section,) = to_plain(config.algorithm)["extensions"]
        config = with_overrides(config, {"algorithm.extensions": [section | fault.amp]})
    return with_overrides(config, job.change or {})


class Evaluations:
    """Evaluates every 12th of a run and notes the return in the row.

    With `lost`, the policy that is evaluated has the statistics of an untrained normaliser.
    """

    def __init__(self, config: TrainConfig, lost: bool) -> None:
        self.lost = lost
        self.env = with_overrides(config, {"env.num_envs": EVALUATED_EPISODES}).env.build("cpu")
        self.every = (config.total_steps or 0) / EVALUATIONS
        self.next = 0.0

    def __call__(self, policy: Any, row: dict[str, Any]) -> None:
        """Evaluate if it is due."""
        if row["env_steps"] < self.next:
            return
        self.next = row["env_steps"] + self.every
        policy = copy.deepcopy(policy)
        for part in policy.actor.modules():
            if self.lost and isinstance(part, Normalizer):
                part.shift.zero_()
                part.inverse_scale.fill_(1.0)
        row["eval/return"] = evaluate(policy, self.env, EVALUATED_EPISODES, seed=1).mean


def train(job: Job) -> dict[str, Any]:
    """Train; return settings, rows and returns, or the refusal."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    config = config_of(job)
    fault = ALL.get(job.fault, FAULTS[HEALTHY])
    env = None if job.fault in PRESETS else FaultyEnv(config.env.build("cpu"), fault, GOALS.get(job.task, math.inf))
    evaluated = fault.lost_statistics or job.fault == HEALTHY
    evaluations = Evaluations(config, fault.lost_statistics) if evaluated else None

    def keep(report: Any, policy: Any) -> None:
        rows.append(dict(report.row()))
        if evaluations is not None:
            evaluations(policy, rows[-1])

    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            if fault.resumed:
                config = train_and_resume(config, fault.resumed, keep, folder)
                env = None
            else:
                with Trainer(config, keep, env=env) as trainer:
                    trainer.learn()
    except UserError as error:
        return {"job": vars(job), "refused": str(error)}
    except Exception as error:  # a run that diverges ends with NaN
        return {"job": vars(job), "failed": f"{type(error).__name__}: {error}"[:300]}
    outcome = {"job": vars(job), "seconds": round(time.perf_counter() - start, 1)}
    outcome |= {} if env is None else returns_of(fault, env, rows)
    if job.change is None:
        outcome |= {"settings": dict(flatten(to_plain(config))), "rows": [shorten(row) for row in rows]}
    return outcome


def train_and_resume(config: TrainConfig, changes: dict[str, Any], keep: Any, folder: str) -> TrainConfig:
    """Train with half of the budget, then resume with the whole and other settings; return the latter."""
    assert config.total_steps is not None
    half = with_overrides(config, {"total_steps": config.total_steps // 2})
    options = {"final_evaluation": False, "console": "quiet"}
    first = canter.train(half, keep, run_dir=folder, **options)
    assert first.path is not None
    canter.resume(first.path, keep, total_steps=config.total_steps, **changes, **options)
    return with_overrides(config, changes)


def returns_of(fault: Fault, env: FaultyEnv, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the true returns of the first episodes and of those at the end."""
    if fault.lost_statistics:
        evaluations = [row["eval/return"] for row in rows if "eval/return" in row]
        last = evaluations[-int(LAST * EVALUATIONS) :]
    else:
        last = [
            x for at, i, x in env.episodes if at >= (1 - LAST) * env.steps and (not fault.one_env or i == BROKEN_ENV)
        ]
        if not last:
            last = [x for _, i, x in env.episodes if not fault.one_env or i == BROKEN_ENV][-1:]
    first = [x for _, _, x in env.episodes[:FIRST_EPISODES]]
    return {"first": sum(first) / max(len(first), 1), "last": sum(last) / max(len(last), 1)}


def shorten(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with five digits, without times."""
    return {
        name: float(f"{x:.5g}") if isinstance(x, float) else x
        for name, x in row.items()
        if x is not None and not name.startswith(("time/", "lta/", "env/")) and name not in SKIPPED
    }


SKIPPED = ("train_steps", "rollouts", "resets", "updates", "seconds", "minibatch_updates", "optim/minibatch_updates")


def write_outcome(folder: Path, job: Job) -> float:
    """Train and write the file of a run; return its seconds."""
    start = time.perf_counter()
    outcome = train(job)
    path = folder / f"{job.name}.json.gz"
    path.with_suffix(".part").write_bytes(gzip.compress(json.dumps(outcome, separators=(",", ":")).encode(), 9))
    path.with_suffix(".part").rename(path)
    return time.perf_counter() - start


def read_outcome(folders: list[Path], job: Job) -> dict[str, Any] | None:
    """Return what a run left in the first folder that has it; None if none has, or if its change was another."""
    for folder in folders:
        path = folder / f"{job.name}.json.gz"
        if path.exists():
            outcome = json.loads(gzip.decompress(path.read_bytes()))
            if outcome["job"].get("change") == job.change:
                return outcome
    return None

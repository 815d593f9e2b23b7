"""The base of searches and populations: plans whose runs vary some settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from canter.algorithms.base import plan_of
from canter.app.experiments.plans import Commands, Plan
from canter.app.experiments.settings import with_overrides
from canter.app.tuning.space import build_space, plain_values, setting_flags, setting_names
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.core.registry import UserError
from canter.core.storage.files import replace_file
from canter.envs.imports import PYTHON, allowed_imports
from canter.runs.metrics import METRICS, read_last_row
from canter.runs.records import read_record, run_status, score_value

BASE = "base.yaml"
BEST = "best.yaml"
UNREACHED = 1e6
"""Seconds that count for a run that does not reach the goal of `seconds-to:GOAL`."""


@dataclass(frozen=True)
class Job:
    """A run, up to a number of steps."""

    candidate: str
    """`trial-003`, or `base` for the base settings."""
    seed: int
    steps: int

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the run of a result in the journal."""
        name, _, steps = key.rpartition("@")
        candidate, _, seed = name.rpartition("-seed")
        return cls(candidate, int(seed), int(steps))

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.candidate}-seed{self.seed}"

    @property
    def key(self) -> str:
        """Name of the result in the journal."""
        return f"{self.name}@{self.steps}"


class TunePlan(Plan):
    """Runs that vary some settings; which ones are missing follows from a journal in the folder."""

    KIND: ClassVar[str]
    """Name of this kind of plan in messages."""
    total: int
    """Steps of a whole run."""

    def __init__(self, folder: Path, space: Mapping[str, str], config: TrainConfig) -> None:
        super().__init__(folder)
        self.config = config
        """Base settings."""
        self.dimensions = build_space(space, config)
        self.names = setting_names(dimension.key for dimension in self.dimensions)
        """Short names of the settings, by key."""
        permissions = [f"--allow-import={module}" for module in allowed_imports()]
        self.commands = Commands(folder, [*permissions, "train", "--preset", "none"], {})

    @classmethod
    def check(cls, plan: Any, config: TrainConfig) -> Any:
        """Return the settings of a plan with its ranges as numbers; raise UserError if it cannot work."""
        if config.env.id.startswith(f"{PYTHON}:"):
            raise UserError(f"{cls.KIND} trains in separate processes: pass the id of an environment, or MODULE:NAME")
        if config.total_steps is None:
            iterations = config.until.iterations or 0
            steps = iterations * plan_of(config.algorithm).horizon * config.env.num_envs or "N"
            raise UserError(f"total_steps=null: {cls.KIND} compares runs after equal steps; add --total-steps {steps}")
        dimensions = build_space(plan.space, config)
        return replace(plan, space={dimension.key: dimension.spec for dimension in dimensions})

    @abstractmethod
    def note_result(self, job: Job, score: float | None, seconds: float, return_: float | None = None) -> None:
        """Record a score, the seconds of training that it took, and the return of the policy."""

    @abstractmethod
    def start_settings(self, job: Job) -> dict[str, str]:
        """Return the texts of the settings with which a run starts, by key."""

    def start_flags(self, job: Job) -> list[str]:
        """Return the flags of `canter train` that describe a new run."""
        own = setting_flags(self.start_settings(job))
        return ["--config", str(self.folder / BASE), *own, f"--seed={job.seed}"]

    @abstractmethod
    def limits(self, job: Job) -> list[str]:
        """Return the flags with which a run starts or resumes: until which step, and with which settings."""

    @abstractmethod
    def score(self, metrics: Path, return_: float | None) -> float | None:
        """Return the score of a run from its metrics and the return of its policy."""

    def arguments(self, job: Job) -> list[str]:
        """Return the arguments of `canter` that start or resume a run."""
        self.commands.add(job.name, self.start_flags(job))
        return self.commands.arguments(job.name, *self.limits(job))

    def is_done(self, job: Job) -> bool:
        """Return whether a run was evaluated after its steps or its time limit, also by a session that was killed."""
        path = self.folder / job.name
        record = read_record(path)
        trained = read_last_row(path / METRICS).get("env_steps", 0) >= job.steps
        reached = trained or record.get("ended_by") == "until.seconds"
        return run_status(path) == "finished" and reached and record.get("score") is not None

    def record(self, job: Job, *, failed: bool) -> str:
        """Record the result of a run that has ended and return a line about it."""
        score = self.record_run(job, failed=failed)
        shown = f"{'failed' if failed else 'no score'}, see {self.folder / job.name}.log"
        if score is not None:
            shown = format_score(score)
        return f"{job.name}, {job.steps:,} steps: {shown}"

    def record_run(self, job: Job, *, failed: bool, share: float = 1.0) -> float | None:
        """Record the result of a run and return its score; `share` is its part of the seconds of its process."""
        path = self.path(job)
        return_ = None if failed else read_return(path, average=self.config.by_average)
        score = None if failed else self.score(path / METRICS, return_)
        seconds = float(read_last_row(path / METRICS).get("seconds", 0.0))
        self.note_result(job, score, seconds * share, return_)
        return score

    def path(self, job: Job) -> Path:
        """Return the folder of a run."""
        return self.folder / job.name

    # Results

    @property
    @abstractmethod
    def title(self) -> str:
        """Description of the plan in words."""

    @abstractmethod
    def finish(self) -> TuneResult:
        """Write the best settings and the report of a plan that is done."""

    @abstractmethod
    def lines(self, outcome: Any) -> list[str]:
        """Return the outcome as text."""

    def format(self, texts: Mapping[str, str]) -> str:
        """Return settings in one line."""
        return ", ".join(f"{self.names[key]} {text}" for key, text in texts.items())

    def write_best(self, texts: Mapping[str, str], lead: str) -> Path:
        """Write settings as a file for `canter train ENV --config`, below a comment, and return it."""
        file = self.folder / BEST
        config = with_overrides(self.config, plain_values(texts))
        replace_file(file, f"# {lead}\n{dump_config(config)}".encode())
        return file


@dataclass(frozen=True)
class TuneResult:
    """The result of a search or a population."""

    path: Path
    """Its folder."""
    best: Path
    """File with the best settings, for `canter train ENV --config`."""
    report: Path
    """Report as one HTML file."""
    outcome: Any
    """The winner, and the scores."""
    run: Path | None = None
    """Run of the best member of a population, for `canter.load`."""


def read_return(path: Path, *, average: bool) -> float | None:
    """Return the mean return of the policy in new episodes, or its reward rate if they do not end."""
    score = read_record(path).get("score")
    value = score_value(score, average=average)
    if value is None and isinstance(score, Mapping):
        value = score.get("reward_per_step")
    return value if value is not None else read_last_row(path / METRICS).get("lta/mean" if average else "return")


def format_score(score: float) -> str:
    """Return a score as text."""
    return "the goal was not reached" if score <= -UNREACHED else f"{score:.5g}"

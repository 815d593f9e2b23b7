"""The order of the runs of a search, `canter tune`, and what its results mean.

1. Trials are sampled in generations. All trials of a generation train up to a rung, a part of the
   steps; the best third resumes from its checkpoints and trains up to the next one.
2. Trials that reached the last rung and whose means overlap get more seeds.
3. The best of them, the finalists, and the base settings train on fresh seeds, which had no part in
   any choice before. The best mean of these is the winner.

`Search.next_runs` is a function of the trials and the results in the journal alone. So a search
that is killed, or runs with more jobs, does the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from canter.app.tuning.outcome import Outcome, outcome_lines, outcome_of, progress_of, write_winner
from canter.app.tuning.plan import UNREACHED, Job, TunePlan, TuneResult
from canter.app.tuning.study import Study, load_optuna, trial_name
from canter.config import TrainConfig
from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.runs.metrics import read_rows

SECONDS_TO = "seconds-to:"
RETURN_IN = "return-in:"
GENERATION = 12
"""Trials that are sampled and halved together."""
KEPT = 3
"""Trials of a generation for each one that goes on to the next rung."""
RUNGS = (1 / 9, 1 / 3, 1.0)
"""Shares of the steps after which trials of a generation are compared."""
FRESH = 1000
"""Distance of the fresh seeds from those of the search."""
RUNG_EPISODES = 20
"""Episodes of an evaluation at a rung below the last one; there as many as `canter train` plays."""
SEARCH_SHARE = 0.6
"""Share of a time budget after which no generation starts."""
SEEDS_SHARE = 0.75
"""Share of a time budget after which no trial gets more seeds."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How a search goes; stored in its folder."""

    trials: int | None = None
    """Settings to try; null for as many as the budget allows."""
    budget: float | None = None
    """Seconds of the whole search; null for no limit. Runs that have started end."""
    objective: str = "return"
    """Score of a run: `return`, the mean return of its policy in new episodes; `return-in:SECONDS`,
    that of its policy after so much training, if the steps are not done before; `auc`, the mean over
    its steps of the return while training; or `seconds-to:GOAL`, the seconds of training until that
    return reaches a goal, as a negative number."""
    seeds: int = 3
    """Seeds of a trial in the search, at most."""
    finalists: int = 3
    """Trials that train on fresh seeds too."""
    final_seeds: int = 5
    """Fresh seeds."""
    population: int | None = None
    """Trials that train side by side in one program; null for each in a process of its own."""
    space: dict[str, str] = field(default_factory=dict)
    """Ranges by setting."""

    def __post_init__(self) -> None:
        """Raise UserError for values out of range, and for a search without an end."""
        check_range(self, "must be at least 1", "trials", "seeds", "finalists", "final_seeds", "population")
        check_range(self, "must be above 0", "budget")
        if self.trials is None and self.budget is None:
            raise UserError("a search needs an end: --trials N, --budget 2h, or both")
        limit = self.time_limit
        if limit is not None and limit <= 0:
            raise UserError(f"objective={self.objective!r}: the seconds must be above 0")
        if self.objective not in ("return", "auc") and self.goal is None and limit is None:
            expected = "return, auc, seconds-to:GOAL or return-in:SECONDS"
            raise UserError(f"objective={self.objective!r}: expected {expected}")

    @property
    def goal(self) -> float | None:
        """The goal of the objective `seconds-to:GOAL`; None for another one."""
        return objective_number(self.objective, SECONDS_TO)

    @property
    def time_limit(self) -> float | None:
        """Seconds of training of a run with the objective `return-in:SECONDS`; None for another one."""
        return objective_number(self.objective, RETURN_IN)


class Search(TunePlan):
    """A search in its folder."""

    KIND = "a search"

    def __init__(self, folder: Path, tune: TuneConfig, config: TrainConfig) -> None:
        super().__init__(folder, tune.space, config)
        self.tune = tune
        self.study = Study(folder, self.dimensions, config.seed)
        self.spent = float(self.study.notes.get("spent", 0.0))
        self.generation_size = GENERATION
        total = config.total_steps or 0
        self.rungs = sorted({max(math.ceil(share * total), 1) for share in RUNGS})
        """Steps after which trials are compared."""
        self.total = self.rungs[-1]

    @classmethod
    def check(cls, plan: TuneConfig, config: TrainConfig) -> TuneConfig:
        """Refuse a search without Optuna too."""
        load_optuna()
        return super().check(plan, config)

    # Results

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return `score` (None if the run failed), `seconds` and `return` of a run that is done."""
        return self.study.notes.get(job.key)

    def results(self) -> dict[Job, dict[str, Any]]:
        """Return the results of all runs that are done."""
        return {Job.of_key(key): note for key, note in self.study.notes.items() if "@" in key}

    def refresh(self) -> None:
        """Read what other processes have written to the journal."""
        self.study.refresh()
        self.spent = max(self.spent, float(self.study.notes.get("spent", 0.0)))

    def score(self, metrics: Path, return_: float | None) -> float | None:
        """Return the score of a run by the objective."""
        if self.tune.goal is not None:
            return seconds_score(metrics, self.tune.goal)
        return mean_over_steps(metrics) if self.tune.objective == "auc" else return_

    def note_result(self, job: Job, score: float | None, seconds: float, return_: float | None = None) -> None:
        """Record a score, the seconds of training that it took, and the return of the policy."""
        self.study.note(job.key, {"score": score, "seconds": seconds, "return": return_})

    def add_time(self, spent: float) -> None:
        """Record the seconds of the search so far."""
        self.spent = spent
        self.study.note("spent", spent)

    def settings(self, candidate: str) -> dict[str, str]:
        """Return the texts of a candidate's settings by key."""
        return {} if candidate == "base" else self.study.trials[int(candidate.removeprefix("trial-"))]

    def settings_text(self, candidate: str) -> str:
        """Return the settings of a candidate in one line."""
        return self.format(self.settings(candidate))

    def start_settings(self, job: Job) -> dict[str, str]:
        """Return the settings of a candidate."""
        return self.settings(job.candidate)

    def limits(self, job: Job) -> list[str]:
        """Return the flags that end a run at its rung."""
        limits = ["--until.steps=null"]
        if job.steps < self.total:
            limits = [f"--until.steps={job.steps}", f"--final-episodes={RUNG_EPISODES}"]
        if self.tune.time_limit is not None:
            limits.append(f"--until.seconds={self.tune.time_limit:g}")
        return limits

    # Order of the runs

    def next_runs(self) -> list[Job]:
        """Return runs to do next, in any order; none once the search is done."""
        for first in count(0, self.generation_size):
            numbers = self.generation(first)
            if not numbers:
                break
            if jobs := self.halve(numbers):
                return jobs
        return self.more_seeds() or self.final_jobs()

    def generation(self, first: int) -> list[int]:
        """Return the numbers of the trials of a generation; sample them if it may start."""
        limit = first + self.generation_size
        if self.tune.trials is not None:
            limit = min(limit, self.tune.trials)
        if first >= len(self.study.trials) and not self._may_start(first):
            return []
        while len(self.study.trials) < limit:
            self.study.ask()
        return list(range(first, limit))

    def _may_start(self, first: int) -> bool:
        """Return whether there is time for one more generation, which may cost what the others did."""
        if self.tune.budget is None or not first:
            return True
        return self.spent * (1 + self.generation_size / first) <= SEARCH_SHARE * self.tune.budget

    def halve(self, numbers: Sequence[int]) -> list[Job]:
        """Return the missing runs of a generation at its lowest unfinished rung."""
        seed = self.config.seed
        scores: dict[int, dict[int, float | None]] = {number: {} for number in numbers}
        alive = list(numbers)
        for level, steps in enumerate(self.rungs, 1):
            jobs = [Job(trial_name(number), seed, steps) for number in alive]
            if missing := self._missing(jobs):
                return missing
            for number, job in zip(alive, jobs, strict=True):
                scores[number][steps] = self.study.notes[job.key]["score"]
            reached = self.rung_scores(steps)
            ranked = sorted((number for number in alive if number in reached), key=lambda number: -reached[number])
            alive = ranked[: math.ceil(len(numbers) / KEPT**level)] if steps < self.total else ranked
        for number in numbers:
            self.study.finish(number, scores[number], complete=self.total in scores[number])
        return []

    def _missing(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if self.result(job) is None]

    def more_seeds(self) -> list[Job]:
        """Return runs of overlapping trials on the next seed of the search."""
        if self.tune.budget is not None and self.spent > SEEDS_SHARE * self.tune.budget:
            return []
        for number in range(1, self.tune.seeds):
            jobs = [Job(name, self.config.seed + number, self.total) for name in self.contenders(number)]
            if missing := self._missing(jobs):
                return missing
        return []

    def contenders(self, seeds: int) -> list[str]:
        """Return the trials that may be the best by their first seeds, unless there is only one.

        Their mean is within two standard errors of the best one; the standard deviation over seeds
        is pooled over all leaders, and unknown as long as each has a single seed.
        """
        scores = {name: self.search_scores(name)[:seeds] for name in self.leaders(seeds)}
        if not scores:
            return []
        spread = math.inf if seeds == 1 else math.sqrt(np.mean([np.var(own, ddof=1) for own in scores.values()]))
        best = max(np.mean(own) for own in scores.values())
        near = [name for name, own in scores.items() if best - np.mean(own) <= 2 * spread * math.sqrt(2 / seeds)]
        return near if len(near) > 1 else []

    def leaders(self, seeds: int = 1) -> list[str]:
        """Return the best trials of those with so many seeds: twice as many as there will be finalists."""
        names = [trial_name(number) for number in range(len(self.study.trials))]
        found = {name: own[:seeds] for name in names if len(own := self.search_scores(name)) >= seeds}
        return sorted(found, key=lambda name: -float(np.mean(found[name])))[: 2 * self.tune.finalists]

    def search_scores(self, candidate: str) -> list[float]:
        """Return the scores of whole runs on the seeds of the search; a failed one has the lowest of all."""
        jobs = [Job(candidate, self.config.seed + i, self.total) for i in range(self.tune.seeds)]
        done = [job for job in jobs if self.result(job) is not None]
        return [] if not done or self.study.notes[done[0].key]["score"] is None else [*map(self.score_or_worst, done)]

    def score_or_worst(self, job: Job) -> float:
        """Return the score of a run that is done; the lowest one of all whole runs if it failed."""
        score = self.study.notes[job.key]["score"]
        if score is not None:
            return float(score)
        scores = [result["score"] for job, result in self.results().items() if job.steps == self.total]
        return min((score for score in scores if score is not None), default=0.0)

    def finalists(self) -> list[str]:
        """Return the base settings and the best trials by the seeds of the search."""
        leaders = self.leaders()
        leaders.sort(key=lambda name: -float(np.mean(self.search_scores(name))))
        return ["base", *leaders[: self.tune.finalists]]

    def final_jobs(self) -> list[Job]:
        """Return the missing runs of the finalists on fresh seeds."""
        names = self.finalists()
        if names == ["base"]:
            raise UserError(f"all {len(self.study.trials)} trials failed; see the files *.log in {self.folder}")
        if "final_seeds" not in self.study.notes:
            self.study.note("final_seeds", self._affordable_seeds(len(names)))
        jobs = zip(*map(self.fresh_jobs, names), strict=True)
        return self._missing([job for of_seed in jobs for job in of_seed])

    def fresh_jobs(self, candidate: str) -> list[Job]:
        """Return the runs of a finalist on the fresh seeds."""
        first = self.config.seed + FRESH
        return [Job(candidate, seed, self.total) for seed in range(first, first + self.study.notes["final_seeds"])]

    def _affordable_seeds(self, candidates: int) -> int:
        """Return the number of fresh seeds, fewer but at least two if the time budget is too short for all."""
        if self.tune.budget is None:
            return self.tune.final_seeds
        left = (self.tune.budget - self.spent) / max(self.spent, 1e-9) * self.steps_done
        return min(max(int(left / (candidates * self.total)), 2), self.tune.final_seeds)

    @property
    def halving_steps(self) -> int:
        """Transitions of all trials on the first seed."""
        trials = self.tune.trials or len(self.study.trials)
        kept = [1.0 / KEPT**level for level in range(len(self.rungs))]
        return int(trials * float(np.dot(kept, np.diff([0, *self.rungs]))))

    @property
    def steps_done(self) -> int:
        """Transitions of all runs."""
        most: dict[str, int] = {}
        for job in self.results():
            most[job.name] = max(most.get(job.name, 0), job.steps)
        return sum(most.values())

    def rung_scores(self, steps: int) -> dict[int, float]:
        """Return the scores of the trials on the first seed at a rung, without those that failed."""
        results = [self.result(job) or {"score": None} for job in self.first_jobs(steps)]
        return {number: float(each["score"]) for number, each in enumerate(results) if each["score"] is not None}

    def first_jobs(self, steps: int) -> list[Job]:
        """Return the runs of all trials on the first seed up to a rung."""
        return [Job(trial_name(number), self.config.seed, steps) for number in range(len(self.study.trials))]

    # Reports

    @property
    def title(self) -> str:
        """Description of the search in words."""
        together = f", {self.tune.population} trials side by side in a run" if self.tune.population else ""
        return f"Searching {self.config.env.id}{together}"

    def progress(self) -> dict[str, str]:
        """Return how far the search is, the best so far, the Pareto front and the time left, by name."""
        return progress_of(self)

    def finish(self) -> TuneResult:
        """Write the winner's settings and the report of a search that is done."""
        from canter.app.report.tuning import write_search_report

        outcome = outcome_of(self)
        return TuneResult(self.folder, write_winner(self, outcome), write_search_report(self, outcome), outcome)

    def lines(self, outcome: Outcome) -> list[str]:
        """Return the winner and its scores as text."""
        return outcome_lines(self, outcome)


def objective_number(objective: str, prefix: str) -> float | None:
    """Return the finite number after the prefix of an objective; None without the prefix or a number."""
    try:
        number = float(objective.removeprefix(prefix)) if objective.startswith(prefix) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def mean_over_steps(metrics: Path) -> float | None:
    """Return the area under the curve of the return, divided by its steps; None without one."""
    rows = [row for row in read_rows(metrics) if "return" in row and "env_steps" in row]
    if len(rows) < 2:
        return rows[0]["return"] if rows else None
    steps = np.array([row["env_steps"] for row in rows])
    returns = np.array([row["return"] for row in rows])
    return float(np.sum((returns[1:] + returns[:-1]) / 2 * np.diff(steps)) / (steps[-1] - steps[0]))


def seconds_score(metrics: Path, goal: float) -> float | None:
    """Return minus the seconds of training until the return reached a goal; None without a return.

    A run that did not reach it has the score of `UNREACHED` seconds, and less the further it was away.
    """
    rows = [row for row in read_rows(metrics) if row.get("return") is not None and "seconds" in row]
    reached = next((row["seconds"] for row in rows if row["return"] >= goal), None)
    if reached is not None or not rows:
        return None if reached is None else -float(reached)
    return -UNREACHED - (goal - max(row["return"] for row in rows))

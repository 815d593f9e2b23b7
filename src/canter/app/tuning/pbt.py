"""Population-based training, `canter tune --pbt`.

All members train up to a comparison, in processes. There losing members take weights, optimizer
state and statistics from leaders and change their settings; then all train on. The decisions are a
function of the seed and of the scores in the lineage alone, so a population that is killed, or runs
with more jobs, takes the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from canter.algorithms.base import plan_of
from canter.app.console.text import format_duration, format_number
from canter.app.experiments.sweep import Sweep
from canter.app.experiments.train import evaluate
from canter.app.tuning.copying import copy_learner, follows_kl, rate_key
from canter.app.tuning.exploit import PbtConfig, choose_leaders, explore
from canter.app.tuning.lineage import Change, Lineage
from canter.app.tuning.results import is_evaluated, read_return, result_line, training_seconds
from canter.app.tuning.runner import BASE, Job, read_plan, write_best, write_plan
from canter.app.tuning.space import build_space, setting_flags, setting_names
from canter.config import TrainConfig
from canter.core.plain import ConfigError, to_plain
from canter.core.registry import UserError
from canter.core.storage.validity import flatten
from canter.envs.imports import PYTHON, allowed_imports
from canter.play.evaluation import EpisodesUnfinished
from canter.runs.changes import refuse_fixed
from canter.runs.metrics import METRICS, read_last_row

PLAN = "pbt.json"
INTERVALS = 20
"""Intervals of a run by default."""
FRESH = 1000
"""Distance of the seed of the last evaluation from that of the run."""
FRESH_EPISODES = 100


class Population:
    """A population in its folder."""

    def __init__(self, folder: Path, pbt: PbtConfig, config: TrainConfig) -> None:
        self.folder = folder
        self.pbt = pbt
        self.config = config
        self.dimensions = build_space(pbt.space, config)
        self.names = setting_names(dimension.key for dimension in self.dimensions)
        """Short names of the settings, by key."""
        self.lineage = Lineage(folder)
        self.spent = self.lineage.spent
        """Seconds of work so far, over all sessions."""
        permissions = [f"--allow-import={module}" for module in allowed_imports()]
        base = [*permissions, "train", "--config", str(folder / BASE), "--preset", "none"]
        self.sweep = Sweep(folder, base, {})
        total = config.total_steps or 0
        interval = pbt.interval or max(-(-total // INTERVALS), 1)
        self.steps = [*range(interval, total - interval // 2, interval), total]
        """Steps of the comparisons, and of the whole run."""

    @property
    def total(self) -> int:
        """Steps of a whole run."""
        return self.steps[-1]

    def job(self, member: int, steps: int) -> Job:
        """Return the run of a member up to some steps."""
        return Job(f"member-{member:03}", self.config.seed + member, steps)

    def member_of(self, job: Job) -> int:
        """Return the number of the member that a run belongs to."""
        return job.seed - self.config.seed

    def path(self, member: int) -> Path:
        """Return the folder of a member's run."""
        return self.folder / self.job(member, 0).name

    # Plan, see `canter.app.tuning.runner`

    def refresh(self) -> None:
        """Read what other processes have written."""
        self.lineage.refresh()
        self.spent = max(self.spent, self.lineage.spent)

    def next_jobs(self) -> list[Job]:
        """Return the runs up to the next comparison; decide and carry out those before it."""
        for number, steps in enumerate(self.steps):
            members = range(self.pbt.members)
            if missing := [self.job(m, steps) for m in members if (m, steps) not in self.lineage.scores]:
                return missing
            if steps < self.total:
                self._compare(number, steps)
        if all(score is None for score in self.final_scores()):
            raise UserError(f"all {self.pbt.members} members failed; see {self.folder / 'member-000-seed*.log'}")
        return []

    def _compare(self, number: int, steps: int) -> None:
        """Decide what follows from a comparison, unless that is recorded, and then carry it out."""
        if len(self.lineage.rounds) <= number:
            self.lineage.add_round(steps, self.decide(number, self.scores(steps)))
        if self.lineage.copied <= number:
            for change in self.lineage.rounds[number][1]:
                self._carry_out(change, number)
            self.lineage.add("copied", round=number + 1)

    def decide(self, number: int, scores: list[float | None]) -> list[Change]:
        """Return the changes that follow from the scores of a comparison."""
        rng = np.random.default_rng(np.random.SeedSequence([self.config.seed, number + 1]))
        changes: list[Change] = []
        for loser, leader in choose_leaders(self.pbt, scores, rng).items():
            settings = self.lineage.settings(leader, number)
            changed = {part.key: explore(self.pbt, part, settings[part.key], rng) for part in self.dimensions}
            changes.append(Change(loser, leader, changed))
        return changes

    def _carry_out(self, change: Change, number: int) -> None:
        """Write a member's checkpoint with the learner of its leader."""
        key = rate_key(self.config)
        factor = 1.0
        if key in change.settings and follows_kl(self.config, key):
            factor = float(change.settings[key]) / float(self.lineage.settings(change.source, number)[key])
        copy_learner(self.path(change.source), self.path(change.member), number + 1, factor)

    def is_done(self, job: Job) -> bool:
        """Return whether a run has been trained and evaluated, also by a session that was killed."""
        return is_evaluated(self.folder / job.name, job.steps)

    def arguments(self, job: Job) -> list[str]:
        """Return the arguments of `canter` that start a run, or resume it with its present settings."""
        member = self.member_of(job)
        self.sweep.add(job.name, [*setting_flags(self.lineage.initial[member]), f"--seed={job.seed}"])
        more = [*setting_flags(self.lineage.settings(member)), "--until.steps=null"]
        if job.steps < self.total:
            more[-1:] = [f"--until.steps={job.steps}", f"--final-episodes={self.pbt.episodes}"]
        return self.sweep.arguments(job.name, *more)

    def record(self, job: Job, *, failed: bool) -> str:
        """Record the score of a run that has ended and return a line about it."""
        path = self.folder / job.name
        return_ = None if failed else read_return(path, average=self.config.by_average)
        score = return_
        if self.pbt.score != "return" and not failed:
            score = read_last_row(path / METRICS).get(self.pbt.score)
        self.note_result(job, score, training_seconds(path), return_)
        return result_line(path, job.steps, score)

    def note_result(self, job: Job, score: float | None, seconds: float, return_: float | None = None) -> None:
        """Record the score of a member at a comparison."""
        facts = {"member": self.member_of(job), "steps": job.steps, "score": score, "return": return_}
        self.lineage.add("score", **facts, seconds=seconds)

    def add_time(self, spent: float) -> None:
        """Record the seconds of work so far."""
        self.spent = spent
        self.lineage.add("spent", seconds=spent)

    # Results

    def scores(self, steps: int) -> list[float | None]:
        """Return the score of each member after some steps; None for a failed run or an unknown score."""
        return [self.lineage.scores.get((m, steps), {}).get("score") for m in range(self.pbt.members)]

    def final_scores(self) -> list[float | None]:
        """Return the score of each member at the end."""
        return self.scores(self.total)

    def settings_text(self, member: int) -> str:
        """Return the present settings of a member in one line."""
        return ", ".join(f"{self.names[key]} {text}" for key, text in self.lineage.settings(member).items())


def create_population(folder: Path, pbt: PbtConfig, config: TrainConfig) -> Population:
    """Write the plan of a new population to its folder, which is there already, and return it."""
    write_plan(folder / PLAN, pbt, config)
    population = Population(folder, pbt, config)
    rng = np.random.default_rng(np.random.SeedSequence([config.seed, 0]))
    base = flatten(to_plain(config))
    initial = [{part.key: str(base.get(part.key)) for part in population.dimensions} for _ in range(pbt.members)]
    if pbt.spread:
        for settings in initial[1:]:
            settings |= {part.key: part.at(rng.random()) for part in population.dimensions}
    population.lineage.add("start", settings=initial)
    return population


def check_population(pbt: PbtConfig, config: TrainConfig) -> PbtConfig:
    """Return the plan with its ranges as numbers; raise UserError if the population cannot train."""
    if config.env.id.startswith(f"{PYTHON}:"):
        raise UserError("a population trains in separate processes: pass the id of an environment, or MODULE:NAME")
    if config.total_steps is None:
        iterations = config.until.iterations or 0
        steps = iterations * plan_of(config.algorithm).horizon * config.env.num_envs or "N"
        raise UserError(f"total_steps=null: a population is compared after equal steps; add --total-steps {steps}")
    dimensions = build_space(pbt.space, config)
    refuse_fixed(dimension.key for dimension in dimensions)
    for dimension in dimensions:
        if follows_kl(config, dimension.key) and dimension.key != rate_key(config):
            raise ConfigError(f"space.{dimension.key} starts a rate that follows the KL, so it cannot change in a run")
    return replace(pbt, space={dimension.key: dimension.spec for dimension in dimensions})


def open_population(folder: Path) -> Population:
    """Return the population of a folder."""
    pbt, config = read_plan(folder / PLAN, PbtConfig)
    population = Population(folder, pbt, config)
    if not population.lineage.initial:
        return create_population(folder, pbt, config)  # killed before its first line
    return population


@dataclass(frozen=True)
class PbtOutcome:
    """The best member of a population at the end."""

    winner: str
    """Name of its run in the folder of the population."""
    settings: dict[str, str]
    """Texts of its last settings by key."""
    scores: dict[str, float | None]
    """Last score of each member; None for one that failed."""
    fresh: float | None
    """Mean return of the winner's policy in further episodes, which had no part in the choice; None
    if they do not end."""


def population_outcome(population: Population) -> PbtOutcome:
    """Return the outcome of a population that is done."""
    scores = population.final_scores()
    known = {member: score for member, score in enumerate(scores) if score is not None}
    winner = max(known, key=lambda member: known[member])
    path = population.path(winner)
    try:
        seed = population.config.seed + FRESH
        fresh = float(
            evaluate(path / "policies" / "final_actor.safetensors", population.config.env, FRESH_EPISODES, seed).mean
        )
    except EpisodesUnfinished:
        fresh = None
    named = {population.path(member).name: score for member, score in enumerate(scores)}
    return PbtOutcome(path.name, population.lineage.settings(winner), named, fresh)


def write_best_settings(population: Population, outcome: PbtOutcome) -> Path:
    """Write the last settings of the winner as a file for `canter train ENV --config` and return it."""
    lead = f"Last settings of {outcome.winner} of {population.folder.name}, which had others before: lineage.jsonl"
    return write_best(population, outcome.settings, lead)


def population_lines(outcome: PbtOutcome, names: Mapping[str, str]) -> list[str]:
    """Return the winner and the scores as text."""
    ranked = sorted(outcome.scores.items(), key=lambda item: np.inf if item[1] is None else -item[1])
    lines = ["Final scores: " + ", ".join(f"{name} {format_number(score)}" for name, score in ranked)]
    texts = ", ".join(f"{names[key]} {text}" for key, text in outcome.settings.items())
    lines.append(f"Best: {outcome.winner}, at the end with {texts}")
    if outcome.fresh is not None:
        lines.append(f"  mean return {format_number(outcome.fresh)} in {FRESH_EPISODES} further episodes")
    return lines


def population_progress(population: Population) -> dict[str, str]:
    """Return how far a population is, the best member so far and the time left, by name."""
    done = {steps for (_, steps) in population.lineage.scores}
    complete = [steps for steps in population.steps if None not in _known(population, steps)]
    text = f"{len(complete)} of {len(population.steps)} intervals, {population.pbt.members} members"
    state = {"progress": text}
    if done:
        steps = max(done)
        scores = {m: score for m, score in enumerate(population.scores(steps)) if score is not None}
        if scores:
            best = max(scores, key=lambda member: scores[member])
            found = f"member-{best:03} with {format_number(scores[best])} at {steps:,} steps"
            state["best"] = f"{found} ({population.settings_text(best)})"
    share = len(population.lineage.scores) / (population.pbt.members * len(population.steps))
    if share:
        state["time left"] = f"about {format_duration(population.spent * (1 / share - 1))} left"
    return state


def _known(population: Population, steps: int) -> list[Any]:
    return [population.lineage.scores.get((member, steps)) for member in range(population.pbt.members)]

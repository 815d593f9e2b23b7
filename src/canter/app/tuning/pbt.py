"""Population-based training, `canter tune --pbt`.

All members train up to a comparison, in processes. There losing members take weights, optimizer
state and statistics from leaders and change their settings; then all train on. The decisions are a
function of the seed and of the scores in the lineage alone, so a population that is killed, or runs
with more jobs, takes the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canter.algorithms.base import plan_of
from canter.app.console.text import format_duration, format_number
from canter.app.experiments.train import evaluate
from canter.app.tuning.exploit import PbtConfig, choose_leaders, explore, follows_kl, rate_key
from canter.app.tuning.lineage import Change, Lineage
from canter.app.tuning.plan import Job, TunePlan, TuneResult
from canter.app.tuning.space import setting_flags
from canter.config import TrainConfig
from canter.core.plain import ConfigError, to_plain
from canter.core.registry import UserError, nearest
from canter.core.storage.checkpoint import CheckpointStore
from canter.core.storage.validity import flatten
from canter.play.evaluation import EpisodesUnfinished
from canter.runs.changes import refuse_fixed
from canter.runs.metrics import METRICS, read_last_row, read_rows
from canter.runs.run_folder import CHECKPOINTS

INTERVALS = 20
"""Intervals of a run by default."""
FRESH = 1000
"""Distance of the seed of the last evaluation from that of the run."""
FRESH_EPISODES = 100
OWN = ("replay", "counters")
"""Parts of an algorithm's state that a member keeps."""
OWN_ENDS = ("_rng", "_state")
"""Ends of the names of further parts: random streams, and recurrent states of running episodes."""
FROM_LEADER = ("recent", "gain_and_time")
"""Counters of the run that belong to the policy: its recent episodes and rollouts."""
ROUND = "round"
"""Key of a checkpoint's identity: the comparison that wrote it."""


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


class Population(TunePlan):
    """A population in its folder."""

    KIND = "a population"

    def __init__(self, folder: Path, pbt: PbtConfig, config: TrainConfig) -> None:
        super().__init__(folder, pbt.space, config)
        self.pbt = pbt
        self.lineage = Lineage(folder)
        self.spent = self.lineage.spent
        self.total = config.total_steps or 0
        iteration = plan_of(config.algorithm).horizon * config.env.num_envs
        # A run pauses after whole iterations: comparisons without one in between would copy untrained members.
        interval = max(pbt.interval or -(-self.total // INTERVALS), iteration)
        last = self.total - max(interval // 2, iteration - 1)
        self.steps = [*range(interval, last, interval), self.total]
        """Steps of the comparisons, and of the whole run."""
        if not self.lineage.initial:
            self.lineage.add("start", settings=self._initial_settings())

    @classmethod
    def check(cls, plan: PbtConfig, config: TrainConfig) -> PbtConfig:
        """Refuse settings that cannot change in a run too."""
        plan = super().check(plan, config)
        refuse_fixed(plan.space)
        for key in plan.space:
            if follows_kl(config, key) and key != rate_key(config):
                raise ConfigError(f"space.{key} starts a rate that follows the KL, so it cannot change in a run")
        return plan

    def _initial_settings(self) -> list[dict[str, str]]:
        """Return the settings of all members at the start: those of the base, or with `spread` sampled ones."""
        rng = np.random.default_rng(np.random.SeedSequence([self.config.seed, 0]))
        base = flatten(to_plain(self.config))
        initial = [{part.key: str(base.get(part.key)) for part in self.dimensions} for _ in range(self.pbt.members)]
        if self.pbt.spread:
            for settings in initial[1:]:
                settings |= {part.key: part.at(rng.random()) for part in self.dimensions}
        return initial

    def job(self, member: int, steps: int) -> Job:
        """Return the run of a member up to some steps."""
        return Job(f"member-{member:03}", self.config.seed + member, steps)

    def member_of(self, job: Job) -> int:
        """Return the number of the member that a run belongs to."""
        return job.seed - self.config.seed

    def member_path(self, member: int) -> Path:
        """Return the folder of a member's run."""
        return self.path(self.job(member, 0))

    def refresh(self) -> None:
        """Read what other processes have written."""
        self.lineage.refresh()
        self.spent = max(self.spent, self.lineage.spent)

    def next_runs(self) -> list[Job]:
        """Return the runs up to the next comparison; decide and carry out those before it."""
        for number, steps in enumerate(self.steps):
            members = range(self.pbt.members)
            if missing := [self.job(m, steps) for m in members if (m, steps) not in self.lineage.scores]:
                return missing
            self._check_metric(steps)
            if steps < self.total:
                self._compare(number, steps)
        if all(score is None for score in self.final_scores()):
            raise UserError(f"all {self.pbt.members} members failed; see {self.folder / 'member-000-seed*.log'}")
        return []

    def _check_metric(self, steps: int) -> None:
        """Raise UserError if no member has a score after some steps because no log has the metric `pbt.score`."""
        if self.pbt.score == "return" or any(score is not None for score in self.scores(steps)):
            return
        logs = [self.member_path(member) / METRICS for member in range(self.pbt.members)]
        names = {name for log in logs for row in read_rows(log) for name in row}
        if names and self.pbt.score not in names:
            raise UserError(
                f"pbt.score={self.pbt.score}: no member logs such a metric, {nearest(self.pbt.score, names)}"
            )

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
        copy_learner(self.member_path(change.source), self.member_path(change.member), number + 1, factor)

    def start_settings(self, job: Job) -> dict[str, str]:
        """Return the settings of a member at its start."""
        return self.lineage.initial[self.member_of(job)]

    def limits(self, job: Job) -> list[str]:
        """Return the present settings of a member, and the flags that end its run at a comparison."""
        own = setting_flags(self.lineage.settings(self.member_of(job)))
        if job.steps < self.total:
            return [*own, f"--until.steps={job.steps}", f"--final-episodes={self.pbt.episodes}"]
        return [*own, "--until.steps=null"]

    def score(self, metrics: Path, return_: float | None) -> float | None:
        """Return the mean return of the policy, or the metric that the plan names."""
        return return_ if self.pbt.score == "return" else read_last_row(metrics).get(self.pbt.score)

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

    @property
    def title(self) -> str:
        """Description of the population in words."""
        return f"Training {self.pbt.members} members on {self.config.env.id}"

    def progress(self) -> dict[str, str]:
        """Return how far the population is, the best member so far and the time left, by name."""
        members = range(self.pbt.members)
        complete = [steps for steps in self.steps if all((m, steps) in self.lineage.scores for m in members)]
        state = {"progress": f"{len(complete)} of {len(self.steps)} intervals, {self.pbt.members} members"}
        steps = max((steps for _, steps in self.lineage.scores), default=self.total)
        scores = {m: score for m, score in enumerate(self.scores(steps)) if score is not None}
        if scores:
            best = max(scores, key=lambda member: scores[member])
            found = f"member-{best:03} with {format_number(scores[best])} at {steps:,} steps"
            state["best"] = f"{found} ({self.format(self.lineage.settings(best))})"
        share = len(self.lineage.scores) / (self.pbt.members * len(self.steps))
        if share:
            state["time left"] = f"about {format_duration(self.spent * (1 / share - 1))} left"
        return state

    def outcome(self) -> PbtOutcome:
        """Return the best member of a population that is done, and the scores of all."""
        scores = self.final_scores()
        known = {member: score for member, score in enumerate(scores) if score is not None}
        winner = max(known, key=lambda member: known[member])
        policy = self.member_path(winner) / "policies" / "final_actor.safetensors"
        try:
            seed = self.config.seed + FRESH
            fresh = float(evaluate(policy, self.config.env, FRESH_EPISODES, seed).mean)
        except EpisodesUnfinished:
            fresh = None
        named = {self.member_path(member).name: score for member, score in enumerate(scores)}
        return PbtOutcome(self.member_path(winner).name, self.lineage.settings(winner), named, fresh)

    def finish(self) -> TuneResult:
        """Write the winner's last settings and the report of a population that is done."""
        from canter.app.report.population import write_population_report

        outcome = self.outcome()
        lead = f"Last settings of {outcome.winner} of {self.folder.name}, which had others before: lineage.jsonl"
        best = self.write_best(outcome.settings, lead)
        report = write_population_report(self, outcome)
        return TuneResult(self.folder, best, report, outcome, self.folder / outcome.winner)

    def lines(self, outcome: PbtOutcome) -> list[str]:
        """Return the winner and the scores as text."""
        ranked = sorted(outcome.scores.items(), key=lambda item: np.inf if item[1] is None else -item[1])
        lines = ["Final scores: " + ", ".join(f"{name} {format_number(score)}" for name, score in ranked)]
        lines.append(f"Best: {outcome.winner}, at the end with {self.format(outcome.settings)}")
        if outcome.fresh is not None:
            lines.append(f"  mean return {format_number(outcome.fresh)} in {FRESH_EPISODES} further episodes")
        return lines


def copy_learner(leader: Path, member: Path, number: int, rate_factor: float = 1.0) -> None:
    """Replace the newest checkpoint of a member by one with the learner of a leader.

    Weights, optimizer state, coefficients and statistics are the leader's, with learning rates
    times a factor. Environments, random streams, replay buffer and counters stay the member's. A
    checkpoint that this comparison, `number`, has written already stays. The checkpoint is replaced
    atomically; the leader is not changed. A member may be its own leader.
    """
    store = CheckpointStore(member / CHECKPOINTS)
    if not store.steps():
        return  # it failed before its first checkpoint, and starts again
    step, own = store.load_latest()
    if own["identity"].get(ROUND) == number:
        return
    source = own if leader == member else CheckpointStore(leader / CHECKPOINTS).load_latest()[1]
    parts = source["algorithm"].items()
    learner = {name: part for name, part in parts if name not in OWN and not name.endswith(OWN_ENDS)}
    phases = learner["optimizers"].items() if rate_factor != 1.0 else ()
    for group in (group for name, phase in phases if name != "central_value" for group in phase.values()):
        group["learning_rate"] = group["learning_rate"] * rate_factor  # the central value has settings of its own
    store.save(
        step,
        {
            **own,
            "identity": {**own["identity"], ROUND: number},
            "algorithm": {**own["algorithm"], **learner},
            "run": {**own["run"], **{name: source["run"][name] for name in FROM_LEADER}},
        },
    )

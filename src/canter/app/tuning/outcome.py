"""The outcome of a search: the winner, what to expect of it, and both as text and as a settings file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from canter.app.console.text import format_duration, format_number
from canter.app.tuning.plan import format_score
from canter.app.tuning.study import trial_name
from canter.functional.statistics import mean_interval, welch_difference

if TYPE_CHECKING:  # a search writes its outcome
    from canter.app.tuning.search import Search

SHOWN_FRONT = 3
"""Points of the Pareto front in the progress line; the report has all."""


@dataclass(frozen=True)
class Cost:
    """The return of a policy, and the seconds of training that it took."""

    return_: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The winner of a search, and what to expect of it."""

    winner: str
    """`trial-003`, or `base` if no trial was better than the base settings."""
    settings: dict[str, str]
    """Texts of the winner's settings by key."""
    scores: dict[str, list[float]]
    """Scores of each finalist on the fresh seeds."""
    optimistic: float | None
    """Mean of the winner's scores on the seeds that it was chosen by; None for the base settings."""
    corrected: float
    """Expected score on a new seed. Each fresh seed is scored with the finalist that the other fresh
    seeds choose, so no seed scores its own choice."""
    costs: dict[str, Cost]
    """Return and seconds of training of every run on the first seed, by `NAME@STEPS`."""
    front: list[tuple[str, Cost]]
    """The Pareto front of these, the highest return first."""


def outcome_of(search: Search) -> Outcome:
    """Return the winner of a search that is done."""
    scores = {name: [*map(search.score_or_worst, search.fresh_jobs(name))] for name in search.finalists()}
    winner = best_mean(scores)
    own = search.search_scores(winner)
    optimistic = float(np.mean(own)) if own else None
    corrected = corrected_mean(scores)
    return Outcome(winner, search.settings(winner), scores, optimistic, corrected, costs(search), pareto_front(search))


def best_mean(scores: Mapping[str, Sequence[float]]) -> str:
    """Return the candidate with the highest mean, the first of several."""
    return max(scores, key=lambda name: float(np.mean(scores[name])))


def corrected_mean(scores: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over seeds of the score of the candidate that all other seeds choose.

    With a single seed it is the score of the best, which is optimistic.
    """
    number = len(next(iter(scores.values())))
    if number == 1:
        return max(own[0] for own in scores.values())
    chosen = [best_mean({name: np.delete(own, i).tolist() for name, own in scores.items()}) for i in range(number)]
    return float(np.mean([scores[name][i] for i, name in enumerate(chosen)]))


def write_winner(search: Search, outcome: Outcome) -> Path:
    """Write the winner's settings as a file for `canter train ENV --config` and return it."""
    scores = outcome.scores[outcome.winner]
    lead = f"{outcome.winner} of {search.folder.name}: {np.mean(scores):.5g} on {len(scores)} fresh seeds, "
    lead += f"{outcome.corrected:.5g} corrected for the choice among {len(outcome.scores)}"
    return search.write_best(outcome.settings, lead)


def outcome_lines(search: Search, outcome: Outcome) -> list[str]:
    """Return the winner and its scores as text."""
    base = outcome.scores["base"]
    lines = [f"Final scores on {len(base)} fresh seeds, mean (95 % interval):"]
    for name, scores in outcome.scores.items():
        interval = mean_interval(scores)
        spread = "" if interval is None else f" ({format_number(interval[0])} to {format_number(interval[1])})"
        test = None if name == "base" else welch_difference(base, scores)
        difference = "" if test is None else f"; {test.difference:+.4g} from base ({test.low:+.4g} to {test.high:+.4g})"
        lines.append(f"  {name}: {format_number(float(np.mean(scores)))}{spread}{difference}")
    if outcome.winner == "base":
        lines.append("No trial is better than the base settings.")
        return lines
    lines.append(f"Winner: {outcome.winner} ({search.settings_text(outcome.winner)})")
    lines.append(
        f"  {format_number(outcome.optimistic)} on the seeds of the search, an optimistic estimate; "
        f"{format_number(outcome.corrected)} on fresh seeds, corrected for the choice among {len(outcome.scores)}"
    )
    return lines


def progress_of(search: Search) -> dict[str, str]:
    """Return how far a search is, the best so far, the Pareto front and the time left, by name."""
    planned = "" if search.tune.trials is None else f" of {search.tune.trials}"
    state = {"progress": f"{len(search.study.trials)}{planned} trials, {phase_of(search)}"}
    best = best_so_far(search)
    if best is not None:
        name, score, steps = best
        found = f"best so far {name} with {format_score(score)} at {steps:,} steps"
        state["best"] = f"{found} ({search.settings_text(name)})"
    front = pareto_front(search)
    if len(front) > 1:
        points = (
            f"{format_number(point.return_)} in {format_duration(point.seconds)} ({name})"
            for name, point in front[:SHOWN_FRONT]
        )
        state["front"] = f"return in training time: {', '.join(points)}"
    left = seconds_left(search)
    if left is not None:
        state["time left"] = f"at most about {format_duration(left)} left"
    return state


def phase_of(search: Search) -> str:
    """Return what the search does now, in words."""
    if "final_seeds" in search.study.notes:
        return "finalists on fresh seeds"
    finished = all(map(search.study.is_finished, range(len(search.study.trials))))
    return "more seeds for the best" if finished else "search"


def best_so_far(search: Search) -> tuple[str, float, int] | None:
    """Return the trial with the best mean at the highest rung that any has reached, that mean and the rung."""
    if leaders := search.leaders():
        best = max(leaders, key=lambda name: float(np.mean(search.search_scores(name))))
        return best, float(np.mean(search.search_scores(best))), search.total
    for steps in reversed(search.rungs):
        if scores := search.rung_scores(steps):
            number = max(scores, key=lambda number: scores[number])
            return trial_name(number), scores[number], steps
    return None


def costs(search: Search) -> dict[str, Cost]:
    """Return the cost of every run on the first seed of the search, by `NAME@STEPS`.

    Members of a population share their seconds, so there are no costs to compare.
    """
    if search.tune.population:
        return {}
    return {
        f"{job.candidate}@{job.steps}": Cost(result["return"], result["seconds"])
        for job, result in search.results().items()
        if job.seed == search.config.seed and result.get("return") is not None
    }


def pareto_front(search: Search) -> list[tuple[str, Cost]]:
    """Return the trials, each after some steps, than which none has a higher return in less time; the best first."""
    front: list[tuple[str, Cost]] = []
    for name, cost in sorted(costs(search).items(), key=lambda item: (-item[1].return_, item[1].seconds)):
        if not front or cost.seconds < front[-1][1].seconds:
            front.append((name, cost))
    return front


def seconds_left(search: Search) -> float | None:
    """Return the time to the end at most, at the speed so far; None at the beginning."""
    tune = search.tune
    if not search.steps_done:
        return None
    if "final_seeds" in search.study.notes:
        left = len(search.final_jobs()) * search.total
    else:
        finals = (tune.finalists + 1) * tune.final_seeds
        seeds = 2 * tune.finalists * (tune.seeds - 1)
        left = (finals + seeds) * search.total + search.halving_steps - search.steps_done
    seconds = max(left, 0) * search.spent / search.steps_done
    return seconds if tune.budget is None else min(seconds, max(tune.budget - search.spent, 0.0))

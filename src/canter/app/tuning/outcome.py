"""The outcome of a search: the winner, what to expect of it, and both as text and as a settings file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canter.app.console.text import format_duration, format_number
from canter.app.experiments.settings import with_overrides
from canter.app.tuning.search import FRESH, Job, Search
from canter.app.tuning.space import plain_values
from canter.config.files import dump_config
from canter.core.storage.files import replace_file
from canter.functional.statistics import mean_interval, welch_difference

BEST = "best.yaml"


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


def outcome_of(search: Search) -> Outcome:
    """Return the winner of a search that is done."""
    first = search.config.seed + FRESH
    seeds = range(first, first + search.study.notes["final_seeds"])
    scores = {
        name: [search.score_or_worst(Job(name, seed, search.total)) for seed in seeds] for name in search.finalists()
    }
    winner = best_mean(scores)
    own = search.search_scores(winner)
    optimistic = float(np.mean(own)) if own else None
    return Outcome(winner, search.settings(winner), scores, optimistic, corrected_mean(scores))


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


def write_best(search: Search, outcome: Outcome) -> Path:
    """Write the winner's settings as a file for `canter train ENV --config` and return it."""
    config = with_overrides(search.config, plain_values(outcome.settings))
    scores = outcome.scores[outcome.winner]
    lead = f"# {outcome.winner} of {search.folder.name}: {np.mean(scores):.5g} on {len(scores)} fresh seeds, "
    lead += f"{outcome.corrected:.5g} corrected for the choice among {len(outcome.scores)}\n"
    file = search.folder / BEST
    replace_file(file, (lead + dump_config(config)).encode())
    return file


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
    """Return how far a search is, the best so far, and the time left, by name."""
    planned = "" if search.tune.trials is None else f" of {search.tune.trials}"
    state = {"progress": f"{len(search.study.trials)}{planned} trials, {search.phase}"}
    best = search.best_so_far()
    if best is not None:
        name, score, steps = best
        found = f"best so far {name} with {format_number(score)} at {steps:,} steps"
        state["best"] = f"{found} ({search.settings_text(name)})"
    left = search.seconds_left()
    if left is not None:
        state["time left"] = f"at most about {format_duration(left)} left"
    return state

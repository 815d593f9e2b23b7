"""How good a policy is, without learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from canter.functional.aggregate import interquartile_mean
from canter.play.player import Acts, Games, Player, Turn
from canter.specs import Env

RESAMPLES = 2000
"""Bootstrap samples behind a confidence interval."""


class EpisodesUnfinished(RuntimeError):
    """The steps were used up before every episode had ended; `games` is what was played."""

    def __init__(self, games: Games, episodes: int, max_steps: int) -> None:
        super().__init__(f"after {max_steps} steps only {len(games.finished)} of {episodes} episodes had ended")
        self.games = games


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of whole episodes, each from its own start."""

    return_: list[float]
    length: list[int]

    @property
    def mean(self) -> float:
        """Mean return."""
        return sum(self.return_) / len(self.return_)

    @property
    def mean_length(self) -> float:
        """Mean length."""
        return sum(self.length) / len(self.length)

    @property
    def std(self) -> float:
        """Standard deviation of these returns (divided by their number, so 0 for a single one)."""
        return float(np.std(self.return_))

    @property
    def median(self) -> float:
        """Median return."""
        return float(np.median(self.return_))

    @property
    def iqm(self) -> float:
        """Interquartile mean: the mean of the middle half of the returns."""
        return float(interquartile_mean(np.asarray(self.return_)))

    @cached_property
    def confidence_interval(self) -> tuple[float, float]:
        """95 % interval of the mean return, by the percentile bootstrap with a fixed seed.

        It is about the luck of these episodes, not about that of training. With fewer than about 20 it is too narrow.
        """
        returns, generator = np.asarray(self.return_), np.random.default_rng(0)
        means = [generator.choice(returns, len(returns)).mean() for _ in range(RESAMPLES)]
        low, high = np.percentile(means, (2.5, 97.5))
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Statistics and every episode, ready for JSON."""
        return {
            "episodes": len(self.return_),
            "mean": self.mean,
            "std": self.std,
            "median": self.median,
            "iqm": self.iqm,
            "min": min(self.return_),
            "max": max(self.return_),
            "confidence_interval_95": list(self.confidence_interval),
            "mean_length": self.mean_length,
            "returns": self.return_,
            "lengths": self.length,
        }


def evaluate(
    policy: Acts,
    env: Env,
    episodes: int,
    seed: int,
    *,
    deterministic: bool = True,
    max_steps: int = 1_000_000,
    player: Callable[..., Player] = Player,
    on_turn: Callable[[Turn], Any] = lambda turn: None,
) -> Evaluation:
    """Run `episodes` episodes; normaliser statistics stay as they are.

    Every environment contributes its first episodes, so short ones are not favoured (see `Player.play`). For the same
    reason there is no result when some have not ended after `max_steps` steps of every environment. `on_turn` is called
    after every step.
    """
    games = player(policy, env, deterministic=deterministic, seed=seed).play(episodes, max_steps, on_turn)
    if len(games.finished) < episodes:
        raise EpisodesUnfinished(games, episodes, max_steps)
    return Evaluation([episode.return_ for episode in games.finished], [episode.length for episode in games.finished])

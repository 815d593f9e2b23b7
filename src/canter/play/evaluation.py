"""How good a policy is, without learning.

The long-run average (LTA) reward of a policy, for tasks that never end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from canter.core.registry import UserError
from canter.core.specs import Env
from canter.functional.statistics import BATCHES, batch_means, interquartile_mean
from canter.play.player import Acts, Games, Player, Turn

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


@dataclass(frozen=True)
class LongRunAverage:
    """Raw reward per unit of time: `mean`, give or take `ci` with a confidence of 95 % (see `batch_means`).

    The unit is that of `Step.info["duration"]`; where an environment does not tell, it is a step.
    """

    mean: float
    ci: float


def long_run_average(
    policy: Acts, env: Env, steps: int, *, warm_up: int, seed: int, deterministic: bool = True
) -> LongRunAverage:
    """Let a policy act for `warm_up` steps that do not count and `steps` that do, in every environment.

    The average is that of the task only if episodes are not cut: leave time limits and `reset_steps` out of `env`.
    """
    if steps < BATCHES:
        raise UserError(f"steps={steps} must be at least {BATCHES}")
    if warm_up < 0:
        raise UserError(f"warm_up={warm_up} must not be negative")
    sums = torch.zeros((BATCHES, 2, env.spec.num_envs), dtype=torch.float64, device=env.spec.device)
    turns = Player(policy, env, deterministic=deterministic, seed=seed).turns()
    for count, turn in zip(range(-warm_up, steps), turns, strict=False):
        if count >= 0:
            step = turn.step
            duration = step.info.get("duration", torch.ones_like(step.reward))
            sums[count * BATCHES // steps] += torch.where(step.valid, torch.stack([step.reward, duration]), 0.0)
    average = batch_means(sums.cpu())
    if average is None:
        raise UserError(f"no time has passed in {steps} steps: every duration is 0")
    return LongRunAverage(*average)

"""Evaluation of a policy without learning: returns of whole episodes, or the long-run average.

The long-run average (LTA) is the reward per unit of time, for tasks that never end.
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
from canter.play.player import ActingPolicy, Player, PlayResult, PlayStep

RESAMPLES = 2000
"""Bootstrap samples of a confidence interval."""


class EpisodesUnfinished(RuntimeError):
    """The steps were used up before every episode had ended; `result` has the played episodes."""

    def __init__(self, result: PlayResult, episodes: int, max_steps: int) -> None:
        super().__init__(f"after {max_steps} steps only {len(result.finished)} of {episodes} episodes had ended")
        self.result = result


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of whole episodes."""

    return_: list[float]
    length: list[int]

    def __repr__(self) -> str:
        return f"Evaluation(mean={self.mean:.4g}, std={self.std:.4g}, episodes={len(self.return_)})"

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
        """Standard deviation of the returns (divided by their number, so 0 for a single one)."""
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

        It covers the randomness of these episodes, not that of training. With fewer than about 20
        episodes it is too narrow.
        """
        generator = np.random.default_rng(0)
        means = generator.choice(self.return_, (RESAMPLES, len(self.return_))).mean(axis=1)
        low, high = np.percentile(means, (2.5, 97.5))
        return float(low), float(high)

    @property
    def record(self) -> dict[str, float]:
        """Numbers for the record of a run."""
        low, high = self.confidence_interval
        return {"mean": self.mean, "std": self.std, "low": low, "high": high, "episodes": len(self.return_)}

    def to_dict(self) -> dict[str, Any]:
        """Return statistics and every episode as plain data for JSON."""
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
    policy: ActingPolicy,
    env: Env,
    episodes: int,
    seed: int,
    *,
    deterministic: bool = True,
    max_steps: int = 1_000_000,
    player: Callable[..., Player] = Player,
    on_step: Callable[[PlayStep], Any] = lambda played: None,
) -> Evaluation:
    """Play `episodes` episodes and return their statistics; normalizers are not updated.

    Every environment contributes its first episodes, so short ones are not favoured (see
    `Player.play`). For the same reason `EpisodesUnfinished` is raised if some have not ended after
    `max_steps` steps of every environment. `on_step` is called after every step.
    """
    result = player(policy, env, deterministic=deterministic, seed=seed).play(episodes, max_steps, on_step)
    if len(result.finished) < episodes:
        raise EpisodesUnfinished(result, episodes, max_steps)
    return Evaluation([episode.return_ for episode in result.finished], [episode.length for episode in result.finished])


@dataclass(frozen=True)
class LongRunAverage:
    """Raw reward per unit of time: `mean` +- `ci`, the half width of its 95 % interval.

    The unit of time is that of `Step.info["duration"]`, or a step if the environment does not
    report durations. See `batch_means`.
    """

    mean: float
    ci: float


def long_run_average(
    policy: ActingPolicy, env: Env, steps: int, *, warm_up: int, seed: int, deterministic: bool = True
) -> LongRunAverage:
    """Return the reward per unit of time over `steps` steps of every environment.

    The `warm_up` steps before them do not count. It is the average of the task only if episodes are
    not cut: leave time limits and `reset_steps` out of `env`.
    """
    if steps < BATCHES:
        raise UserError(f"steps={steps} must be at least {BATCHES}")
    if warm_up < 0:
        raise UserError(f"warm_up={warm_up} must not be negative")
    sums = torch.zeros((BATCHES, 2, env.spec.num_envs), dtype=torch.float64, device=env.spec.device)
    played_steps = Player(policy, env, deterministic=deterministic, seed=seed).steps()
    for count, played in zip(range(-warm_up, steps), played_steps, strict=False):
        if count >= 0:
            step = played.step
            duration = step.info.get("duration", torch.ones_like(step.reward))
            sums[count * BATCHES // steps] += torch.where(step.valid, torch.stack([step.reward, duration]), 0.0)
    average = batch_means(sums.cpu())
    if average is None:
        raise UserError(f"the simulated time of {steps} steps is 0: every duration is 0, so there is no average")
    return LongRunAverage(*average)

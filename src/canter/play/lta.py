"""The long-run average (LTA) reward of a policy, for tasks that never end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canter.functional.batch_means import BATCHES, batch_means
from canter.play.player import Acts, Player
from canter.specs import Env


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
        raise ValueError(f"steps={steps} must be at least {BATCHES}")
    if warm_up < 0:
        raise ValueError(f"warm_up={warm_up} must not be negative")
    sums = torch.zeros((BATCHES, 2, env.spec.num_envs), dtype=torch.float64, device=env.spec.device)
    turns = Player(policy, env, deterministic=deterministic, seed=seed).turns()
    for count, turn in zip(range(-warm_up, steps), turns, strict=False):
        if count >= 0:
            step = turn.step
            duration = step.info.get("duration", torch.ones_like(step.reward))
            sums[count * BATCHES // steps] += torch.where(step.valid, torch.stack([step.reward, duration]), 0.0)
    average = batch_means(sums.cpu())
    if average is None:
        raise ValueError(f"no time has passed in {steps} steps: every duration is 0")
    return LongRunAverage(*average)

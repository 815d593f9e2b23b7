"""Settings of a whole run, with PPO as the algorithm where none is named."""

from __future__ import annotations

from dataclasses import dataclass, field

from canter import extensions as extensions  # enters them into their registry
from canter.algorithms.base import AnyAlgorithmConfig
from canter.algorithms.ppo import PPOConfig
from canter.training.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Environment, algorithm, budget and seed: what is needed to repeat a run."""

    algorithm: AnyAlgorithmConfig = field(default_factory=PPOConfig)
    """The algorithm that learns."""

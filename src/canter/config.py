"""Settings of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from canter.algorithms.ppo import PPOConfig
from canter.envs import EnvConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Environment, algorithm, budget and seed: what is needed to repeat a run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """The environments to learn in."""
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    """The algorithm that learns."""
    total_steps: int = 100_000
    """Transitions to train for, over all environments."""
    seed: int = 0
    """Start of every random stream of the run."""
    device: str = "cpu"
    """Where environments' tensors and networks live: cpu, cuda, cuda:1, ..."""

    def __post_init__(self) -> None:
        """Refuse an empty budget and a negative seed."""
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

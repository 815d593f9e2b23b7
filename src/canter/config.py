"""Settings of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from canter.algorithms.base import AnyAlgorithmConfig
from canter.algorithms.ppo import PPOConfig
from canter.envs import EnvConfig
from canter.runs.run_folder import CheckpointConfig
from canter.self_play.self_play import SelfPlayConfig
from canter.training.execution import ExecutionConfig
from canter.training.progress import SuccessConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Environment, algorithm, budget and seed: what is needed to repeat a run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """The environments to learn in."""
    algorithm: AnyAlgorithmConfig = field(default_factory=PPOConfig)
    """The algorithm that learns."""
    total_steps: int = 100_000
    """Transitions to train for, over all environments."""
    seed: int = 0
    """Start of every random stream of the run."""
    device: str = "cpu"
    """Where environments' tensors and networks live: cpu, cuda, cuda:1, ..."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    """How the work is handed to the device; does not change what is learned."""
    self_play: SelfPlayConfig | None = None
    """For a game of two: learn in one of the seats, against past policies in the other; null learns in all seats."""
    success: SuccessConfig = field(default_factory=SuccessConfig)
    """Which episodes count as a success in the statistics."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state of the run is saved, and how much of it is kept."""

    def __post_init__(self) -> None:
        """Refuse an empty budget and a negative seed."""
        if self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

"""Settings of a whole run; the default algorithm is PPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from canter.algorithms import distillation as distillation  # registers distillation
from canter.algorithms import extensions as extensions  # registers AMP, RND and symmetry
from canter.algorithms import sac as sac  # registers SAC
from canter.algorithms.base import AnyAlgorithmConfig
from canter.algorithms.ppo import PPOConfig
from canter.core.registry import UserError
from canter.play.callbacks import EvaluateConfig, EvaluationCallback, HallOfFameCallback, VideoCallback, VideoConfig
from canter.training.config import RunConfig, Watcher


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Everything needed to repeat a run: environment, algorithm, budget and seed."""

    algorithm: AnyAlgorithmConfig = field(default_factory=PPOConfig)
    """The algorithm that learns."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluations while training."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """Videos while training."""

    def __post_init__(self) -> None:
        """Raise UserError if the best policy is chosen by evaluations that never happen."""
        super().__post_init__()
        if self.checkpoints.best_by == "evaluation" and self.evaluate.every is None:
            raise UserError("checkpoints.best_by=evaluation needs evaluations: set evaluate.every")

    def watchers(self, folder: Path | None) -> list[Watcher]:
        """Return the periodic tasks of a run in `folder`: evaluations, videos, the hall of fame."""
        made: list[Watcher] = []
        if self.evaluate.every is not None:
            made.append(EvaluationCallback(self.evaluate, self.env, self.device, self.seed))
        if self.video.every is not None:
            made.append(VideoCallback(self.video, self.env, self.device, self.seed, folder))
        if self.checkpoints.best and self.checkpoint_schedule.best_by == "lta" and folder is not None:
            made.append(HallOfFameCallback(self.env, self.seed, folder))
        return made

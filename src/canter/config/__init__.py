"""Settings of a whole run; the default algorithm is PPO."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from canter.algorithms import distillation as distillation  # registers distillation
from canter.algorithms import extensions as extensions  # registers AMP, RND and symmetry
from canter.algorithms import sac as sac  # registers SAC
from canter.algorithms.base import AnyAlgorithmConfig
from canter.algorithms.ppo import PPOConfig
from canter.algorithms.ppo.population import PopulationConfig
from canter.core.plain import to_plain
from canter.core.registry import UserError
from canter.core.storage.files import dump_plain
from canter.play.callbacks import EvaluateConfig, EvaluationCallback, HallOfFameCallback, VideoCallback, VideoConfig
from canter.training.config import RunConfig, Watcher
from canter.training.members import MemberLogs


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
        if isinstance(self.algorithm, PopulationConfig) and folder is not None:
            settings = [dump_plain(to_plain(single)) for single in self.single_runs()]
            made.append(MemberLogs(folder, settings, self.recent_episodes))
        return made

    def single_runs(self) -> list[TrainConfig]:
        """Return for each member of a population the settings of a single run that learns as it does."""
        algorithms = self.algorithm.single_runs()
        members = len(algorithms)
        steps = None if self.total_steps is None else self.total_steps // members
        env = replace(self.env, num_envs=self.env.num_envs // members)
        return [
            replace(self, algorithm=algorithm, seed=seed, env=env, total_steps=steps)
            for algorithm, seed in zip(algorithms, self.algorithm.seeds(self.seed), strict=True)
        ]

"""Evaluations, videos and hall-of-fame entries while a policy is trained.

None of them changes training: they play in their own environments with their own random streams.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canter.core.plain import check_range
from canter.core.registry import UserError
from canter.core.seeding import derive_seed
from canter.core.specs import Env
from canter.envs import EnvConfig, closed_quietly
from canter.nn.policy_file import BEST, POLICIES, read_policy_file
from canter.play.evaluation import EpisodesUnfinished, evaluate
from canter.play.player import Player
from canter.play.video import FilmStrip, Recorder, check_video, draw_without_display, pictures_explained
from canter.runs.hall_of_fame import enter_by_average

if TYPE_CHECKING:
    from canter.training.progress import Report

_log = logging.getLogger(__name__)

ROBOTS = ("mjlab:", "isaaclab:")
"""Simulators that render only if they were built with a render mode."""
MAX_VIDEO_STEPS = 1000
"""Steps of a video; some episodes never end."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluations during training, in separate environments; logged as `eval/return`."""

    every: int | None = None
    """Steps between evaluations; null for none. `checkpoints.best_by: evaluation` uses them to
    choose the best policy."""
    episodes: int = 10
    """Episodes of each evaluation."""
    deterministic: bool = True
    """Act without exploration noise."""
    max_steps: int = 10_000
    """Steps of each environment after which an evaluation is given up."""

    def __post_init__(self) -> None:
        """Raise UserError for values out of range, and for settings that would have no effect."""
        check_range(self, "must be at least 1", "every", "episodes", "max_steps")
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        if self.every is None and changed:
            raise UserError(f"{', '.join(changed)} has no effect without every, the steps between evaluations")


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Videos of one episode during training, in the run's folder `videos`; need `canter[video]`."""

    every: int | None = None
    """Steps between videos; null for none. The report shows pictures of the newest."""

    def __post_init__(self) -> None:
        """Raise UserError for values out of range."""
        check_range(self, "must be at least 1", "every")


class EvaluationCallback:
    """Evaluates every few steps with one seed, so that values differ only by the policy."""

    def __init__(self, config: EvaluateConfig, env: EnvConfig, device: str, seed: int) -> None:
        self.config = config
        self.seed = _eval_seed(seed)
        self._opened = ExitStack()
        env = replace(env, num_envs=min(env.num_envs, config.episodes))
        self._env = self._opened.enter_context(closed_quietly(env.build(device)))

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Return mean return and length of new episodes if due; the reward per step if none end."""
        config = self.config
        if not is_due(report, config.every):
            return {}
        try:
            result = evaluate(
                trainer.algorithm.policy,
                self._env,
                config.episodes,
                self.seed,
                deterministic=config.deterministic,
                max_steps=config.max_steps,
            )
        except EpisodesUnfinished as error:
            return {"eval/reward": error.result.reward_per_step}
        return {"eval/return": result.mean, "eval/length": result.mean_length}

    def close(self) -> None:
        """Close the environments."""
        self._opened.close()


class VideoCallback:
    """Records one episode every few steps."""

    def __init__(self, config: VideoConfig, env: EnvConfig, device: str, seed: int, folder: Path | None) -> None:
        if folder is None:
            raise UserError(f"video.every={config.every} needs a run folder to put videos into")
        self.config = config
        self.env = env
        self.device = device
        self.seed = _eval_seed(seed)
        self.folder = folder / "videos"
        draw_without_display()
        with pictures_explained(), closed_quietly(renderable_env_config(env).build(device)) as renderer:
            check_video(renderer, self.folder / "step.mp4")

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Record a video if due; return no metrics."""
        if is_due(report, self.config.every):
            path = self.folder / f"step-{report.env_steps:09d}.mp4"
            path.unlink(missing_ok=True)  # left by steps that a kill has undone
            with pictures_explained(), closed_quietly(renderable_env_config(self.env).build(self.device)) as env:
                record_episode(trainer.algorithm.policy, env, path, self.seed)
        return {}

    def close(self) -> None:
        """Do nothing: every video closes its environment."""


@dataclass
class HallOfFameCallback:
    """Enters the best policy by long-run average into the hall of fame during the run.

    It is the best policy that the run stores: whenever a checkpoint is due, the one that was
    written with the checkpoint before.
    """

    env: EnvConfig
    seed: int
    folder: Path
    entered: float = -math.inf
    ci: float = 0.0

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Enter the stored policy if a checkpoint is due; return no metrics."""
        self.ci = report.metrics.get("lta/ci", self.ci)
        if trainer.folder.saves_at(report.iteration):
            self._enter()
        return {}

    def _enter(self) -> None:
        # There may be no policy yet; the run itself reports one that cannot be read.
        with suppress(ValueError, OSError):
            average = read_policy_file(self.folder / POLICIES / BEST)[0].lta
            if average is not None and average > self.entered:
                self.entered = average
                verdict = enter_by_average(self.folder, self.env, (average, self.ci), self.seed, training=True)
                _log.info("%s", verdict)

    def close(self) -> None:
        """Enter the policy that was written at the end."""
        self._enter()


def is_due(report: Report, every: int | None) -> bool:
    """Return whether a multiple of `every` steps was reached since the last row; False for None."""
    return every is not None and report.env_steps // every > (report.env_steps - report.rollout_steps) // every


def renderable_env_config(env: EnvConfig, mode: str = "rgb_array") -> EnvConfig:
    """Return the settings of one environment that renders, if it can.

    It also shows the end of an episode before it restarts.
    """
    env = replace(env, num_envs=1)
    if env.id.startswith(ROBOTS) and mode == "rgb_array":
        return replace(env, options={**env.options, "render_mode": mode})
    if not env.is_gymnasium:
        return env  # some render without a render mode
    autoreset = env.autoreset if env.vectorization == "vector_entry_point" else "next_step"
    return replace(env, autoreset=autoreset, options={**env.options, "render_mode": mode})


def record_episode(policy: Any, env: Env, path: Path, seed: int) -> None:
    """Record one episode of a policy as a video, and a film strip of it as a PNG file."""
    strip = FilmStrip()
    with Recorder(env, path) as recorder:
        Player(policy, env, seed=seed).play(1, MAX_VIDEO_STEPS, lambda played: strip.add(recorder(played)))
    strip.save(path.with_suffix(".png"))


def _eval_seed(seed: int) -> int:
    """Return a seed for episodes that are neither trained on nor part of the final score."""
    return derive_seed(derive_seed(seed, "eval"), "eval")

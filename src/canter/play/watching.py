"""What is done now and then while a policy is trained: evaluate it, film it.

Neither changes what is learned: both play in environments of their own, with random streams of their own.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canter.core.registry import UserError
from canter.core.seeding import derive_seed
from canter.core.specs import Env
from canter.envs import EnvConfig, closed_quietly
from canter.nn.policy_file import BEST, POLICIES, read_policy_file
from canter.play.evaluation import EpisodesUnfinished, evaluate
from canter.play.player import Player, check_positive
from canter.play.video import Recorder, Strip, check_video, draw_without_display, pictures_explained
from canter.runs.hall_of_fame import enter_by_average

if TYPE_CHECKING:
    from canter.training.progress import Report

_log = logging.getLogger(__name__)

ROBOTS = ("mjlab:", "isaaclab:")
"""Simulators that draw only if they were made to."""
MAX_FILM = 1000
"""Steps of a video; some episodes never end."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluations while training, on environments of their own; each is a value of the curve `eval/return`."""

    every: int | None = None
    """Steps between evaluations; null for none. `checkpoints.best_by: evaluation` keeps the best policy by them."""
    episodes: int = 10
    """Episodes of each."""
    deterministic: bool = True
    """Act without the noise that the policy explores with."""
    max_steps: int = 10_000
    """Steps of each environment after which an evaluation is given up."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, and those that would do nothing, by name."""
        check_positive(every=self.every, episodes=self.episodes, max_steps=self.max_steps)
        own = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        changed = [f"{name}={value}" for name, value, default in own if value != default]
        if self.every is None and changed:
            raise UserError(f"{', '.join(changed)} would do nothing without every, the steps between evaluations")


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Videos of one episode while training, in the run's folder `videos`; need `canter[video]`."""

    every: int | None = None
    """Steps between videos; null for none. The report shows pictures of the newest."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        check_positive(every=self.every)


def _stream(seed: int) -> int:
    """Seed for episodes that are neither trained on nor part of the final score."""
    return derive_seed(derive_seed(seed, "eval"), "eval")


def is_due(report: Report, every: int | None) -> bool:
    """Whether a multiple of `every` steps lies among those since the row before; never without it."""
    return every is not None and report.env_steps // every > (report.env_steps - report.rollout_steps) // every


class Evaluator:
    """Plays whole episodes now and then; the same seed each time, so that values differ by the policy alone."""

    def __init__(self, config: EvaluateConfig, env: EnvConfig, device: str, seed: int) -> None:
        self.config, self.seed = config, _stream(seed)
        self._opened = ExitStack()
        env = replace(env, num_envs=min(env.num_envs, config.episodes))
        self._env = self._opened.enter_context(closed_quietly(env.build(device)))

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Mean return and length of new episodes, where it is time; nothing for a task whose episodes do not end."""
        own, policy = self.config, trainer.algorithm.policy
        if not is_due(report, own.every):
            return {}
        try:
            result = evaluate(
                policy, self._env, own.episodes, self.seed, deterministic=own.deterministic, max_steps=own.max_steps
            )
        except EpisodesUnfinished as error:
            return {"eval/reward": error.games.reward_per_step}
        return {"eval/return": result.mean, "eval/length": result.mean_length}

    def close(self) -> None:
        """Close the environments."""
        self._opened.close()


class Filmer:
    """Records one episode now and then."""

    def __init__(self, config: VideoConfig, env: EnvConfig, device: str, seed: int, folder: Path | None) -> None:
        self.config, self.env, self.device, self.seed = config, env, device, _stream(seed)
        if folder is None:
            raise UserError(f"video.every={config.every} needs a folder of the run to put videos into")
        self.folder = folder / "videos"
        draw_without_display()
        with pictures_explained(), closed_quietly(drawn(env).build(device)) as drawing:
            check_video(drawing, self.folder / "step.mp4")

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Record a video, where it is time."""
        if is_due(report, self.config.every):
            path = self.folder / f"step-{report.env_steps:09d}.mp4"
            path.unlink(missing_ok=True)  # of an attempt that a kill has undone
            with pictures_explained(), closed_quietly(drawn(self.env).build(self.device)) as env:
                film(trainer.algorithm.policy, env, path, self.seed)
        return {}

    def close(self) -> None:
        """Nothing is held."""


class Contender:
    """Enters the best policy by long-run average into the hall of fame while the run goes on.

    It is the one that the run itself keeps: whenever a checkpoint is due, what was written with the one before.
    """

    def __init__(self, env: EnvConfig, seed: int, folder: Path) -> None:
        self.env, self.seed, self.folder = env, seed, folder
        self.entered = -math.inf
        self.ci = 0.0

    def __call__(self, trainer: Any, report: Report) -> dict[str, float]:
        """Enter it, where it is time."""
        self.ci = report.metrics.get("lta/ci", self.ci)
        if trainer.folder.saves_at(report.iteration):
            self._enter()
        return {}

    def _enter(self) -> None:
        with suppress(ValueError, OSError):  # none yet, or one that cannot be read, which the run says itself
            average = read_policy_file(self.folder / POLICIES / BEST)[0].lta
            if average is not None and average > self.entered:
                self.entered = average
                verdict = enter_by_average(self.folder, self.env, (average, self.ci), self.seed, training=True)
                _log.info("%s", verdict)

    def close(self) -> None:
        """Enter what was written at the end."""
        self._enter()


def drawn(env: EnvConfig, mode: str = "rgb_array") -> EnvConfig:
    """One environment that draws itself, if it can be asked to, and shows the end of an episode before it restarts."""
    env = replace(env, num_envs=1)
    if env.id.startswith(ROBOTS) and mode == "rgb_array":
        return replace(env, options={**env.options, "render_mode": mode})
    if not env.is_gymnasium:
        return env  # some can be drawn as they are
    restart = env.autoreset if env.vectorization == "vector_entry_point" else "next_step"
    return replace(env, autoreset=restart, options={**env.options, "render_mode": mode})


def film(policy: Any, env: Env, path: Path, seed: int) -> None:
    """Record one episode of a policy, and a strip of pictures from it."""
    strip = Strip()
    with Recorder(env, path) as recorder:
        Player(policy, env, seed=seed).play(1, MAX_FILM, lambda turn: strip.add(recorder(turn)))
    strip.save(path.with_suffix(".png"))

"""The main loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from canter.algorithms.base import Algorithm, AlgorithmConfig, Metrics
from canter.runtime.collector import Collector, Episodes
from canter.seeding import derive_seed
from canter.specs import Env

RECENT_EPISODES = 100
"""The reported return is the mean over this many episodes."""


class EnvBuilder(Protocol):
    """Settings that build an environment."""

    def build(self, device: str) -> Env:
        """The environment, with its tensors on `device`."""
        ...


class RunConfig(Protocol):
    """What the loop needs to know of a run's settings."""

    @property
    def env(self) -> EnvBuilder:
        """Builds the environments."""
        ...

    @property
    def algorithm(self) -> AlgorithmConfig:
        """Builds the algorithm."""
        ...

    @property
    def total_steps(self) -> int:
        """Transitions to train for."""
        ...

    @property
    def seed(self) -> int:
        """Start of every random stream."""
        ...

    @property
    def device(self) -> str:
        """Where tensors live."""
        ...


@dataclass(frozen=True)
class Report:
    """Where a run stands after an iteration; all on the host."""

    iteration: int
    env_steps: int
    """Transitions so far, over all environments; reset rows are not counted."""
    episodes: int
    """Episodes that have ended so far."""
    seconds: float
    """Since training started."""
    return_: float | None
    """Mean return of the last 100 episodes; None before the first has ended."""
    length: float | None
    """Mean length of the same episodes."""
    metrics: dict[str, float]


class Run:
    """Counts what has happened and reports it."""

    def __init__(self, total_steps: int, on_iteration: Callable[[Report], Any]) -> None:
        self.total_steps, self.on_iteration = total_steps, on_iteration
        self.iteration = self.env_steps = self.episodes = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)
        self.start = time.perf_counter()

    @property
    def progress(self) -> float:
        """Fraction of the run that is done."""
        return self.env_steps / self.total_steps

    def log(self, metrics: Metrics, episodes: Episodes) -> None:
        """Take note of an iteration; reads the metrics from the device."""
        self.iteration += 1
        self.env_steps += episodes.env_steps
        self.episodes += len(episodes.return_)
        self.recent.extend(zip(episodes.return_, episodes.length, strict=True))
        count = len(self.recent)
        self.on_iteration(
            Report(
                iteration=self.iteration,
                env_steps=self.env_steps,
                episodes=self.episodes,
                seconds=time.perf_counter() - self.start,
                return_=sum(return_ for return_, _ in self.recent) / count if count else None,
                length=sum(length for _, length in self.recent) / count if count else None,
                metrics={name: float(value) for name, value in metrics.items()},
            )
        )


def train(
    config: RunConfig, on_iteration: Callable[[Report], Any] = lambda report: None, *, env: Env | None = None
) -> Algorithm[Any]:
    """Train until `total_steps` transitions have been seen; gives the trained algorithm.

    `on_iteration` is called with a report after every iteration. An `env` given here is used instead of the one that
    the settings describe, and is left open.
    """
    given = env
    env = config.env.build(config.device) if given is None else given
    try:
        algorithm = config.algorithm.build(env.spec, config.seed)
        collector = Collector(env, algorithm, derive_seed(config.seed, "env"))
        run = Run(config.total_steps, on_iteration)
        while run.progress < 1:
            algorithm.set_progress(run.progress)
            rollout = collector.collect()
            metrics = algorithm.update(rollout)
            run.log(metrics, collector.read_episodes())
    finally:
        if given is None:
            env.close()
    return algorithm

"""The main loop."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from canter.algorithms.base import Algorithm, AlgorithmConfig, Metrics
from canter.runtime.collector import Collector, Episodes
from canter.runtime.run_folder import NoFolder, Parts, RunFolder
from canter.runtime.signals import StopSignals
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

    def row(self) -> dict[str, Any]:
        """The same as one flat mapping, for a line of a log."""
        own = {field.name.rstrip("_"): getattr(self, field.name) for field in fields(self) if field.name != "metrics"}
        return own | self.metrics


class RunStopped(KeyboardInterrupt):
    """A signal ended the run early; what was learned is saved where there is a folder."""

    def __init__(self, received: signal.Signals, env_steps: int) -> None:
        super().__init__(f"stopped by {received.name} after {env_steps:,} steps")
        self.received = received


class Run:
    """Counts what has happened."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.iteration = self.env_steps = self.episodes = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)
        self.start = time.perf_counter()

    @property
    def progress(self) -> float:
        """Fraction of the run that is done."""
        return self.env_steps / self.total_steps

    def count(self, metrics: Metrics, episodes: Episodes) -> Report:
        """Take note of an iteration; reads the metrics from the device."""
        self.iteration += 1
        self.env_steps += episodes.env_steps
        self.episodes += len(episodes.return_)
        self.recent.extend(zip(episodes.return_, episodes.length, strict=True))
        count = len(self.recent)
        values = torch.stack([value.float() for value in metrics.values()]).tolist()  # one read for all
        return Report(
            iteration=self.iteration,
            env_steps=self.env_steps,
            episodes=self.episodes,
            seconds=time.perf_counter() - self.start,
            return_=sum(return_ for return_, _ in self.recent) / count if count else None,
            length=sum(length for _, length in self.recent) / count if count else None,
            metrics=dict(zip(metrics, values, strict=True)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters, recent episodes and the time spent."""
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "recent": [list(episode) for episode in self.recent],
            "seconds": time.perf_counter() - self.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        self.iteration, self.env_steps, self.episodes = state["iteration"], state["env_steps"], state["episodes"]
        self.recent = deque(((return_, length) for return_, length in state["recent"]), maxlen=RECENT_EPISODES)
        self.start = time.perf_counter() - state["seconds"]


def train(
    config: RunConfig,
    on_iteration: Callable[[Report], Any] = lambda report: None,
    *,
    env: Env | None = None,
    folder: RunFolder | NoFolder | None = None,
) -> Algorithm[Any]:
    """Train until `total_steps` transitions have been seen; gives the trained algorithm.

    `on_iteration` is called with a report after every iteration. An `env` given here is used instead of the one that
    the settings describe, and is left open. With a `folder`, metrics and checkpoints are kept there, and a run that was
    interrupted goes on from its newest checkpoint. SIGINT or SIGTERM ends the run after the iteration, saves it and
    raises `RunStopped`.
    """
    built = config.env.build(config.device) if env is None else None
    env = env or built
    assert env is not None
    try:
        algorithm = config.algorithm.build(env.spec, config.seed)
        collector = Collector(env, algorithm, derive_seed(config.seed, "env"))
        run = Run(config.total_steps)
        parts: Parts = {"algorithm": algorithm, "collector": collector, "run": run}
        with folder or NoFolder() as disk, StopSignals() as stop:
            disk.restore(parts)
            while run.progress < 1 and stop.received is None:
                algorithm.set_progress(run.progress)
                rollout = collector.collect()
                metrics = algorithm.update(rollout)
                report = run.count(metrics, collector.read_episodes())
                disk.log(report.row())
                on_iteration(report)
                disk.save(run.iteration, parts)
            disk.save(run.iteration, parts, final=True)
        if stop.received is not None and run.progress < 1:
            raise RunStopped(stop.received, run.env_steps)
    finally:
        if built is not None:
            built.close()
    return algorithm

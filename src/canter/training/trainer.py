"""The main loop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any, Protocol

from canter.algorithms.base import Algorithm, AlgorithmConfig
from canter.runs.run_folder import NoFolder, Parts, RunFolder
from canter.runs.writers import MetricWriter, Writers
from canter.seeding import derive_seed
from canter.self_play.self_play import SelfPlayConfig, seat_opponents
from canter.specs import Env
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig
from canter.training.progress import Report, Run, SuccessConfig
from canter.training.signals import StopSignals


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

    @property
    def self_play(self) -> SelfPlayConfig | None:
        """Against whom it plays, in a game of two."""
        ...

    @property
    def execution(self) -> ExecutionConfig:
        """How the work is handed to the device."""
        ...

    @property
    def success(self) -> SuccessConfig:
        """Which episodes count as a success."""
        ...


class RunStopped(KeyboardInterrupt):
    """A signal ended the run early; what was learned is saved where there is a folder."""

    def __init__(self, received: signal.Signals, env_steps: int) -> None:
        super().__init__(f"stopped by {received.name} after {env_steps:,} steps")
        self.received = received


def train(
    config: RunConfig,
    on_iteration: Callable[[Report], Any] = lambda report: None,
    *,
    env: Env | None = None,
    folder: RunFolder | NoFolder | None = None,
    writers: Sequence[MetricWriter] = (),
) -> Algorithm[Any]:
    """Train until `total_steps` transitions have been seen; gives the trained algorithm.

    `on_iteration` is called with a report after every iteration; `writers`, such as a console, get its row. An `env`
    given here is used instead of the one that the settings describe, and is left open. With a `folder`, metrics and
    checkpoints are kept there, and a run that was interrupted goes on from its newest checkpoint. SIGINT or SIGTERM
    ends the run after the iteration, saves it and raises `RunStopped`.
    """
    config.execution.start(config.device)
    with closing(config.env.build(config.device)) if env is None else nullcontext(env) as env:
        env, adapt = seat_opponents(env, config.self_play, config.seed)
        algorithm = config.algorithm.build(env.spec, config.seed)
        algorithm.use_engine(config.execution.engine)
        collector = Collector(env, algorithm, derive_seed(config.seed, "env"))
        run = Run(config.total_steps, config.success, collector.clock)
        programs = config.execution.prepare(collector, algorithm)
        parts = Parts(algorithm, collector, run)
        with folder or NoFolder() as disk, Writers(writers) as log, StopSignals() as stop:
            disk.restore(parts)
            adapt(algorithm.policy)
            log.start(config)
            while run.progress < 1 and stop.received is None:
                algorithm.set_progress(run.progress)
                rollout = programs.collect()
                metrics = programs.update(rollout) | adapt(algorithm.policy) | collector.env_metrics()
                report = run.count(metrics, collector.read_episodes())
                disk.log(report.row())
                log.write(report.row())
                on_iteration(report)
                disk.save(parts)
            disk.save(parts, final=True)
        if stop.received is not None and run.progress < 1:
            raise RunStopped(stop.received, run.env_steps)
    return algorithm

"""The main loop."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, Self

from canter.algorithms.base import Algorithm, declared_by, unused_by
from canter.data.rollout import Rollout
from canter.envs import unused_settings
from canter.runs.run_folder import NoFolder, Parts, RunFolder
from canter.runs.writers import MetricWriter, Writers
from canter.seeding import derive_seed
from canter.self_play.self_play import seat_opponents
from canter.specs import Env
from canter.struct import Metrics
from canter.training.collector import Collector
from canter.training.progress import Report, Run
from canter.training.settings import RunConfig
from canter.training.signals import StopSignals

logger = logging.getLogger(__name__)


class RunStopped(KeyboardInterrupt):
    """A signal ended the run early; what was learned is saved where there is a folder."""

    def __init__(self, received: signal.Signals, env_steps: int) -> None:
        super().__init__(f"stopped by {received.name} after {env_steps:,} steps")
        self.received = received


class Trainer:
    """The parts of a run: environment, algorithm, collector, counters, folder and writers.

        with canter.Trainer(config) as trainer:
            trainer.learn(10)
            trainer.learn()

    `on_iteration` is called with every row of the log; `writers`, such as a console, get it as a mapping. An `env`
    given here is used instead of the one that the settings describe, and is left open. With a `folder`, metrics and
    checkpoints are kept there, and a run that was interrupted goes on from its newest checkpoint. Leaving the `with`
    statement, or `close()`, saves what was learned and frees everything.
    """

    def __init__(
        self,
        config: RunConfig,
        on_iteration: Callable[[Report], Any] = lambda report: None,
        *,
        env: Env | None = None,
        folder: RunFolder | None = None,
        writers: Sequence[MetricWriter] = (),
    ) -> None:
        self.config, self.on_iteration, self.stop = config, on_iteration, StopSignals()
        with ExitStack() as opened:
            config.execution.start(config.device)
            env = opened.enter_context(closing(config.env.build(config.device))) if env is None else env
            self.env, self._adapt = seat_opponents(env, config.self_play, config.seed)
            self.algorithm: Algorithm[Any] = config.algorithm.build(self.env.spec, config.seed)
            self.algorithm.use_engine(config.execution.engine)
            self._log_decisions()
            self.collector = Collector(self.env, self.algorithm, derive_seed(config.seed, "env"))
            steps_metric = declared_by(config.algorithm).optimizer_steps
            self.run = Run(config.total_steps, config.success, self.collector.clock, config.until, steps_metric)
            self.programs = config.execution.prepare(self.collector, self.algorithm)
            self._parts = Parts(self.algorithm, self.collector, self.run)
            self.folder = NoFolder() if folder is None else opened.enter_context(folder)
            self._writers = opened.enter_context(Writers(writers))
            self.folder.restore(self._parts)
            self._adapt(self.algorithm.policy)
            self._writers.start(config)
            self._opened = opened.pop_all()
        self._metrics: Metrics = {}
        self._closed = False
        self._last = math.inf
        """Iteration at which `learn` is to return."""

    def _log_decisions(self) -> None:
        """Settings that have no part here, as warnings, and which engine computes what."""
        for line in (*unused_settings(self.config.env), *unused_by(self.config.algorithm, self.env.spec)):
            logger.warning("%s", line)
        for what, chosen in self.algorithm.about().items():
            logger.info("%s: %s", what, chosen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if error is None and not self.finished:
                self.folder.save(self._parts, final=True)
        except BaseException as failure:
            self._opened.__exit__(type(failure), failure, failure.__traceback__)  # the folder notes how it ended
            raise
        self._opened.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Save what was learned and free everything, as leaving the `with` statement does."""
        self.__exit__(None, None, None)

    @property
    def finished(self) -> bool:
        """Whether the budget is used up or a condition for the end is met; `run.ended_by` names it."""
        return self.run.ended_by is not None

    def learn(self, iterations: int | None = None) -> Algorithm[Any]:
        """Train for so many iterations, or to the end of the run; may be called again. Gives the algorithm.

        SIGINT or SIGTERM ends it after the iteration, saves and raises `RunStopped`.
        """
        self._last = math.inf if iterations is None else self.run.iteration + iterations
        self.run.start_clock()
        with self.stop as stop:
            while not self.finished and self.run.iteration < self._last and stop.received is None:
                self.algorithm.set_progress(self.run.fraction)
                rollout = self.programs.collect()
                metrics = self.programs.update(rollout) | self._adapt(self.algorithm.policy)
                metrics |= self.collector.env_metrics()
                self.count(metrics, rollout)
                self.log()
                self.save()
            self.log(now=True)
            if self.finished or stop.received is not None:
                self.folder.save(self._parts, final=True)
            if stop.received is not None and not self.finished:
                raise RunStopped(stop.received, self.run.env_steps)
        return self.algorithm

    def count(self, metrics: Metrics, rollout: Rollout[Any]) -> None:
        """Take note of an iteration; nothing waits for the device."""
        self._metrics = metrics
        self.run.add(metrics, rollout.valid)
        self.collector.keep_episodes()

    def log(self, *, now: bool = False) -> None:
        """Write a row about the iterations since the one before, if it is time or `now`; reads from the device."""
        run = self.run
        due = now or run.may_have_ended or run.iteration >= self._last or self.stop.received is not None
        due = due or run.iteration % self.config.log_every == 0 or self.folder.saves_at(run.iteration)
        if not due or run.unread is None:
            return
        report = run.report(self._metrics, self.collector.read_episodes())
        row = report.row()
        self.folder.log(row)
        self._writers.write(row)
        self.on_iteration(report)

    def save(self) -> None:
        """Save what it is time for; only after a row, when the counters are known."""
        if self.run.unread is None:
            self.folder.save(self._parts)


def train(
    config: RunConfig,
    on_iteration: Callable[[Report], Any] = lambda report: None,
    *,
    env: Env | None = None,
    folder: RunFolder | None = None,
    writers: Sequence[MetricWriter] = (),
) -> Algorithm[Any]:
    """Train to the end of the run; gives the trained algorithm. See `Trainer`, which takes the same arguments.

    SIGINT or SIGTERM ends the run after the iteration, saves it and raises `RunStopped`.
    """
    with Trainer(config, on_iteration, env=env, folder=folder, writers=writers) as trainer:
        return trainer.learn()

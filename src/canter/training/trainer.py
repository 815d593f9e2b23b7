"""The main loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Self

from canter.algorithms.base import Algorithm, plan_of, report_spec_of, unused_settings_of
from canter.algorithms.doctor.findings import Finding
from canter.algorithms.doctor.live import Doctor
from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.dispatch import plain_functions
from canter.core.distributed.watch import activity
from canter.core.distributed.world import world
from canter.core.plain import ConfigError, to_plain
from canter.core.seeding import derive_seed
from canter.core.specs import Env, report_progress
from canter.core.struct import Metrics
from canter.envs import closed_quietly, unused_settings
from canter.envs.directory import directory_of
from canter.envs.failures import HANG_WARNING_SECONDS
from canter.runs.ranks import folder_of_rank
from canter.runs.records import flatten
from canter.runs.run_folder import RunFolder
from canter.runs.state import TrainState
from canter.runs.writers import MetricWriter, Writers
from canter.training.callbacks import Callback, Callbacks, ignore
from canter.training.collector import Collector
from canter.training.config import RunConfig
from canter.training.episodes import Episodes, NonFinite
from canter.training.guard import Guard, RunStopped, first_error_of_ranks
from canter.training.progress import Report, RunProgress
from canter.training.rollback import Rollback
from canter.training.self_play import seat_opponents

logger = logging.getLogger(__name__)


class Trainer:
    """Trains an algorithm in an environment.

        with canter.Trainer(config) as trainer:
            trainer.learn(10)
            trainer.learn()

    `on_iteration` is called before every row of the log is written, as `on_iteration(report,
    policy, trainer)` or with the first one or two of these. A returned dict of numbers is added to
    the row; `canter.STOP` or False ends the run. `callbacks` follow more of the run, see
    `canter.Callback`. `writers`, such as a console, receive the row as a mapping. An `env` passed here is used instead
    of the configured one and is not closed. With a `folder`, metrics and checkpoints are saved
    there, and an interrupted run continues from its newest checkpoint. Leaving the `with`
    statement, or `close()`, saves the training state and frees everything.

    `begin` may initialise the algorithm's weights before anything is written; `begin_result` holds
    its return value.
    """

    def __init__(
        self,
        config: RunConfig,
        on_iteration: Callable[..., Any] = ignore,
        *,
        callbacks: Sequence[Callback] = (),
        env: Env | None = None,
        folder: RunFolder | None = None,
        writers: Sequence[MetricWriter] = (),
        begin: Callable[[Algorithm[Any]], Any] | None = None,
    ) -> None:
        self.config = config
        self.on_iteration = on_iteration
        self.callbacks = Callbacks(callbacks)
        with ExitStack() as resources:
            if world.start():
                resources.callback(world.end)
            world.set_timeout(config.execution.rank_timeout)
            resources.enter_context(plain_functions(config.execution.engine == "plain"))
            config.execution.start(config.device)
            if env is None:
                env = resources.enter_context(closed_quietly(config.env.build(config.device)))
            self.env, self._adapt_opponents = seat_opponents(env, config.self_play, config.seed)
            self.algorithm: Algorithm[Any] = config.algorithm.build(self.env.spec, config.seed)
            self.algorithm.use_engine(config.execution.engine)
            self.begin_result = None if begin is None else begin(self.algorithm)
            self._log_decisions()
            self.directory = directory_of(self.env)
            patience = min(HANG_WARNING_SECONDS, config.env.step_timeout)
            self.collector = Collector(self.env, self.algorithm, derive_seed(config.seed, "env"), patience)
            resources.enter_context(closing(self.collector.watchdog))
            self.progress = RunProgress(
                config.total_steps,
                config.success,
                self.collector.clock,
                config.until,
                report_spec_of(config.algorithm).optimizer_steps,
                config.recent_episodes,
            )
            self.state = TrainState(self.algorithm, self.collector, self.progress, config.seed)
            rollback = Rollback(self.state, self.collector, reads_late=config.log_every > 1)
            self.programs = config.execution.prepare(self.collector, self.algorithm, rollback.snapshot)
            path = None if folder is None else folder.path
            self._watchers = config.watchers(path) if distributed.rank() == 0 else []
            for watcher in self._watchers:
                resources.callback(watcher.close)
            if folder is not None:
                folder.adopt(config)
            self.folder = resources.enter_context(folder_of_rank(folder))
            self._writers = resources.enter_context(Writers(writers))
            self.guard = Guard(self.state, self.progress, rollback, self.folder, self.env.spec, self.log_now)
            if not self.folder.restore(self.state):
                self.folder.save(self.state)  # so that a run can be resumed from its first iteration on
            self.doctor = self._call_doctor()
            self._adapt_opponents(self.algorithm.policy)
            self._writers.start(config)
            resources.push(self._save_on_exit)
            self._resources = resources.pop_all()
        self._last_iteration = math.inf
        """Iteration after which `learn` returns."""

    def _log_decisions(self) -> None:
        """Warn of settings without effect, and log which engine computes what."""
        config = self.config
        unused = [
            *unused_settings(config.env, config.device),
            *unused_settings_of(config.algorithm, self.env.spec),
            *config.execution.unused_settings(config.device),
        ]
        for line in unused:
            logger.warning("%s", line)
        for what, chosen in self.algorithm.about().items():
            logger.info("%s: %s", what, chosen)

    def _call_doctor(self) -> Doctor:
        """Return the doctor of the run, which looks only in iterations whose rows are written."""
        config = self.config
        rollouts = [] if config.until.iterations is None else [float(config.until.iterations)]
        if config.total_steps is not None:
            rollouts.append(config.total_steps / (self.algorithm.horizon * config.env.num_envs))
        try:
            settings = dict(flatten(to_plain(config)))
        except ConfigError:  # an object of the user's own: rules see its metrics, and no settings
            settings = {}
        return Doctor(
            self.algorithm.signals,
            report_spec_of(config.algorithm).rules,
            settings,
            samples=self.algorithm.horizon * config.env.num_envs * plan_of(config.algorithm).epochs,
            rollouts=min(rollouts, default=None),
            unit=config.log_every * self.algorithm.iterations_per_tick,
            rows=self.folder.rows() if config.doctor else (),
            on_gpu=self.env.spec.device.type == "cuda",
            enabled=config.doctor,
        )

    def __repr__(self) -> str:
        return f"Trainer({self.config.env.id}, iteration {self.progress.iteration}, {self.progress.env_steps:,} steps)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._resources.__exit__(*raised)

    def _save_on_exit(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None and not self.finished:
            self.folder.save(self.state, final=True)

    def close(self) -> None:
        """Save the training state and free everything, as leaving the `with` statement does."""
        self.__exit__(None, None, None)

    @property
    def finished(self) -> bool:
        """True once the budget is used up or an end condition holds; see `progress.ended_by`."""
        return self.progress.ended_by is not None

    @property
    def done(self) -> bool:
        """True if `learn` returns now: the run ended, or the requested iterations are done."""
        stopped = self.guard.stop_signal is not None
        return self.finished or stopped or self.progress.iteration >= self._last_iteration

    def learn(self, iterations: int | None = None) -> Algorithm[Any]:
        """Train for some iterations or to the end of the run, and return the algorithm.

        SIGINT or SIGTERM stops training after the iteration, saves the state and raises
        `RunStopped`. If an environment fails, the state before its rollout is saved and `RunFailed`
        raised; any other error is raised as it is, after the same rescue.
        """
        self._last_iteration = math.inf if iterations is None else self.progress.iteration + iterations
        self.progress.start_clock()
        with self.guard.running(), self.callbacks.training(self):
            while not self.done:
                with self.guard.iteration():
                    rollout = self.collect()
                    metrics = self.update(rollout)
                self.progress.add(metrics, rollout.valid)
                self.log()
                self.save()
            self._end()
        return self.algorithm

    def collect(self) -> Rollout[Any]:
        """Step every environment T times with the current policy."""
        activity.begin(f"collecting iteration {self.progress.iteration + 1}")
        self.callbacks.call("on_rollout_start", self)
        with self.guard.collecting(), self.directory.during("step()"):
            self.algorithm.set_progress(self.progress.fraction)
            report_progress(self.env, self.progress.for_env())
            self.algorithm.begin_iteration()
            rollout = self.programs.collect()
        self.doctor.measure(rollout, self.progress.iteration + 1)
        self.callbacks.call("on_rollout_end", rollout, self)
        return rollout

    def update(self, rollout: Rollout[Any]) -> Metrics:
        """Learn from the rollout; return metrics of algorithm, opponents and simulator."""
        activity.begin(f"learning from iteration {self.progress.iteration + 1}")
        with self.guard.updating():
            metrics = self.programs.update(rollout)
        opponents = self._adapt_opponents(self.algorithm.policy)
        return metrics | opponents | self.collector.env_metrics() | self.doctor.signals

    def log(self) -> None:
        """Write a row about the last iterations if it is due."""
        if self._row_is_due():
            self.log_now()

    def log_now(self) -> None:
        """Write a row about the iterations since the last one, if there are any; the only device read."""
        if not self.progress.unread:
            return
        report = self.progress.report(self._read_episodes(), self.collector.read_host_metrics())
        self.guard.check_metrics(report)
        report.metrics.update(self.doctor.measure_episodes(report.iteration, self.progress.recent))
        report = self._add_watched(report)
        report = replace(report, findings=self._diagnose(report))
        try:
            stops = self.callbacks.on_iteration(self.on_iteration, report, self.algorithm.policy, self)
        finally:
            row = report.row()
            self.folder.log(row)
            self._writers.write(row)
        # One rank stops all.
        self.progress.stopped = self.progress.stopped or distributed.largest(float(stops)) > 0

    def _diagnose(self, report: Report) -> list[Finding]:
        """Return the findings of the doctor; note them in the run's record and warn if they are new."""
        if not self.doctor.enabled:
            return []
        before = self.doctor.findings
        findings = self.doctor.diagnose(report.row(), last=self.done)
        if findings != before and distributed.rank() == 0:
            self.folder.note_findings([finding.plain() for finding in findings])
            for finding in findings:
                if self.doctor.is_new(finding):
                    logger.warning("doctor: %s", finding)
        return findings

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to the next row of the log, or to the current one if `on_iteration` calls this.

        Of several values the last counts. With several ranks, those of the first rank are logged.
        """
        self.callbacks.log("log_metric", name, value)

    def _row_is_due(self) -> bool:
        iteration = self.progress.iteration
        every = self.config.log_every * self.algorithm.iterations_per_tick
        saves = self.folder.saves_at(iteration)
        return iteration % every == 0 or saves or self.progress.may_have_ended or self.done

    def _read_episodes(self) -> Episodes:
        """Return the episodes since the last row; raise NaN or infinity on all ranks."""
        try:
            return self.collector.read_episodes()
        except NonFinite as error:
            if distributed.world_size() == 1:
                raise
            raise first_error_of_ranks(error) from None

    def _add_watched(self, report: Report) -> Report:
        """Add the values of evaluations and other watchers; their time is not training."""
        added: dict[str, float] = {}
        for watcher in self._watchers:
            added |= watcher(self, report)
        self.progress.evaluation = added.get("eval/return")
        if evaluated := {name: value for name, value in added.items() if name.startswith("eval/")}:
            self.callbacks.call("on_evaluation", evaluated, self)
        if self._watchers:
            self.progress.start_clock()
        return replace(report, metrics=report.metrics | added)

    def save(self) -> None:
        """Save a checkpoint or policy if it is due; only after a row, with known counters."""
        activity.begin(f"saving iteration {self.progress.iteration}")
        if not self.progress.unread:
            self.folder.save(self.state)
        if distributed.world_size() == 1:  # several ranks exchange signals in the next iteration
            self.guard.sync_stop_signal()

    def _end(self) -> None:
        """Write the last row; save the run at its end, raise RunStopped after a signal."""
        self.log_now()
        stopped_by = self.guard.stop_signal
        if self.finished or stopped_by is not None:
            self.folder.save(self.state, final=True)
        if stopped_by is not None and not self.finished:
            raise RunStopped(stopped_by, self.progress.env_steps)


def train(config: RunConfig, on_iteration: Callable[..., Any] = ignore, **options: Any) -> Algorithm[Any]:
    """Train to the end of the run and return the algorithm; `options` are further arguments of `Trainer`.

    SIGINT or SIGTERM stops training after the iteration, saves the state and raises `RunStopped`.
    """
    with Trainer(config, on_iteration, **options) as trainer:
        return trainer.learn()

"""The main loop."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, Self

from torch import Tensor

from canter.algorithms.base import Algorithm, declared_by, unused_by
from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.distributed.watch import activity
from canter.core.distributed.world import world
from canter.core.seeding import derive_seed
from canter.core.specs import Env, EnvSpec, tell_progress
from canter.core.storage.validity import spec_to_plain
from canter.core.struct import Metrics, to_dicts
from canter.envs import closed_quietly, unused_settings
from canter.envs.contract import EnvironmentFailed
from canter.envs.watchdog import PATIENCE
from canter.runs.metrics import MetricWriter, Writers
from canter.runs.ranks import of_all_ranks
from canter.runs.run_folder import RunFolder
from canter.runs.state import NoFolder, Parts, broadcast_tree
from canter.training.collector import Collector
from canter.training.config import RunConfig
from canter.training.episodes import Episodes, NonFinite
from canter.training.guard import LastGood, RankFailed, RunFailed, StopSignals, agree
from canter.training.progress import Report, Run
from canter.training.self_play import seat_opponents

logger = logging.getLogger(__name__)


STOP = "stop"
"""What `on_iteration` returns to end the run; `False` does too."""


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

    `on_iteration` is called with every row of the log, as `on_iteration(report, policy, trainer)` or with as many of
    these as it takes; where it returns `canter.STOP`, or False, the run ends there. `writers`, such as a console, get
    the row as a mapping. An `env`
    given here is used instead of the one that the settings describe, and is left open. With a `folder`, metrics and
    checkpoints are kept there, and a run that was interrupted goes on from its newest checkpoint. Leaving the `with`
    statement, or `close()`, saves what was learned and frees everything. `begin` may give the algorithm its first
    weights, before anything is written; `begun` is what it returns.
    """

    def __init__(
        self,
        config: RunConfig,
        on_iteration: Callable[..., Any] = lambda report: None,
        *,
        env: Env | None = None,
        folder: RunFolder | None = None,
        writers: Sequence[MetricWriter] = (),
        begin: Callable[[Algorithm[Any]], Any] | None = None,
    ) -> None:
        self.config, self.on_iteration, self.stop = config, on_iteration, StopSignals()
        self._told = _count_parameters(on_iteration)
        with ExitStack() as opened:
            if world.start():
                opened.callback(world.end)
            world.limit(config.execution.rank_timeout)
            config.execution.start(config.device)
            env = opened.enter_context(closed_quietly(config.env.build(config.device))) if env is None else env
            self.env, self._adapt = seat_opponents(env, config.self_play, config.seed)
            self.algorithm: Algorithm[Any] = config.algorithm.build(self.env.spec, config.seed)
            self.algorithm.use_engine(config.execution.engine)
            self.begun = None if begin is None else begin(self.algorithm)
            self._log_decisions()
            patience = min(PATIENCE, config.env.step_timeout)
            self.collector = Collector(self.env, self.algorithm, derive_seed(config.seed, "env"), patience)
            opened.enter_context(closing(self.collector.watchdog))
            steps_metric = declared_by(config.algorithm).optimizer_steps
            watched = steps_metric, config.recent_episodes
            self.run = Run(config.total_steps, config.success, self.collector.clock, config.until, *watched)
            self._parts = Parts(self.algorithm, self.collector, self.run, config.seed)
            self._last_good = LastGood(self._parts, self.collector, reads_late=config.log_every > 1)
            self.programs = config.execution.prepare(self.collector, self.algorithm, self._last_good.settle)
            path = None if folder is None else folder.path
            self._watchers = config.watchers(path) if distributed.rank() == 0 else []
            for watcher in self._watchers:
                opened.callback(watcher.close)
            self.folder = NoFolder() if folder is None else opened.enter_context(of_all_ranks(folder))
            self._writers = opened.enter_context(Writers(writers))
            self.folder.restore(self._parts)
            self._adapt(self.algorithm.policy)
            self._writers.start(config)
            opened.push(self._save_the_rest)
            self._opened = opened.pop_all()
        self._metrics: Metrics = {}
        self._fraction: float | Tensor = 0.0
        self._under_way = self._boxed = False
        self._asked: signal.Signals | None = None
        """The signal that ends the run here, on whichever rank it came."""
        self._last = math.inf
        """Iteration at which `learn` is to return."""

    def _log_decisions(self) -> None:
        """Settings that have no part here, as warnings, and which engine computes what."""
        config = self.config
        for line in (*unused_settings(config.env, config.device), *unused_by(config.algorithm, self.env.spec)):
            logger.warning("%s", line)
        for what, chosen in self.algorithm.about().items():
            logger.info("%s: %s", what, chosen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    def _save_the_rest(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """On leaving without an error: what was learned since the last checkpoint."""
        if error is None and not self.finished:
            self.folder.save(self._parts, final=True)

    def close(self) -> None:
        """Save what was learned and free everything, as leaving the `with` statement does."""
        self.__exit__(None, None, None)

    @property
    def finished(self) -> bool:
        """Whether the budget is used up or a condition for the end is met; `run.ended_by` names it."""
        return self.run.ended_by is not None

    def learn(self, iterations: int | None = None) -> Algorithm[Any]:
        """Train for so many iterations, or to the end of the run; may be called again. Gives the algorithm.

        SIGINT or SIGTERM ends it after the iteration, saves and raises `RunStopped`. An environment that fails raises
        `RunFailed`, and whatever else is raised goes on its way, once the state from before is saved.
        """
        self._last = math.inf if iterations is None else self.run.iteration + iterations
        self.run.start_clock()
        self._last_good.arm()
        with self.stop, self._rescued():
            self._asked = None
            while not self.finished and self.run.iteration < self._last and self._asked is None:
                with self._meeting(Exception):
                    self._begin()
                    tell_progress(self.env, self.run.for_env())
                    self.algorithm.begin_iteration()
                    rollout = self.programs.collect()
                activity.begin(f"learning from iteration {self.run.iteration + 1}")
                with self._meeting(NonFinite):
                    metrics = self.programs.update(rollout)
                metrics = metrics | self._adapt(self.algorithm.policy) | self.collector.env_metrics()
                self.count(metrics, rollout)
                self.log()
                self.save()
            self.log(now=True)
            if self.finished or self._asked is not None:
                self.folder.save(self._parts, final=True)
            if self._asked is not None and not self.finished:
                raise RunStopped(self._asked, self.run.env_steps)
        return self.algorithm

    def _begin(self) -> None:
        """Tell how far the run is, and keep what the iteration will change, in case that it fails."""
        activity.begin(f"collecting iteration {self.run.iteration + 1}")
        self._fraction = self.run.fraction
        self.algorithm.set_progress(self._fraction)
        self._last_good.begin()
        self._under_way = True

    @contextmanager
    def _meeting(self, kind: type[Exception]) -> Iterator[None]:
        """What every rank does for itself before all meet and hear of signals, and of errors of that `kind`.

        Where it fails on one rank it so does on all, and they can save together what was before. What is inside must
        have no exchange that is left out where an error of that kind is raised.
        """
        failed: Exception | None = None
        try:
            yield
        except kind as error:
            if distributed.world_size() == 1 or isinstance(error, distributed.RankLost):
                raise
            failed = error
        if self._hear_signals(failed is not None):
            self._under_way = True  # also where it failed before it had begun, alike on all ranks
            raise agree(failed) from None

    @contextmanager
    def _rescued(self) -> Iterator[None]:
        """Save the state from before an error that is raised inside; of several ranks only where all know of it."""
        try:
            yield
        except Exception as error:
            if distributed.world_size() > 1 and not isinstance(error, RankFailed):
                error.add_note("What was learned since the last checkpoint is lost")
                raise
            # On a GPU it is read after some more iterations.
            good = error.before if isinstance(error, NonFinite) and not self._under_way else None
            kept = self._rescue(error, good)
            if isinstance(error, EnvironmentFailed | NonFinite | RankFailed):
                raise RunFailed(str(error), kept, getattr(error, "rank", 0)) from error
            error.add_note(kept)
            raise

    def _rescue(self, error: Exception, good: int | None) -> str:
        """Save the state after the last good iteration, the `good`-th since the last reading; says what was saved.

        None where all that were counted are good.
        """
        run, last = self.run, self._last_good
        if not self._under_way and good is None:  # the last iteration was complete
            tree = {name: part.state_dict() for name, part in self._parts.by_name().items()}
            return self.folder.rescue(self._parts, tree, error)
        counted, self._metrics = run.iteration - last.iteration, self._metrics if good is None else {}
        good = counted if good is None else good
        rollout = to_dicts(last.rollout_after(good))
        tree = last.before(good)
        if isinstance(error, NonFinite):
            self._write_black_box(str(error), tree, rollout, getattr(error, "rank", None))
        run.forget_after(good)
        self._under_way = False
        try:
            self.log(now=True)
        except NonFinite as earlier:
            return self._rescue(earlier, earlier.before)
        except Exception as failure:  # a console or a writer: no reason to lose the state as well
            if distributed.world_size() > 1:  # the other ranks have not met it
                raise
            logger.warning("the last row of the log was lost: %s: %s", type(failure).__name__, failure)
        return self.folder.rescue(self._parts, tree | {"run": run.state_dict()}, error)

    def _write_black_box(
        self, what: str, tree: dict[str, Any], rollout: dict[str, Any] | None, rank: int | None = None
    ) -> None:
        """Keep the state before something was not finite, and the rollout, if that is still the one.

        `rank` is the one that met it, where all ranks call this.
        """
        about = {"what": what, "env_spec": environment_of(self.env.spec), "progress": float(self._fraction)}
        about |= {"rank": distributed.rank(), "ranks": distributed.world_size()}
        box = {"about": about, "rollout": rollout} | tree
        self.folder.black_box(box if rank is None else broadcast_tree(box, rank) or box)

    def _explain_metrics(self, report: Report) -> None:
        """Keep what explains the first metric that is not finite; the optimiser has left out such steps."""
        good, counted = self.collector.tracker.unclean, len(self._last_good.random)
        if good is None:
            self._last_good.read()
            return
        if not self._boxed:
            self._boxed = True
            names = [name for name, value in report.metrics.items() if not math.isfinite(value)]
            what = f"not finite after iteration {report.iteration}: {', '.join(names[:5]) or 'a metric before that'}"
            steps = self.collector.steps_before - (counted - good) * self.algorithm.horizon
            tree = {"collector": {"steps_before": steps}} | self._last_good.before_unclean(good)
            self._write_black_box(what, tree, to_dicts(self._last_good.rollout_after(good)))
            logger.warning("%s; steps by such gradients are left out. `canter explain` names the cause", what)
        self._last_good.arm()

    def count(self, metrics: Metrics, rollout: Rollout[Any]) -> None:
        """Take note of an iteration; nothing waits for the device."""
        self._metrics, self._under_way = metrics, False
        self._last_good.count()
        self.run.add(metrics, rollout.valid)
        self.collector.keep_episodes(self._last_good.flags)

    def log(self, *, now: bool = False) -> None:
        """Write a row about the iterations since the one before, if it is time or `now`; reads from the device."""
        run, every = self.run, self.config.log_every * self.algorithm.pace
        due = now or run.may_have_ended or run.iteration >= self._last or self._asked is not None
        due = due or run.iteration % every == 0 or self.folder.saves_at(run.iteration)
        if not due or not run.unread:
            return
        report = run.report(self._metrics, self._read_episodes())
        self._explain_metrics(report)
        report = self._watched(report)
        row = report.row()
        self.folder.log(row)
        self._writers.write(row)
        answer = self.on_iteration(*(report, self.algorithm.policy, self)[: self._told])
        stops = answer is False or (isinstance(answer, str) and answer == STOP)
        run.stopped = run.stopped or distributed.largest(float(stops)) > 0  # one rank stops all

    def _read_episodes(self) -> Episodes:
        """Episodes since the last row; what is not finite in them on one rank is an error of all."""
        try:
            return self.collector.read_episodes()
        except NonFinite as error:
            if distributed.world_size() == 1:
                raise
            raise agree(error) from None

    def _watched(self, report: Report) -> Report:
        """The report with what evaluations and the like add to it; their time is not the run's."""
        added: dict[str, float] = {}
        for watcher in self._watchers:
            added |= watcher(self, report)
        self.run.evaluation = added.get("eval/return")
        if self._watchers:
            self.run.start_clock()
        return replace(report, metrics=report.metrics | added)

    def save(self) -> None:
        """Save what it is time for; only after a row, when the counters are known."""
        activity.begin(f"saving iteration {self.run.iteration}")
        if not self.run.unread:
            self.folder.save(self._parts)
        if distributed.world_size() == 1:  # ranks hear of it where they meet next
            self._hear_signals()

    def _hear_signals(self, failed: bool = False) -> bool:
        """Find out whether a signal has come on any rank: all must end after the same iteration.

        Also whether any rank has `failed`.
        """
        number, failures = distributed.largest_of(self.stop.received or 0, failed)
        self._asked = signal.Signals(int(number)) if number else None
        return failures > 0


def environment_of(spec: EnvSpec) -> dict[str, Any]:
    """All that an algorithm is built by, as plain data."""
    own = {key: getattr(spec, key) for key in ("num_envs", "final_obs", "truncates", "num_agents", "durations")}
    return {"spec": spec_to_plain(spec)} | own


def _count_parameters(function: Callable[..., Any]) -> int:
    """How many of three arguments a function takes by their places, at least one."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions that are written in C
        return 1
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    # One with a default is left alone: `lambda report, rows=rows: ...` binds a name.
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return min(max(len(taken), 1), 3)


def train(
    config: RunConfig,
    on_iteration: Callable[..., Any] = lambda report: None,
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

"""The folder of a run: settings, metrics, checkpoints and policies, with one writer at a time."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from canter.core import distributed
from canter.core.plain import ConfigError, check_range, to_plain
from canter.core.specs import EnvFailed, Stateful
from canter.core.storage.checkpoint import CheckpointCorrupt, CheckpointStore, NoCheckpoint, save_checkpoint
from canter.core.storage.files import Unreadable, dump_plain, replace_file
from canter.core.storage.lock import RunLock
from canter.core.storage.validity import NonFiniteParameters, check_finite, check_same, check_same_shape
from canter.envs.failures import error_chain
from canter.nn.policy_file import POLICIES
from canter.runs.changes import EDITS, ChangeCheck
from canter.runs.metrics import DAMAGED, METRICS, MetricsLog, Row, read_rows
from canter.runs.permissions import save_trusted_modules
from canter.runs.policies import Policies, ProgressSnapshot
from canter.runs.records import CONFIG, TRACEBACK_IN, RunRecord, link_latest
from canter.runs.state import ProgressSource, TrainState, current_fingerprint, gather_ranks, request_gather

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
TRACEBACK = "traceback.txt"
BLACK_BOX = "black_box"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Schedule of checkpoints and policies, and how many are kept."""

    save_every: int = 50
    """Iterations between checkpoints (thousands of steps for algorithms with short iterations);
    there is always one at the end."""
    save_seconds: float | None = None
    """Seconds after which the next row of the log also writes a checkpoint, which limits what a
    killed run loses; null for never. Does not change what is learned."""
    keep_last: int = 3
    """Number of newest checkpoints that are kept."""
    num_checkpoints: int = 0
    """Number of checkpoints spread evenly over the run that are kept for ever, each with a numbered
    policy file."""
    best: bool = True
    """Keep the best policy."""
    best_by: Literal["return", "lta", "evaluation"] | None = None
    """Score of the best policy: mean return of the last 100 episodes (`return`), raw reward per
    unit of time in the last 20 rollouts (`lta`), or mean return of an evaluation (`evaluation`,
    needs `evaluate.every`); null for `lta` with the objective `average`, otherwise `return`."""

    def __post_init__(self) -> None:
        """Raise UserError for values outside their range."""
        check_range(self, "must be at least 1", "save_every", "keep_last")
        check_range(self, "must not be negative", "num_checkpoints")
        check_range(self, "must be above 0", "save_seconds")


class RunFolder:
    """All files of one run, locked while it is entered.

        config.yaml     the settings
        run.json        when, where and how it ran, and how it ended
        metrics.jsonl   one row per iteration, or per `log_every` iterations
        checkpoints/    step-000000001234/, ...: the complete state, to resume exactly
        crash.txt       line that crashed the process (segmentation fault, abort), if one did
        traceback.txt   traceback of the error that ended the run, if one did
        black_box/      rollout, weights and random states before the first NaN or infinity, if any
        policies/       best, step-000123456, ..., final_actor and final_critic, each usable alone

    Entering creates the folder and points the link `latest`, next to it, to it; nothing is written
    before. `settings` is the text of `config.yaml`, which is replaced only after a checkpoint has
    been found to fit; without it the `Trainer` fills in its own settings (`adopt`). `examine` is
    called before that with the settings and the progress of the checkpoint, and may raise to
    refuse.

    A run whose checkpoints are lost does not start over by itself. `from_scratch` makes it, and
    moves the files of the earlier attempt to a separate folder.

    A full or failing disk costs only what is being written, never the run or an older file.

    With several ranks only rank 0 has such a folder; the others exchange state with it, see
    `canter.runs.ranks`.
    """

    def __init__(
        self,
        path: str | Path,
        checkpoints: CheckpointConfig | None = None,
        *,
        settings: str | None = None,
        examine: Callable[[str | None, ProgressSnapshot], None] | None = None,
        from_scratch: bool = False,
    ) -> None:
        self.path = Path(path)
        self._own_schedule = checkpoints is not None
        self.settings = settings
        self.examine = examine
        self.from_scratch = from_scratch
        self.lock = RunLock(self.path)
        self.record = RunRecord(self.path)
        self.metrics = MetricsLog(self.path / METRICS)
        self._schedule(checkpoints or CheckpointConfig())
        self.iterations_per_tick = 1
        """Iterations that count as one in `save_every`, see `Algorithm.iterations_per_tick`."""
        self._run: ProgressSource | None = None
        """Counters of the run; None before `restore`."""
        self._identity = uuid.uuid4().hex
        """Unique id of the run, which checkpoints and the record share."""
        self._saved: int | None = None
        """Iteration of the checkpoint that this process wrote or read last."""
        self._saved_at = time.monotonic()
        self._milestones = 0
        """Number of passed milestones: checkpoints that are kept for ever."""

    def _schedule(self, checkpoints: CheckpointConfig) -> None:
        """Save checkpoints and policies by these settings."""
        self.config = checkpoints
        self.store = CheckpointStore(self.path / CHECKPOINTS, keep_last=checkpoints.keep_last)
        self.policies = Policies(self.path / POLICIES, checkpoints.best_by or "return")

    def adopt(self, config: Any, notify: Callable[[str], Any] = logger.warning) -> None:
        """Take the settings of a run, and its schedule of checkpoints, if the folder was made without any.

        They are written to `config.yaml`. If the run is resumed, changes that cannot be are
        refused, and `notify` is called with the others.
        """
        if not self._own_schedule:
            self._own_schedule = True
            self._schedule(config.checkpoint_schedule)
        if self.settings is not None:
            return
        try:
            self.settings = dump_plain(to_plain(config))
        except ConfigError as error:
            notify(f"{self.path / CONFIG} was not written, so no command can use this run: {error}")
            return
        self.examine = ChangeCheck(self.path, config, notify=notify)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self.path.mkdir(parents=True, exist_ok=True)
            undo.enter_context(self.lock)
            if self.from_scratch:
                archive_attempt(self.path)
            refuse_links(self.path)
            if self.settings is not None and not (self.path / CONFIG).exists():
                replace_file(self.path / CONFIG, self.settings.encode())
            self.policies.open()
            link_latest(self.path)
            undo.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        run = self._run
        self._run = None
        if run is not None:
            self._record_end(run.progress().ended_by, error)
        self.lock.__exit__(kind, error, traceback)

    def _record_end(self, ended_by: str | None, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            self.record.end("failed", error)
        elif error is None and ended_by is not None:
            self.record.end("finished", ended_by=ended_by)
        else:
            self.record.end("stopped")

    # Resuming

    def restore(self, state: TrainState) -> bool:
        """Restore the newest valid checkpoint; return False if none was ever written.

        Raises NoCheckpoint if all checkpoints are corrupt, or if there is none although metrics or
        policies show that the run has trained. Raises Mismatch, and leaves all files unchanged, if
        the checkpoint is of another run, seed, environment, network, optimizer or iteration.
        """
        self.iterations_per_tick = state.algorithm.iterations_per_tick
        found = bool(self.store.steps())
        if found:
            self._restore_checkpoint(state)
        else:
            self._check_untrained()
            state.scatter(None)
            self._identity = self.record.identity or self._identity
        self.metrics.truncate_after(self._saved or 0)
        if self.settings is not None:
            replace_file(self.path / CONFIG, self.settings.encode())
        self._run = state.run
        self._milestones = self._passed_milestones(state.run.progress())
        self.record.begin(self._identity, state.algorithm.about())
        save_trusted_modules(self.path, self._identity)
        return found

    def _restore_checkpoint(self, state: TrainState) -> None:
        iteration, tree = self.store.load_latest()
        tree = state.scatter(tree) or tree
        self._check_fits(iteration, tree, state)
        for name, component in state.components().items():
            self._load_component(component, name, tree[name], iteration)
        progress = state.run.progress()
        what = f"checkpoint {self.store.path(iteration)}"
        check_same(what, {"iteration": progress.iteration}, {"iteration": iteration})
        self._saved = iteration
        self._identity = tree["identity"]["run"]
        if self.examine is not None:
            self.examine(tree["identity"]["settings"], progress)

    def _check_fits(self, iteration: int, tree: dict[str, Any], state: TrainState) -> None:
        """Raise Mismatch or CheckpointCorrupt unless the checkpoint was made by such a run."""
        what = f"checkpoint {self.store.path(iteration)}"
        check_same(what, {"parts": sorted(tree)}, {"parts": sorted(["identity", "made_for", *state.components()])})
        match tree["identity"]:
            case {"run": str(run), "settings": str() | None}:
                check_same(what, {"run": run}, {"run": self.record.identity or run})
            case _:
                raise CheckpointCorrupt(self.store.path(iteration), "it does not say which run it is of")
        here = state.fingerprint()
        check_same(what, current_fingerprint(tree["made_for"], here), here)
        variable = state.algorithm.variable_size_keys

        def fixed_size(algorithm: dict[str, Any]) -> dict[str, Any]:
            return {"algorithm": {name: value for name, value in algorithm.items() if name not in variable}}

        check_same_shape(what, fixed_size(tree["algorithm"]), fixed_size(state.algorithm.state_dict()))

    def _load_component(self, component: Stateful, name: str, saved: Any, iteration: int) -> None:
        try:
            component.load_state_dict(saved)
        except EnvFailed:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"its {name} cannot be restored ({type(error).__name__}: {error})"
            raise CheckpointCorrupt(self.store.path(iteration), reason) from error

    def _check_untrained(self) -> None:
        """Raise NoCheckpoint if there are results of training, which must not restart by itself."""
        if leftovers := self.leftovers():
            raise NoCheckpoint(
                f"{self.path} has {' and '.join(leftovers)} but no checkpoint in {self.store.folder}, and a run does "
                f"not start over by itself. To start from scratch: canter resume {self.path} --from-scratch"
            )

    def leftovers(self) -> list[str]:
        """Return the kinds of results, except checkpoints, that show that the run has trained."""
        has_metrics = self.metrics.path.is_file() and self.metrics.path.stat().st_size > 0
        has_policies = any((self.path / POLICIES).glob("*.safetensors"))
        return ["metrics"] * has_metrics + ["policies"] * has_policies

    # Training

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics log."""
        self.metrics.append(row)

    def rows(self) -> list[Row]:
        """Return the rows of the log so far."""
        return list(read_rows(self.metrics.path))

    def note_findings(self, findings: list[dict[str, Any]]) -> None:
        """Note the findings of the doctor in the record of the run."""
        self.record.note(findings=findings)

    def saves_at(self, iteration: int) -> bool:
        """Return whether a checkpoint is due after that iteration by its number."""
        return iteration % (self.config.save_every * self.iterations_per_tick) == 0

    def save(self, state: TrainState, *, final: bool = False) -> None:
        """Save what is due; called after every iteration, and with `final` at the end.

        Raises NonFiniteParameters instead of writing a checkpoint or policy with NaN or infinity.
        """
        self._save_due(state, final=final)
        request_gather(False)

    def _save_due(self, state: TrainState, *, final: bool) -> None:
        progress = state.run.progress()
        passed = self._passed_milestones(progress)
        is_milestone = passed > self._milestones
        self._milestones = passed
        if self.config.best:
            self.policies.consider(state.algorithm, progress)
        if not (final or is_milestone or self._is_late() or self.saves_at(progress.iteration)):
            return
        # Policies first: if a kill prevents one, the run that resumes from the checkpoint before
        # writes it again.
        self.policies.save_best()
        if is_milestone:
            self.policies.save_numbered(state.algorithm, progress)
        if final:
            self.policies.save_final(state.algorithm, progress)
        if progress.iteration != self._saved:
            self._save_checkpoint(state.gather(), state, keep=is_milestone)

    def _passed_milestones(self, progress: ProgressSnapshot) -> int:
        fraction = min(progress.fraction, 1.0)
        return math.floor(fraction * self.config.num_checkpoints + 1e-9)  # 3 * (1 / 3) may be below 1

    def _is_late(self) -> bool:
        seconds = self.config.save_seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def _save_checkpoint(self, tree: dict[str, Any], state: TrainState, *, keep: bool) -> None:
        iteration = state.run.progress().iteration
        check_finite({"algorithm": tree["algorithm"]}, f"checkpoint of iteration {iteration}")
        identity = {"run": self._identity, "settings": self.settings}
        try:
            self.store.save(iteration, {"identity": identity, "made_for": state.fingerprint(), **tree}, keep=keep)
            self._saved = iteration
            self._saved_at = time.monotonic()
        except (OSError, CheckpointCorrupt) as error:
            logger.error("checkpoint of iteration %d was not saved (%s); older ones are intact", iteration, error)

    @property
    def unsaved(self) -> list[str]:
        """Files that a full or failing disk has prevented so far."""
        reached = None if self._run is None else self._run.progress().iteration
        checkpoint = [] if reached == self._saved else [f"the checkpoint of iteration {reached}"]
        metrics = [f"{len(self.metrics.pending)} rows of metrics"] if self.metrics.pending else []
        return [*checkpoint, *metrics, *sorted(self.policies.unsaved)]

    # Failing

    def rescue(self, state: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Save `tree`, the state before an error, and the traceback; return what was saved.

        The counters in `state` are those of `tree`. All ranks call it together.
        """
        saved = self._rescue(state, gather_ranks(tree, state.algorithm.policy.actor.state_dict()), error)
        return distributed.broadcast_bytes(saved.encode()).decode()

    def _rescue(self, state: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        progress = state.run.progress()
        trace = self._write_traceback(error)
        self.policies.save_best()
        with suppress(NonFiniteParameters):
            if progress.iteration != self._saved:
                self._save_checkpoint(tree, state, keep=False)
        if progress.iteration != self._saved:
            return f"The state before it could not be saved, older checkpoints are intact; the traceback is in {trace}"
        plural = "" if progress.iteration == 1 else "s"
        done = f"{progress.iteration} iteration{plural} ({progress.env_steps:,} steps)"
        reason = tree["collector"]["episodes_restart"]
        restart = "" if reason is None else f"; episodes will restart, as {reason}"
        lost = "Only that rollout was lost, and nothing was learned from it"
        return f"{lost}: {done} are saved{restart}. {TRACEBACK_IN} {trace}"

    def black_box(self, tree: dict[str, Any]) -> None:
        """Save what explains a NaN, replacing an older one."""
        try:
            save_checkpoint(self.path / BLACK_BOX, tree, replace=True)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s could not be written (%s)", self.path / BLACK_BOX, error)

    def _write_traceback(self, error: BaseException) -> Path:
        lines = traceback.format_exception(error)
        for link in error_chain(error):
            # EnvFailed has `trace`, an error of another rank has `where` too; other errors have
            # neither.
            if trace := getattr(link, "trace", ""):
                lines.append(f"\n{getattr(link, 'where', 'in the process of the environment')}:\n{trace}")
        path = self.path / TRACEBACK
        try:
            replace_file(path, "".join(lines).encode(errors="replace"))
        except OSError as failure:
            logger.error("%s could not be written (%s)", path, failure)
        return path


def refuse_links(path: Path) -> None:
    """Raise Unreadable for links in a run folder and for files instead of folders."""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_symlink():
            raise Unreadable(f"{entry.path} is a link; a run writes only into its own folder, so remove it first")
        if entry.name in (CHECKPOINTS, POLICIES) and not entry.is_dir():
            raise Unreadable(f"{entry.path} is not a folder; remove it first")


def archive_attempt(path: Path) -> None:
    """Move the files of an earlier attempt to a folder `before-1`, `before-2`, ..."""
    left = [name for name in (CHECKPOINTS, POLICIES, METRICS, DAMAGED, EDITS) if os.path.lexists(path / name)]
    if left:
        aside = next(path / f"before-{n}" for n in itertools.count(1) if not os.path.lexists(path / f"before-{n}"))
        aside.mkdir()
        for name in left:
            os.rename(path / name, aside / name)
        logger.warning("%s of the earlier attempt are now in %s", ", ".join(left), aside)

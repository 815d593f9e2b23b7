"""What a run leaves on disk: settings, metrics, checkpoints and policies, with one writer at a time."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from canter.core.registry import UserError
from canter.core.specs import EnvFailed, Stateful
from canter.core.storage.checkpoint import CheckpointCorrupt, CheckpointStore, NoCheckpoint, save_checkpoint
from canter.core.storage.files import Unreadable, append, open_untrusted, replace_file
from canter.core.storage.lock import RunLock
from canter.core.storage.tree import Malformed, parse_json
from canter.core.storage.validity import NonFiniteParameters, check_finite, check_same, check_same_shape
from canter.nn.policy_file import POLICIES
from canter.runs.permissions import save_trusted_modules
from canter.runs.policies import Policies, ProgressSnapshot
from canter.runs.records import CONFIG, LATEST, MAX_BYTES, MAX_LINE, METRICS, RunRecord
from canter.runs.state import ProgressSource, TrainState

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
DAMAGED, EDITS = "metrics.damaged.jsonl", "edits.jsonl"
MAX_UNWRITTEN = 10_000
"""Metric lines that wait for room on the disk."""
TRACEBACK = "traceback.txt"
BLACK_BOX = "black_box"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is saved, and how much of it is kept."""

    save_every: int = 50
    """Iterations between checkpoints, or so many thousand steps with an algorithm of short iterations; there is one at
    the end in any case."""
    save_seconds: float | None = None
    """Also as soon as so many seconds have passed since the last one and a row of the log is written: what a rank that
    is killed costs at most. Null for never. Does not change what is learned."""
    keep_last: int = 3
    """How many of the newest checkpoints stay."""
    num_checkpoints: int = 0
    """Checkpoints spread evenly over the run that stay for ever, each with a numbered policy file."""
    best: bool = True
    """Keep the best policy."""
    best_by: Literal["return", "lta", "evaluation"] = "return"
    """What makes it the best: the mean return of the last 100 episodes, the raw reward per unit of time in the last
    20 rollouts, once there were as many, or the mean return of an evaluation (`evaluate.every`)."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        for name, least in (("save_every", 1), ("keep_last", 1), ("num_checkpoints", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise UserError(f"save_seconds={self.save_seconds} must be above 0, or null")


class RunFolder:
    """Everything that one run leaves, locked while it is entered.

        config.yaml     the settings
        run.json        when, where and how it ran, and how it ended
        metrics.jsonl   a line per iteration, or per `log_every` of them
        checkpoints/    step-000000001234/, ...: what is needed to go on exactly
        traceback.txt   what raised the error that ended it, if one did
        black_box/      rollout, weights and random states before something was NaN or infinite, if that happened
        policies/       best, step-000123456, ..., final_actor and final_critic, each usable alone

    Entering makes the folder and lets `latest` beside it point to it. Nothing is touched before. `settings` is the text
    of `config.yaml`, which changes only once a checkpoint was found to fit; None leaves the file as it is. `examine` is
    called before, with the settings that the checkpoint was made with and how far it is, and may refuse to go on.

    A run whose checkpoints are gone does not start over by itself. `from_scratch` means it: what there is of an earlier
    attempt is set aside, and nothing of it is deleted.

    A disk that is full or fails costs what was being written, never the run and never an older checkpoint or policy.
    """

    def __init__(
        self,
        path: str | Path,
        checkpoints: CheckpointConfig | None = None,
        *,
        settings: str | None = None,
        examine: Callable[[str | None, ProgressSnapshot], None] = lambda settings, progress: None,
        from_scratch: bool = False,
    ) -> None:
        self.path = path = Path(path)
        self.settings, self.config = settings, checkpoints or CheckpointConfig()
        self.examine, self.from_scratch = examine, from_scratch
        self.metrics = path / METRICS
        self.store = CheckpointStore(path / CHECKPOINTS, keep_last=self.config.keep_last)
        self.policies = Policies(path / POLICIES, self.config.best_by)
        self.lock, self.record = RunLock(path), RunRecord(path)
        self._run: ProgressSource | None = None
        """What is being written down; None before `restore`."""
        self._saved: int | None = None
        """Iteration of the checkpoint that this process wrote or read last."""
        self._saved_at = time.monotonic()
        self.iterations_per_tick = 1
        """Iterations that count as one in `save_every`, see `Algorithm.iterations_per_tick`."""
        self._milestones = 0
        """How many of the checkpoints that are kept for ever lie behind."""
        self._identity = uuid.uuid4().hex
        self._unwritten: deque[str] = deque(maxlen=MAX_UNWRITTEN)
        """Metric lines for which the disk had no room."""

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
            _point_to(self.path)
            undo.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        run, self._run = self._run, None
        if run is not None:
            ended_by = run.progress().ended_by if error is None else None
            ending = "stopped" if ended_by is None else "finished"
            if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
                ending = "failed"
            self.record.end(ending, error if ending == "failed" else None, ended_by)
        self.lock.__exit__(kind, error, traceback)

    def restore(self, parts: TrainState) -> bool:
        """Bring all parts to the newest valid checkpoint; False if none was ever taken.

        Raises `NoCheckpoint` where there are some and all are corrupt, or none and metrics or policies tell of a run:
        starting from zero must not happen by itself. Raises `Mismatch`, and leaves all files as they are, where a
        checkpoint was made by another run, with another seed, for another environment, other networks or another
        optimiser, or is not of the iteration that its name says.
        """
        self.iterations_per_tick, found = parts.algorithm.iterations_per_tick, bool(self.store.steps())
        if found:
            self._saved, tree = self.store.load_latest()
            tree = parts.shared(tree) or tree
            self._check(self._saved, tree, parts)
            for name, part in parts.components().items():
                self._load(part, name, tree[name], self._saved)
            progress = parts.run.progress()
            what = f"checkpoint {self.store.path(self._saved)}"
            check_same(what, {"iteration": progress.iteration}, {"iteration": self._saved})
            self._identity = tree["identity"]["run"]
            self.examine(tree["identity"]["settings"], progress)
        elif left := self.leftovers():
            raise NoCheckpoint(
                f"{self.path} has {' and '.join(left)} but no checkpoint in {self.store.folder}, and a run does not "
                f"start over by itself; whoever means it: canter resume {self.path} --from-scratch"
            )
        else:
            self._identity = self.record.identity or self._identity
        self._forget_after(self._saved or 0)
        if self.settings is not None:
            replace_file(self.path / CONFIG, self.settings.encode())
        self._run, self._milestones = parts.run, self._milestones_behind(parts.run.progress())
        self.record.begin(self._identity, parts.algorithm.about())
        save_trusted_modules(self.path, self._identity)
        return found

    def leftovers(self) -> list[str]:
        """What tells that training has been here, besides checkpoints."""
        metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        policies = any((self.path / POLICIES).glob("*.safetensors"))
        return [what for what, there in (("metrics", metrics), ("policies", policies)) if there]

    def saves_at(self, iteration: int) -> bool:
        """Whether a checkpoint is due after that iteration by its number; there may be further ones."""
        return iteration % (self.config.save_every * self.iterations_per_tick) == 0

    def log(self, row: dict[str, Any]) -> None:
        """Append one line; `wall_time` says when. What the disk refuses is tried again with the next one."""
        # JSON knows neither NaN nor infinity.
        fine = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        self._unwritten.append(json.dumps({**fine, "wall_time": time.time()}, allow_nan=False) + "\n")
        try:
            append(self.metrics, "".join(self._unwritten).encode())
            self._unwritten.clear()
        except OSError as error:
            logger.warning("%s could not be written (%s); training goes on", self.metrics, error)

    def save(self, parts: TrainState, *, final: bool = False) -> None:
        """Save what it is time for: called after every iteration, and once more at the end.

        Raises `NonFiniteParameters` before a checkpoint or policy with NaN or infinity in it would be written.
        """
        run, config = parts.run.progress(), self.config
        behind = self._milestones_behind(run)
        milestone, self._milestones = behind > self._milestones, behind
        if config.best:
            self.policies.consider(parts.algorithm, run)
        late = config.save_seconds is not None and time.monotonic() - self._saved_at >= config.save_seconds
        if not (final or milestone or late or self.saves_at(run.iteration)):
            return
        # Policies first: whatever they miss by a kill, the run that goes on from the checkpoint before does again.
        self.policies.save_best()
        if milestone:
            self.policies.save_numbered(parts.algorithm, run)
        if final:
            self.policies.save_final(parts.algorithm, run)
        if run.iteration != self._saved:
            self._save_checkpoint(parts, run.iteration, keep=milestone)

    def rescue(self, parts: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Save a state from before an error instead of the parts' own, and the traceback; says what was saved.

        The counters of the parts are those of `tree`.
        """
        run = parts.run.progress()
        trace = self._note(error)
        self.policies.save_best()
        with suppress(NonFiniteParameters):
            if run.iteration != self._saved:
                self._save_checkpoint(parts, run.iteration, keep=False, tree=tree)
        if run.iteration != self._saved:
            return f"The state before it could not be saved, older checkpoints are intact; the traceback is in {trace}"
        done = f"{run.iteration} iteration{'s' * (run.iteration != 1)} ({run.env_steps:,} steps)"
        restart = tree["collector"]["episodes_restart"]
        anew = "" if restart is None else f"; episodes will start anew, as {restart}"
        lost = "Only that rollout was lost, and nothing was learned from it"
        return f"{lost}: {done} are saved{anew}. The traceback is in {trace}"

    def black_box(self, tree: dict[str, Any]) -> None:
        """Keep what explains a NaN, in the place of an older one."""
        try:
            save_checkpoint(self.path / BLACK_BOX, tree, replace=True)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s could not be written (%s)", self.path / BLACK_BOX, error)

    def _note(self, error: BaseException) -> Path:
        """Write the traceback of what ended the run to a file."""
        lines = traceback.format_exception(error)
        for link in error_chain(error):
            if trace := getattr(link, "trace", ""):
                lines.append(f"\n{getattr(link, 'where', 'in the process of the environment')}:\n{trace}")
        path = self.path / TRACEBACK
        try:
            replace_file(path, "".join(lines).encode(errors="replace"))
        except OSError as failure:
            logger.error("%s could not be written (%s)", path, failure)
        return path

    def _save_checkpoint(self, parts: TrainState, iteration: int, *, keep: bool, tree: dict[str, Any] | None = None) -> None:
        tree = tree or parts.tree()
        check_finite({"algorithm": tree["algorithm"]}, f"checkpoint of iteration {iteration}")
        try:
            identity = {"run": self._identity, "settings": self.settings}
            self.store.save(iteration, {"identity": identity, "made_for": parts.describe(), **tree}, keep=keep)
            self._saved, self._saved_at = iteration, time.monotonic()
        except (OSError, CheckpointCorrupt) as error:
            logger.error("checkpoint of iteration %d was not saved (%s); older ones are intact", iteration, error)

    @property
    def unsaved(self) -> list[str]:
        """What a disk that is full or fails has kept from being written, and still does."""
        reached = None if self._run is None else self._run.progress().iteration
        checkpoint = [] if reached == self._saved else [f"the checkpoint of iteration {reached}"]
        metrics = [f"{len(self._unwritten)} rows of metrics"] if self._unwritten else []
        return [*checkpoint, *metrics, *sorted(self.policies.unsaved)]

    def _check(self, iteration: int, tree: dict[str, Any], parts: TrainState) -> None:
        what = f"checkpoint {self.store.path(iteration)}"
        check_same(what, {"parts": sorted(tree)}, {"parts": sorted(["identity", "made_for", *parts.components()])})
        match tree["identity"]:
            case {"run": str(run), "settings": str() | None}:
                check_same(what, {"run": run}, {"run": self.record.identity or run})
            case _:
                raise CheckpointCorrupt(self.store.path(iteration), "it does not say which run it is of")
        check_same(what, tree["made_for"], parts.describe())
        saved, here = (
            {"algorithm": {name: part for name, part in state.items() if name not in parts.algorithm.variable_size_keys}}
            for state in (tree["algorithm"], parts.algorithm.state_dict())
        )
        check_same_shape(what, saved, here)

    def _load(self, part: Stateful, name: str, state: Any, iteration: int) -> None:
        try:
            part.load_state_dict(state)
        except EnvFailed:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"its {name} cannot be restored ({type(error).__name__}: {error})"
            raise CheckpointCorrupt(self.store.path(iteration), reason) from error

    def _milestones_behind(self, run: ProgressSnapshot) -> int:
        return math.floor(min(run.fraction, 1.0) * self.config.num_checkpoints + 1e-9)  # 3 * (1 / 3) may be below 1

    def _forget_after(self, iteration: int) -> None:
        """Drop metric lines of iterations that are about to be repeated; damaged ones go to a file of their own."""
        damaged = 0

        def kept() -> Iterator[bytes]:
            nonlocal damaged
            with open_untrusted(self.metrics, MAX_BYTES, within=self.path) as file:
                for line in iter(lambda: file.readline(MAX_LINE), b""):
                    number = _iteration_of(line)
                    if number is None:
                        damaged += 1
                        append(self.path / DAMAGED, line.rstrip(b"\n") + b"\n")
                    elif number <= iteration:
                        yield line.rstrip(b"\n") + b"\n"

        if not self.metrics.exists():
            return
        try:
            replace_file(self.metrics, kept())
        except OSError as error:
            logger.warning("%s may tell some iterations twice (%s)", self.metrics, error)
        if damaged:
            logger.warning("%d damaged lines of %s are kept in %s", damaged, self.metrics, self.path / DAMAGED)


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__


def is_unstarted(path: Path) -> bool:
    """Whether a folder is empty, or holds only what a run leaves that died before it had written its settings."""
    scraps = re.compile(r"\.?run\.(lock|json).*|\.config\.yaml\.partial")
    return path.is_dir() and all(scraps.fullmatch(entry.name) for entry in path.iterdir())


def _point_to(path: Path) -> None:
    """Let `latest` beside a run be a link to it; where links are not to be had, there is none."""
    fresh = path.with_name(f".{LATEST}-{os.getpid()}")
    try:
        fresh.symlink_to(path.name)
        os.replace(fresh, path.with_name(LATEST))
    except OSError:
        fresh.unlink(missing_ok=True)


def refuse_links(path: Path) -> None:
    """Refuse to go on in a folder with links, which could lead anywhere, or with no room for checkpoints."""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_symlink():
            raise Unreadable(f"{entry.path} is a link; a run writes only into its own folder, so remove it first")
        if entry.name in (CHECKPOINTS, POLICIES) and not entry.is_dir():
            raise Unreadable(f"{entry.path} is no folder; remove it first")


def archive_attempt(path: Path) -> None:
    """Move what an earlier attempt has left of a run into a folder of its own."""
    left = [name for name in (CHECKPOINTS, POLICIES, METRICS, DAMAGED, EDITS) if os.path.lexists(path / name)]
    if left:
        aside = next(path / f"before-{n}" for n in itertools.count(1) if not os.path.lexists(path / f"before-{n}"))
        aside.mkdir()
        for name in left:
            os.rename(path / name, aside / name)
        logger.warning("%s of the earlier attempt are now in %s", ", ".join(left), aside)


def _iteration_of(line: bytes) -> float | None:
    """The iteration that a line of metrics is about; None if it is none."""
    try:
        return float(parse_json(line)["iteration"])
    except (Malformed, ValueError, LookupError, TypeError, OverflowError):
        return None

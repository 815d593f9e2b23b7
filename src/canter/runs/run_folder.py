"""What a run leaves on disk: settings, metrics, checkpoints and policies, with one writer at a time."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from canter.algorithms.base import Algorithm
from canter.plain import to_plain
from canter.runs.policies import Policies, Progress
from canter.runs.run_record import RunRecord
from canter.specs import Stateful
from canter.storage.checkpoint import CheckpointCorrupt, CheckpointStore
from canter.storage.durable import replace_file
from canter.storage.lock import RunLock
from canter.storage.policy_file import POLICIES
from canter.storage.validity import check_finite, check_same, check_same_shape, spec_to_plain

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is saved, and how much of it is kept."""

    save_every: int = 50
    """Iterations between checkpoints; there is one at the end in any case."""
    keep_last: int = 3
    """How many of the newest checkpoints stay."""
    num_checkpoints: int = 0
    """Checkpoints spread evenly over the run that stay for ever, each with a numbered policy file."""
    best: bool = True
    """Keep the best policy."""
    best_by: Literal["return", "lta"] = "return"
    """What makes it the best: the mean return of the last 100 episodes, or the raw reward per unit of time in the last
    20 rollouts, once there were as many."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, by name."""
        for name, least in (("save_every", 1), ("keep_last", 1), ("num_checkpoints", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


class Account(Stateful, Protocol):
    """Counts what happens in a run."""

    def progress(self) -> Progress:
        """How far it has come."""
        ...


@dataclass(frozen=True)
class Parts:
    """The parts of a run that a checkpoint holds."""

    algorithm: Algorithm[Any]
    collector: Stateful
    run: Account

    def by_name(self) -> dict[str, Stateful]:
        """Each under the name that it has in a checkpoint."""
        return {"algorithm": self.algorithm, "collector": self.collector, "run": self.run}

    def describe(self) -> dict[str, Any]:
        """What the parts were made for, as plain data: a checkpoint of other parts cannot be loaded."""
        policy = self.algorithm.policy
        spec = policy.spec
        return {"env": spec_to_plain(spec), "num_envs": spec.num_envs, "model": to_plain(policy.config)}


class NoFolder:
    """A run that leaves nothing on disk."""

    def restore(self, parts: Parts) -> bool:
        """Never anything to continue from."""
        return False

    def saves_at(self, iteration: int) -> bool:
        """Never."""
        return False

    def log(self, row: dict[str, Any]) -> None:
        """Forget it."""

    def save(self, parts: Parts, *, final: bool = False) -> None:
        """Forget it."""


class RunFolder:
    """Everything that one run leaves, locked while it is entered.

        config.yaml     the settings
        run.json        when, where and how it ran, and how it ended
        metrics.jsonl   a line per iteration, or per `log_every` of them
        checkpoints/    step-000000001234/, ...: what is needed to go on exactly
        policies/       best, step-000123456, ..., final_actor and final_critic, each usable alone

    Entering makes the folder and lets `latest` beside it point to it. Nothing is touched before. `settings` is the text
    of `config.yaml`, which changes only once a checkpoint was found to fit; None leaves the file as it is.

    A disk that is full or fails costs what was being written, never the run and never an older checkpoint or policy.
    """

    def __init__(
        self, path: str | Path, checkpoints: CheckpointConfig | None = None, *, settings: str | None = None
    ) -> None:
        self.path = path = Path(path)
        self.settings, self.config = settings, checkpoints or CheckpointConfig()
        self.metrics = path / "metrics.jsonl"
        self.store = CheckpointStore(path / "checkpoints", keep_last=self.config.keep_last)
        self.policies = Policies(path / POLICIES, self.config.best_by)
        self.lock, self.record = RunLock(path), RunRecord(path)
        self._run: Account | None = None
        """What is being written down; None before `restore`."""
        self._saved: int | None = None
        """Iteration of the checkpoint that this process wrote or read last."""
        self._milestones = 0
        """How many of the checkpoints that are kept for ever lie behind."""

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self.path.mkdir(parents=True, exist_ok=True)
            undo.enter_context(self.lock)
            if self.settings is not None and not (self.path / CONFIG).exists():
                replace_file(self.path / CONFIG, self.settings.encode())
            self.policies.open()
            _point_to(self.path)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        run, self._run = self._run, None
        if run is not None:
            ended_by = run.progress().ended_by if error is None else None
            ending = "stopped" if ended_by is None else "finished"
            if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
                ending = "failed"
            self.record.end(ending, error if ending == "failed" else None, ended_by)
        self.lock.__exit__(kind, error, traceback)

    def restore(self, parts: Parts) -> bool:
        """Bring all parts to the newest valid checkpoint; False if none was ever taken.

        Raises `NoCheckpoint` where there are some and all are corrupt: starting from zero must not happen by itself.
        Raises `Mismatch`, and leaves everything as it is, where a checkpoint was made for another environment, other
        networks or another optimiser.
        """
        found = bool(self.store.steps())
        if found:
            self._saved, tree = self.store.load_latest()
            self._check(self._saved, tree, parts)
            for name, part in parts.by_name().items():
                self._load(part, name, tree[name], self._saved)
        self._forget_after(self._saved or 0)
        if self.settings is not None:
            replace_file(self.path / CONFIG, self.settings.encode())
        self._run, self._milestones = parts.run, self._milestones_behind(parts.run.progress())
        self.record.begin(parts.algorithm.about())
        return found

    def saves_at(self, iteration: int) -> bool:
        """Whether a checkpoint is due after that iteration by its number; there may be further ones."""
        return iteration % self.config.save_every == 0

    def log(self, row: dict[str, Any]) -> None:
        """Append one line; `wall_time` says when."""
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps({**row, "wall_time": time.time()}) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s); training goes on", self.metrics, error)

    def save(self, parts: Parts, *, final: bool = False) -> None:
        """Save what it is time for: called after every iteration, and once more at the end.

        Raises `NonFiniteParameters` before a checkpoint or policy with NaN or infinity in it would be written.
        """
        run, config = parts.run.progress(), self.config
        behind = self._milestones_behind(run)
        milestone, self._milestones = behind > self._milestones, behind
        if config.best:
            self.policies.consider(parts.algorithm, run)
        if not (final or milestone or self.saves_at(run.iteration)):
            return
        # Policies first: whatever they miss by a kill, the run that goes on from the checkpoint before does again.
        self.policies.save_best()
        if milestone:
            self.policies.save_numbered(parts.algorithm, run)
        if final:
            self.policies.save_final(parts.algorithm, run)
        if run.iteration != self._saved:
            self._save_checkpoint(parts, run.iteration, keep=milestone)

    def _save_checkpoint(self, parts: Parts, iteration: int, *, keep: bool) -> None:
        tree = {name: part.state_dict() for name, part in parts.by_name().items()}
        check_finite({"algorithm": tree["algorithm"]}, f"checkpoint of iteration {iteration}")
        try:
            self.store.save(iteration, {"made_for": parts.describe(), **tree}, keep=keep)
            self._saved = iteration
        except (OSError, CheckpointCorrupt) as error:
            logger.error("checkpoint of iteration %d was not saved (%s); older ones are intact", iteration, error)

    def _check(self, iteration: int, tree: dict[str, Any], parts: Parts) -> None:
        what = f"checkpoint {self.store.path(iteration)}"
        check_same(what, {"parts": sorted(tree)}, {"parts": sorted(["made_for", *parts.by_name()])})
        check_same(what, tree["made_for"], parts.describe())
        check_same_shape(what, {"algorithm": tree["algorithm"]}, {"algorithm": parts.algorithm.state_dict()})

    def _load(self, part: Stateful, name: str, state: Any, iteration: int) -> None:
        try:
            part.load_state_dict(state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"its {name} cannot be restored ({type(error).__name__}: {error})"
            raise CheckpointCorrupt(self.store.path(iteration), reason) from error

    def _milestones_behind(self, run: Progress) -> int:
        return math.floor(min(run.fraction, 1.0) * self.config.num_checkpoints + 1e-9)  # 3 * (1 / 3) may be below 1

    def _forget_after(self, iteration: int) -> None:
        """Drop metric lines of iterations that are about to be repeated, and a line that was cut off."""
        if not self.metrics.exists():
            return
        try:
            lines = self.metrics.read_text(errors="replace").splitlines()
            kept = [line for line in lines if _iteration_of(line) <= iteration]
            replace_file(self.metrics, "".join(line + "\n" for line in kept).encode())
        except OSError as error:
            logger.warning("%s may tell some iterations twice (%s)", self.metrics, error)


def never_began(path: Path) -> bool:
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


def _iteration_of(line: str) -> float:
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return float("inf")

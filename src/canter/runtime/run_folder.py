"""What a run leaves on disk: metrics and checkpoints, with one writer at a time."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from canter.runtime.checkpoint import CheckpointStore
from canter.runtime.lock import RunLock

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
LATEST = "latest"


class Stateful(Protocol):
    """A part of a run that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that its future depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        ...


Parts = dict[str, Stateful]
"""The parts of a run by name."""


class NoFolder:
    """A run that leaves nothing on disk."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to do."""

    def restore(self, parts: Parts) -> bool:
        """Never anything to continue from."""
        return False

    def log(self, row: dict[str, Any]) -> None:
        """Forget it."""

    def save(self, iteration: int, parts: Parts, *, final: bool = False) -> None:
        """Forget it."""


class RunFolder:
    """`config.yaml`, `metrics.jsonl` and `checkpoints/` of one run, locked while it is entered.

    Entering makes the folder, writes the `settings` (the text of `config.yaml`, None leaves it as it is) and lets
    `latest` beside the folder point to it. Nothing is touched before.

    A checkpoint is taken every `save_every` iterations and at the end; the last `keep_last` stay. A disk that is full
    or fails costs the checkpoint or line that was being written, never the run and never an older checkpoint.
    """

    def __init__(self, path: Path, *, settings: str | None = None, save_every: int = 50, keep_last: int = 3) -> None:
        self.path, self.settings, self.save_every = path, settings, save_every
        self.metrics = path / "metrics.jsonl"
        self.store = CheckpointStore(path / "checkpoints", keep_last=keep_last)
        self.lock = RunLock(path)

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock.__enter__()
        if self.settings is not None:
            _replace(self.path / CONFIG, self.settings)
        _point_to(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lock.__exit__(kind, error, traceback)

    def restore(self, parts: Parts) -> bool:
        """Bring all parts to the newest valid checkpoint; False if none was ever taken.

        Raises `NoCheckpoint` where there are some and all are corrupt: starting from zero must not happen by itself.
        """
        if not self.store.steps():
            return False
        iteration, tree = self.store.load_latest()
        for name, part in parts.items():
            part.load_state_dict(tree[name])
        self._forget_after(iteration)
        return True

    def log(self, row: dict[str, Any]) -> None:
        """Append one line; `wall_time` says when."""
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps({**row, "wall_time": time.time()}) + "\n")
        except OSError as error:
            logger.warning("%s could not be written (%s); training goes on", self.metrics, error)

    def save(self, iteration: int, parts: Parts, *, final: bool = False) -> None:
        """Take a checkpoint if it is time for one, or in any case at the end."""
        if not final and iteration % self.save_every:
            return
        if iteration in self.store.steps():
            return
        try:
            self.store.save(iteration, {name: part.state_dict() for name, part in parts.items()})
        except OSError as error:
            logger.error("checkpoint of iteration %d was not saved (%s); older ones are intact", iteration, error)

    def _forget_after(self, iteration: int) -> None:
        """Drop metric lines of iterations that are about to be repeated, and a line that was cut off."""
        if not self.metrics.exists():
            return
        kept = [line for line in self.metrics.read_text().splitlines() if _iteration_of(line) <= iteration]
        _replace(self.metrics, "".join(line + "\n" for line in kept))


def _replace(path: Path, text: str) -> None:
    """Put a whole new file in the place of the old one."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_text(text)
    os.replace(fresh, path)


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
        return json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        return float("inf")

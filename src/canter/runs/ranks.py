"""The run folder of several ranks: rank 0 reads and writes, the others exchange state with it."""

from __future__ import annotations

import time
from typing import Any, Self

import torch

from canter.core import distributed
from canter.core.storage.lock import is_locked
from canter.runs.metrics import Row
from canter.runs.run_folder import RunFolder
from canter.runs.state import TrainState, gather_ranks

PATIENCE = 30.0
"""Seconds to wait for the lock of earlier ranks, which still have to notice that torchrun was
killed."""


def for_all_ranks(folder: RunFolder) -> RunFolder | DistributedRunFolder:
    """Return the folder as it is in a world of one, otherwise its distributed version."""
    return folder if distributed.world_size() == 1 else DistributedRunFolder(folder)


class NullRunFolder:
    """The folder of a run that writes nothing."""

    def restore(self, state: TrainState) -> bool:
        """Return False: there is nothing to resume."""
        return False

    def saves_at(self, iteration: int) -> bool:
        """Return False."""
        return False

    def log(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def rows(self) -> list[Row]:
        """Return []: there is no log."""
        return []

    def note_findings(self, findings: list[dict[str, Any]]) -> None:
        """Do nothing."""

    def save(self, state: TrainState, *, final: bool = False) -> None:
        """Do nothing."""

    def rescue(self, state: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Return that nothing was saved."""
        return "Nothing was saved, as the run has no folder"

    def black_box(self, tree: dict[str, Any]) -> None:
        """Do nothing."""


class DistributedRunFolder(NullRunFolder):
    """A run folder for every rank; all ranks must call its methods together, except `log`."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.is_first = distributed.rank() == 0

    def __enter__(self) -> Self:
        if self.is_first:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and is_locked(self.folder.path):
                time.sleep(0.2)
            self.folder.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.is_first:
            self.folder.__exit__(*raised)

    def restore(self, state: TrainState) -> bool:
        """Restore the newest valid checkpoint; return False if none was ever written."""
        if self.is_first:
            found = self.folder.restore(state)
            if not found:
                state.scatter(None)
            return found
        self.folder.iterations_per_tick = state.algorithm.iterations_per_tick
        tree = state.scatter(None)
        if tree is None:
            return False
        for name, component in state.components().items():
            component.load_state_dict(tree[name])
        return True

    def saves_at(self, iteration: int) -> bool:
        """Return whether a checkpoint is due after that iteration by its number."""
        return self.folder.saves_at(iteration)

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics log; on rank 0 only."""
        if self.is_first:
            self.folder.log(row)

    def rows(self) -> list[Row]:
        """Return the rows of the log so far; [] on other ranks than 0."""
        return self.folder.rows() if self.is_first else []

    def note_findings(self, findings: list[dict[str, Any]]) -> None:
        """Note the findings of the doctor in the record of the run; on rank 0 only."""
        if self.is_first:
            self.folder.note_findings(findings)

    def save(self, state: TrainState, *, final: bool = False) -> None:
        """Save what is due; rank 0 decides and requests the state of all ranks if it needs it."""
        if self.is_first:
            requesting = _RequestingState(state.algorithm, state.collector, state.run, state.seed)
            self.folder.save(requesting, final=final)
            _broadcast_request(False)
        else:
            while _broadcast_request(False):
                state.gather()

    def rescue(self, state: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Save all ranks' state from before an error that all raise; return what was saved."""
        tree = gather_ranks(tree, state.algorithm.policy.actor.state_dict())
        saved = self.folder.rescue(state, tree, error) if self.is_first else ""
        return distributed.broadcast_bytes(saved.encode()).decode()

    def black_box(self, tree: dict[str, Any]) -> None:
        """Save rank 0's data for `canter explain`."""
        if self.is_first:
            self.folder.black_box(tree)


class _RequestingState(TrainState):
    """Rank 0's state, which tells the other ranks to gather before it does so itself."""

    def gather(self) -> dict[str, Any]:
        """Return the state of all ranks."""
        _broadcast_request(True)
        return super().gather()


def _broadcast_request(gather: bool) -> bool:
    """Return rank 0's argument on every rank: whether all ranks gather their state now."""
    return bool(distributed.broadcast_(torch.tensor(int(gather))))

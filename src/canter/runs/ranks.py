"""One run folder for all ranks: rank 0 writes and reads it, others hand over their state and are told what to load."""

from __future__ import annotations

import time
from typing import Any, Self

import torch

from canter.core import distributed
from canter.core.storage.lock import is_locked
from canter.runs.run_folder import RunFolder
from canter.runs.state import NullRunFolder, TrainState, gathered

PATIENCE = 30.0
"""Seconds to wait for the lock of ranks that are about to notice that their agent was killed."""


def for_all_ranks(folder: RunFolder) -> RunFolder | DistributedRunFolder:
    """The folder as it is used in a world of several ranks, or of one."""
    return folder if distributed.world_size() == 1 else DistributedRunFolder(folder)


class DistributedRunFolder(NullRunFolder):
    """The folder of a run on every rank; what it does is for all ranks to call at the same time, but for the log."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.first = folder, distributed.rank() == 0

    def __enter__(self) -> Self:
        if self.first:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and is_locked(self.folder.path):
                time.sleep(0.2)
            self.folder.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.first:
            self.folder.__exit__(*raised)

    def restore(self, parts: TrainState) -> bool:
        """Bring all parts to the newest valid checkpoint; without one, take one, so that any rank may be lost."""
        if self.first:
            found = self.folder.restore(parts)
            if not found:
                parts.shared(None)
                self.save(parts)
            return found
        self.folder.iterations_per_tick, tree = parts.algorithm.iterations_per_tick, parts.shared(None)
        if tree is None:
            self.save(parts)
            return False
        for name, part in parts.components().items():
            part.load_state_dict(tree[name])
        return True

    def saves_at(self, iteration: int) -> bool:
        """Whether a checkpoint is due after that iteration by its number."""
        return self.folder.saves_at(iteration)

    def log(self, row: dict[str, Any]) -> None:
        """Append one line."""
        if self.first:
            self.folder.log(row)

    def save(self, parts: TrainState, *, final: bool = False) -> None:
        """Save what it is time for; rank 0 decides and asks the others for their state as often as it needs it."""
        if self.first:
            self.folder.save(_Asking(parts.algorithm, parts.collector, parts.run, parts.seed), final=final)
            _from_rank_0(False)
        else:
            while _from_rank_0(False):
                parts.tree()

    def rescue(self, parts: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Save the state of all ranks from before an error that all know of; says on each what was saved."""
        tree = gathered(tree, parts.algorithm.policy.actor.state_dict())
        told = self.folder.rescue(parts, tree, error) if self.first else ""
        return distributed.broadcast_bytes(told.encode()).decode()

    def black_box(self, tree: dict[str, Any]) -> None:
        """Keep what explains a NaN; others have told rank 0 before, or are not asked."""
        if self.first:
            self.folder.black_box(tree)


class _Asking(TrainState):
    """Rank 0's parts, which ask the other ranks for their state before their own is looked at."""

    def tree(self) -> dict[str, Any]:
        """The state of all ranks."""
        _from_rank_0(True)
        return super().tree()


def _from_rank_0(more: bool) -> bool:
    """Rank 0's word, whatever others say."""
    return bool(distributed.broadcast_(torch.tensor(int(more))))

"""The run folder of several ranks: rank 0 reads and writes, the others exchange state with it."""

from __future__ import annotations

import time
from typing import Any, Self

from canter.core import distributed
from canter.core.storage.lock import is_locked
from canter.runs.metrics import Row
from canter.runs.run_folder import RunFolder
from canter.runs.state import TrainState, gather_ranks, request_gather

PATIENCE = 30.0
"""Seconds to wait for the lock of earlier ranks, which still have to notice that torchrun was
killed."""


def folder_of_rank(folder: RunFolder | None) -> RunFolder | NullRunFolder:
    """Return the folder itself on rank 0, which writes it; on other ranks one that follows rank 0."""
    if folder is None:
        return NullRunFolder()
    if distributed.rank() > 0:
        return FollowerFolder(folder)
    deadline = time.monotonic() + PATIENCE
    while distributed.world_size() > 1 and time.monotonic() < deadline and is_locked(folder.path):
        time.sleep(0.2)
    return folder


class NullRunFolder:
    """The folder of a run that writes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Do nothing."""

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


class FollowerFolder(NullRunFolder):
    """The run's folder as ranks other than 0 see it; its methods are called when rank 0 calls them on the folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def restore(self, state: TrainState) -> bool:
        """Load this rank's part of the checkpoint that rank 0 has read; return False without one."""
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

    def save(self, state: TrainState, *, final: bool = False) -> None:
        """Gather the state whenever rank 0 needs it to save."""
        while request_gather(False):
            state.gather()

    def rescue(self, state: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Gather the state from before an error that all ranks raise; return what rank 0 saved."""
        gather_ranks(tree, state.algorithm.policy.actor.state_dict())
        return distributed.broadcast_bytes(b"").decode()

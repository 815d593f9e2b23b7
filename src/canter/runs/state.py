"""The state of all ranks in one checkpoint.

Ranks have most of it in common: weights, moments, statistics, random streams. A checkpoint holds rank 0's, and of each
other rank what differs from it: environments, memory, sums of running episodes.

What of a run is saved and restored, and a folder that keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from canter.algorithms.base import Algorithm
from canter.core import distributed
from canter.core.plain import to_plain
from canter.core.specs import Stateful
from canter.core.storage.tree import decode, encode
from canter.core.storage.validity import spec_to_plain
from canter.runs.policies import ProgressSnapshot

RANKS = "ranks"
"""Part of a checkpoint: for each rank but the first, a list of paths and what is there instead."""


def gathered(own: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's state, and on rank 0 what the others have instead; `weights` must be the same on all."""
    if distributed.world_size() == 1:
        return own
    told = json.dumps([_digest(own), _digest(weights)])
    base, common = json.loads(distributed.broadcast_bytes(told.encode()))
    if _digest(weights) != common:
        raise RuntimeError(f"rank {distributed.rank()} has other weights than rank 0, so something is not shared")
    differs = [[list(path), value] for path, value in _difference(own, base)]
    parts = distributed.gather_bytes(_pack({"differs": differs}))
    if distributed.rank() != 0:
        return own
    return own | {RANKS: [_unpack(part)["differs"] for part in parts[1:]]}


def broadcast_tree(tree: dict[str, Any] | None, source: int = 0) -> dict[str, Any] | None:
    """One rank's tree on every rank."""
    if distributed.world_size() == 1:
        return tree
    own = _pack({"tree": tree if distributed.rank() == source else None})
    return _unpack(distributed.broadcast_bytes(own, source))["tree"]


def own_part(tree: dict[str, Any], algorithm: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What of a checkpoint this rank is to load.

    Where it was saved by another number of ranks, all episodes start anew, and so does what the algorithm keeps for
    each environment: there its state as it is now, `algorithm()`, is taken.
    """
    others = tree.pop(RANKS, [])
    saved, here = len(others) + 1, distributed.world_size()
    if saved == here:
        for path, value in others[distributed.rank() - 1] if distributed.rank() else []:
            *way, last = path
            place = tree
            for key in way:
                place = place[key]
            place[last] = value
        return tree
    reason = f"the run was saved by {saved} and goes on with {here} ranks"
    collector = {**tree["collector"], "env": None, "episodes_restart": reason}
    return {**tree, "collector": collector, "algorithm": _refit(tree["algorithm"], algorithm(), saved, here)}


def _refit(saved: Any, own: Any, ranks_then: int, ranks_now: int) -> Any:
    """What was saved, but for tensors with a row for each environment."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _refit(value, own.get(key), ranks_then, ranks_now) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(own, list | tuple) and len(saved) == len(own):
        return type(saved)(_refit(a, b, ranks_then, ranks_now) for a, b in zip(saved, own, strict=True))
    if not (isinstance(saved, Tensor) and isinstance(own, Tensor) and saved.ndim and own.ndim):
        return saved
    by_row = len(saved) * ranks_then == len(own) * ranks_now and saved.shape[1:] == own.shape[1:]
    return own if by_row else saved


def _digest(value: Any) -> Any:
    """What tells values apart, for each key of nested dicts; None for what is not compared."""
    if isinstance(value, dict):
        return {key: _digest(part) for key, part in value.items()}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(data).hexdigest()}"
    return None if isinstance(value, list | tuple) else repr(value)


def _difference(own: dict[str, Any], base: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths and values where a tree has another digest than `base`."""
    for key, value in own.items():
        theirs = base.get(key)
        if isinstance(value, dict) and isinstance(theirs, dict) and value.keys() == theirs.keys() and value:
            for path, part in _difference(value, theirs):
                yield (key, *path), part
        elif theirs is None or _digest(value) != theirs:
            yield (key,), value


def _pack(tree: dict[str, Any]) -> bytes:
    tensors, state = encode(tree)
    return struct.pack("<Q", len(tensors)) + tensors + state


def _unpack(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data)
    return decode(data[8 : 8 + length], data[8 + length :])


class ProgressSource(Stateful, Protocol):
    """Counts what happens in a run."""

    def progress(self) -> ProgressSnapshot:
        """How far it has come."""
        ...


@dataclass(frozen=True)
class TrainState:
    """The parts of a run that a checkpoint holds."""

    algorithm: Algorithm[Any]
    collector: Stateful
    run: ProgressSource
    seed: int

    def components(self) -> dict[str, Stateful]:
        """Each under the name that it has in a checkpoint."""
        return {"algorithm": self.algorithm, "collector": self.collector, "run": self.run}

    def tree(self) -> dict[str, Any]:
        """The state of each, and on rank 0 what other ranks have of their own; all ranks must call it."""
        weights = self.algorithm.policy.actor.state_dict()
        return gathered({name: part.state_dict() for name, part in self.components().items()}, weights)

    def shared(self, tree: dict[str, Any] | None) -> dict[str, Any] | None:
        """What rank 0 found in a checkpoint, as this rank is to load it; all ranks must call it, others with None."""
        tree = broadcast_tree(tree)
        return None if tree is None else own_part(tree, self.algorithm.state_dict)

    def describe(self) -> dict[str, Any]:
        """What the parts were made for, as plain data: a checkpoint of other parts cannot be loaded."""
        policy = self.algorithm.policy
        spec = policy.spec
        rows = spec.num_envs * distributed.world_size()
        return {"env": spec_to_plain(spec), "num_envs": rows, "model": to_plain(policy.config), "seed": self.seed}


class NullRunFolder:
    """A run that leaves nothing on disk."""

    def restore(self, parts: TrainState) -> bool:
        """Never anything to continue from."""
        return False

    def saves_at(self, iteration: int) -> bool:
        """Never."""
        return False

    def log(self, row: dict[str, Any]) -> None:
        """Forget it."""

    def save(self, parts: TrainState, *, final: bool = False) -> None:
        """Forget it."""

    def rescue(self, parts: TrainState, tree: dict[str, Any], error: BaseException) -> str:
        """Nothing is saved."""
        return "Nothing was saved, as the run has no folder"

    def black_box(self, tree: dict[str, Any]) -> None:
        """Forget it."""

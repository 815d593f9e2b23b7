"""The training state that a checkpoint holds: algorithm, collector and counters, of all ranks.

Ranks share most of it: weights, moments, statistics and random streams. A checkpoint holds rank 0's
state, and of every other rank only what differs: environments, recurrent state and the sums of
running episodes.
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
from canter.core.plain import from_plain, to_plain
from canter.core.specs import Stateful
from canter.core.storage.tree import decode, encode
from canter.core.storage.validity import spec_to_plain
from canter.nn.actor_critic import ModelConfig
from canter.runs.policies import ProgressSnapshot

RANKS = "ranks"
"""Key in a checkpoint: for each rank but the first, a list of [path, value] that differ from rank
0."""


class ProgressSource(Stateful, Protocol):
    """The counters of a run."""

    def progress(self) -> ProgressSnapshot:
        """Return the current progress."""
        ...


@dataclass(frozen=True)
class TrainState:
    """The live objects whose state a checkpoint holds."""

    algorithm: Algorithm[Any]
    collector: Stateful
    run: ProgressSource
    seed: int

    def components(self) -> dict[str, Stateful]:
        """Return the objects by their key in a checkpoint."""
        return {"algorithm": self.algorithm, "collector": self.collector, "run": self.run}

    def gather(self) -> dict[str, Any]:
        """Return the state of all components, on rank 0 of all ranks; the others call it when rank 0 requests it."""
        if distributed.rank() == 0:
            request_gather(True)
        own = {name: component.state_dict() for name, component in self.components().items()}
        return gather_ranks(own, self.algorithm.policy.actor.state_dict())

    def scatter(self, tree: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return this rank's state from the checkpoint that rank 0 has read, None without one.

        All ranks must call it; those other than rank 0 pass None.
        """
        tree = broadcast_tree(tree)
        return None if tree is None else rank_part(tree, self.algorithm.state_dict)

    def fingerprint(self) -> dict[str, Any]:
        """Return environment, model and seed as plain data, which must match a checkpoint's."""
        policy = self.algorithm.policy
        return {
            "env": spec_to_plain(policy.spec),
            "num_envs": policy.spec.num_envs * distributed.world_size(),
            "model": to_plain(policy.config),
            "seed": self.seed,
        }


def current_fingerprint(saved: Any, here: dict[str, Any]) -> Any:
    """Return the fingerprint of a checkpoint with today's settings and name of the environment.

    An earlier version saved older names, and not the settings of networks that were added since.
    It left out the scheme of an environment's id, and had `imported/module.Name-v0` for
    `module:Name`.
    """
    match saved:
        case {"env": {"env_id": env_id, **env}, "model": model}:
            current = here["env"]["env_id"]
            if env_id in (current.partition(":")[2], f"imported/{current.replace(':', '.')}-v0"):
                env_id = current
            model = to_plain(from_plain(model, ModelConfig()))
            return {**saved, "env": {"env_id": env_id, **env}, "model": model}
    return saved


def gather_ranks(own: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return this rank's state and, on rank 0, the differences of the other ranks.

    `weights` must be the same on all ranks.
    """
    if distributed.world_size() == 1:
        return own
    digests = json.dumps([_digest(own), _digest(weights)])
    first_digest, first_weights = json.loads(distributed.broadcast_bytes(digests.encode()))
    if _digest(weights) != first_weights:
        raise RuntimeError(f"rank {distributed.rank()} has other weights than rank 0, so something is not shared")
    differences = [[list(path), value] for path, value in _differences(own, first_digest)]
    of_ranks = distributed.gather_bytes(_pack({"differs": differences}))
    if distributed.rank() != 0:
        return own
    return own | {RANKS: [_unpack(data)["differs"] for data in of_ranks[1:]]}


def request_gather(gather: bool) -> bool:
    """Return rank 0's argument on every rank: whether all ranks gather their state now."""
    return bool(distributed.broadcast_(torch.tensor(int(gather)))) if distributed.world_size() > 1 else gather


def broadcast_tree(tree: dict[str, Any] | None, source: int = 0) -> dict[str, Any] | None:
    """Return one rank's tree on every rank."""
    if distributed.world_size() == 1:
        return tree
    data = _pack({"tree": tree if distributed.rank() == source else None})
    return _unpack(distributed.broadcast_bytes(data, source))["tree"]


def rank_part(tree: dict[str, Any], algorithm: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a checkpoint that this rank loads.

    If another number of ranks saved it, all episodes restart, and tensors with one entry per
    environment are taken from the algorithm's current state, `algorithm()`.
    """
    others = tree.pop(RANKS, [])
    ranks_saved = len(others) + 1
    ranks_now = distributed.world_size()
    if ranks_saved == ranks_now:
        if distributed.rank() > 0:
            _apply(others[distributed.rank() - 1], tree)
        return tree
    reason = f"the run was saved by {ranks_saved} and goes on with {ranks_now} ranks"
    collector = {**tree["collector"], "env": None, "episodes_restart": reason}
    resized = _refit(tree["algorithm"], algorithm(), ranks_saved, ranks_now)
    return {**tree, "collector": collector, "algorithm": resized}


def _apply(differences: list[Any], tree: dict[str, Any]) -> None:
    """Write the values of a rank into rank 0's tree."""
    for path, value in differences:
        *outer, last = path
        target = tree
        for key in outer:
            target = target[key]
        target[last] = value


def _refit(saved: Any, own: Any, ranks_saved: int, ranks_now: int) -> Any:
    """Return the saved state, with tensors that have one entry per environment replaced by own."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _refit(value, own.get(key), ranks_saved, ranks_now) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(own, list | tuple) and len(saved) == len(own):
        return type(saved)(_refit(a, b, ranks_saved, ranks_now) for a, b in zip(saved, own, strict=True))
    if not (isinstance(saved, Tensor) and isinstance(own, Tensor) and saved.ndim and own.ndim):
        return saved
    per_env = len(saved) * ranks_saved == len(own) * ranks_now and saved.shape[1:] == own.shape[1:]
    return own if per_env else saved


def _digest(value: Any) -> Any:
    """Return hashes of the values of nested dicts; None for lists, which are not compared."""
    if isinstance(value, dict):
        return {key: _digest(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(data).hexdigest()}"
    return None if isinstance(value, list | tuple) else repr(value)


def _differences(own: dict[str, Any], digest: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths and values of a tree whose digest differs from `digest`."""
    for key, value in own.items():
        theirs = digest.get(key)
        if isinstance(value, dict) and isinstance(theirs, dict) and value.keys() == theirs.keys() and value:
            for path, item in _differences(value, theirs):
                yield (key, *path), item
        elif theirs is None or _digest(value) != theirs:
            yield (key,), value


def _pack(tree: dict[str, Any]) -> bytes:
    tensors, state = encode(tree)
    return struct.pack("<Q", len(tensors)) + tensors + state


def _unpack(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data)
    return decode(data[8 : 8 + length], data[8 + length :])

"""What of a run is saved and restored, and a folder that keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from canter import distributed
from canter.algorithms.base import Algorithm
from canter.plain import to_plain
from canter.runs.policies import Progress
from canter.runs.rank_state import broadcast_tree, gathered, own_part
from canter.specs import Stateful
from canter.storage.validity import spec_to_plain


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
    seed: int

    def by_name(self) -> dict[str, Stateful]:
        """Each under the name that it has in a checkpoint."""
        return {"algorithm": self.algorithm, "collector": self.collector, "run": self.run}

    def tree(self) -> dict[str, Any]:
        """The state of each, and on rank 0 what other ranks have of their own; all ranks must call it."""
        weights = self.algorithm.policy.actor.state_dict()
        return gathered({name: part.state_dict() for name, part in self.by_name().items()}, weights)

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

    def rescue(self, parts: Parts, tree: dict[str, Any], error: BaseException) -> str:
        """Nothing is saved."""
        return "Nothing was saved, as the run has no folder"

    def black_box(self, tree: dict[str, Any]) -> None:
        """Forget it."""

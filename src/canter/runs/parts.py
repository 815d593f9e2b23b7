"""What of a run is saved and restored, and a folder that keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from canter.algorithms.base import Algorithm
from canter.plain import to_plain
from canter.runs.policies import Progress
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

    def describe(self) -> dict[str, Any]:
        """What the parts were made for, as plain data: a checkpoint of other parts cannot be loaded."""
        policy = self.algorithm.policy
        spec = policy.spec
        made_for = {"env": spec_to_plain(spec), "num_envs": spec.num_envs, "model": to_plain(policy.config)}
        return {**made_for, "seed": self.seed}


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

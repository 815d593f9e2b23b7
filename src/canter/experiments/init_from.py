"""Beginning with what another run has learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.algorithms.base import Algorithm
from canter.runs.run_folder import RunFolder
from canter.storage.policy_file import begin_with
from canter.storage.validity import check_same_shape

WEIGHTS = ("model", "modules")
"""Parts of an algorithm's state that are its networks."""
OPTIMIZERS = "optimizers"


@dataclass(frozen=True)
class InitFrom:
    """A run to take weights from, and what else of it.

    Of a run of another algorithm, such as a student's, and of a policy file only the policy is taken.
    """

    run: Path
    optimizer: bool = False
    """Take the state of the optimisers too, such as their moments and learning rates."""
    fresh_statistics: bool = False
    """Begin with new statistics of observations and values; by default they come with the weights made for them."""

    def load(self, algorithm: Algorithm[Any]) -> int | None:
        """Give an algorithm the weights of the run's newest checkpoint; gives the iteration that they are of.

        None where they are those of a policy alone. Raises `Mismatch` where the networks are others.
        """
        if self.run.is_file():
            return self._load_policy(algorithm)
        store = RunFolder(self.run).store
        if not store.steps():
            raise ValueError(f"--init-from {self.run}: there is no checkpoint to take weights from")
        iteration, tree = store.load_latest()
        own, theirs = algorithm.state_dict(), tree["algorithm"]
        names = [name for name in (*WEIGHTS, *[OPTIMIZERS] * self.optimizer) if name in own]
        if not set(WEIGHTS) & set(names) or any(name not in theirs for name in names):
            return self._load_policy(algorithm)
        taken = {name: theirs[name] for name in names}
        check_same_shape(f"--init-from {self.run}", taken, {name: own[name] for name in names})
        if self.fresh_statistics:
            taken = {name: _keep_statistics(part, own[name]) for name, part in taken.items()}
        algorithm.load_state_dict(own | taken)
        return iteration

    def _load_policy(self, algorithm: Algorithm[Any]) -> None:
        if self.optimizer or self.fresh_statistics:
            raise ValueError(f"--init-from {self.run}: only its policy can be taken, as it is")
        begin_with(algorithm.acting, self.run)


def _keep_statistics(part: Any, own: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {
        name: own[name] if "normalizer" in name else _keep_statistics(inner, own[name]) for name, inner in part.items()
    }

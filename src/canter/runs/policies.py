"""The policy files of a run: the best one, numbered ones at milestones, and the final one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from canter.algorithms.base import Algorithm
from canter.nn.policy_file import (
    BEST,
    FINAL_ACTOR,
    NoPolicy,
    PolicyFileCorrupt,
    policy_info,
    read_policy_file,
    save_policy,
    write_policy_file,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProgressSnapshot:
    """Counters and scores of a run at one moment."""

    iteration: int
    """Completed iterations."""
    env_steps: int
    """Transitions so far."""
    fraction: float
    """Used fraction of the budget of steps or iterations; 0 without a budget."""
    return_: float | None
    """Mean return of the last 100 episodes; None before 100 have ended."""
    lta: float | None
    """Raw reward per unit of time in the last 20 rollouts; None before 20 were collected."""
    evaluation: float | None = None
    """Mean return of the evaluation of this iteration; None without one."""
    ended_by: str | None
    """Key of the setting that ended the run, e.g. `total_steps`; None while it continues."""

    def scores(self) -> dict[str, Any]:
        """Return the values that a policy file stores about the run."""
        return {
            "env_steps": self.env_steps,
            "return_": self.return_,
            "lta": self.lta,
            "evaluation": self.evaluation,
        }


class Policies:
    """Writes policy files into a folder; a failure to write costs only that file.

    The best policy is copied in memory and written by `save_best`, because early in a run nearly
    every iteration improves on it. `by` selects the score.
    """

    def __init__(self, folder: Path, by: Literal["return", "lta", "evaluation"] = "return") -> None:
        self.folder = folder
        self.by = "return_" if by == "return" else by
        self.best_score = -math.inf
        self.best: Callable[[Path], None] | None = None
        """Function that writes the copy of the best policy; None if it is on the disk."""
        self.unsaved: set[str] = set()
        """Names of files that could not be written so far."""

    def open(self) -> None:
        """Read the score of the best policy on the disk."""
        self.best = None
        self.best_score = -math.inf
        try:
            score = getattr(read_policy_file(self.folder / BEST)[0], self.by)
        except NoPolicy:
            return
        except PolicyFileCorrupt as error:
            _log.warning("%s; the next best policy replaces it", error)
            return
        self.best_score = -math.inf if score is None else score

    def consider(self, algorithm: Algorithm[Any], run: ProgressSnapshot) -> None:
        """Copy the policy if its score is the best so far."""
        about = run.scores()
        score = about[self.by]
        if score is None or not score > self.best_score:
            return
        policy = algorithm.policy
        tensors = {name: tensor.clone() for name, tensor in policy.actor.state_dict().items()}
        self.best_score = score
        self.best = lambda path: write_policy_file(path, policy_info(policy, **about), tensors)

    def save_best(self) -> None:
        """Write the best policy, if it is not on the disk yet."""
        write = self.best
        self.best = None
        if write is not None:
            self._write(BEST, write)

    def save_numbered(self, algorithm: Algorithm[Any], run: ProgressSnapshot) -> None:
        """Write the policy under its number of steps."""
        about = run.scores()
        self._write(f"step-{run.env_steps:09d}.safetensors", lambda path: save_policy(path, algorithm.policy, **about))

    def save_final(self, algorithm: Algorithm[Any], run: ProgressSnapshot) -> None:
        """Write the final policy and the further files of the algorithm."""
        about = run.scores()
        self._write(FINAL_ACTOR, lambda path: save_policy(path, algorithm.policy, **about))
        del about["evaluation"]  # it evaluated the policy only
        for name, write in algorithm.artefacts().items():
            self._write(name, lambda path, write=write: write(path, **about))

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        try:
            write(self.folder / name)
            self.unsaved.discard(name)
        except OSError as error:
            self.unsaved.add(name)
            _log.error("policy %s was not saved (%s); older ones are intact", self.folder / name, error)

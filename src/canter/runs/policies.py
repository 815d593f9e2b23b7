"""The policy files of a run: the best one, numbered ones along the way, and the last."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from canter.algorithms.base import Algorithm
from canter.storage.policy_file import (
    BEST,
    FINAL_ACTOR,
    NoPolicy,
    PolicyFileCorrupt,
    describe,
    read_policy_file,
    save_policy,
    write_policy_file,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, and how it does."""

    iteration: int
    """Iterations done."""
    env_steps: int
    """Transitions so far."""
    fraction: float
    """Share of the budget that is used up; 0 where there is none of steps or iterations."""
    return_: float | None
    """Mean return of the last 100 episodes; None before as many have ended."""
    lta: float | None
    """Raw reward per unit of time in the last 20 rollouts; None before as many were collected."""
    evaluation: float | None = None
    """Mean return of the evaluation of this very iteration; None without one."""
    ended_by: str | None
    """Key of the setting that ended the run: `total_steps`, `until.mean_return`, ...; None while it goes on."""

    def account(self) -> dict[str, Any]:
        """What a policy file says of the run."""
        return {name: getattr(self, name) for name in ("env_steps", "return_", "lta", "evaluation")}


class Policies:
    """Writes policy files into a folder. A disk that refuses costs the file, never the run and never an older file.

    The best policy is held in memory from the iteration that found it until `save_best`: early in a run nearly every
    iteration finds one. `by` says what makes it the best.
    """

    def __init__(self, folder: Path, by: Literal["return", "lta", "evaluation"] = "return") -> None:
        self.folder, self.by = folder, "return_" if by == "return" else by
        self.best_score = -math.inf
        self.best: Callable[[Path], None] | None = None
        """Writes the best policy so far, as it was then; None if it is on the disk."""
        self.unsaved: set[str] = set()
        """Names of files that the disk refused, and that were not written since."""

    def open(self) -> None:
        """Learn from the disk what the best was so far."""
        self.best, self.best_score = None, -math.inf
        try:
            score = getattr(read_policy_file(self.folder / BEST)[0], self.by)
        except NoPolicy:
            return
        except PolicyFileCorrupt as error:
            _log.warning("%s; the next best takes its place", error)
            return
        self.best_score = -math.inf if score is None else score

    def consider(self, algorithm: Algorithm[Any], run: Progress) -> None:
        """Remember the policy if it has lately done better than any before."""
        about = run.account()
        score = about[self.by]
        if score is None or not score > self.best_score:
            return
        policy = algorithm.policy
        tensors = {name: tensor.clone() for name, tensor in policy.actor.state_dict().items()}
        self.best_score = score
        self.best = lambda path: write_policy_file(path, describe(policy, **about), tensors)

    def save_best(self) -> None:
        """Write the best policy, if it is not on the disk yet."""
        write, self.best = self.best, None
        if write is not None:
            self._write(BEST, write)

    def save_numbered(self, algorithm: Algorithm[Any], run: Progress) -> None:
        """Write the policy under the number of its steps."""
        about = run.account()
        self._write(f"step-{run.env_steps:09d}.safetensors", lambda path: save_policy(path, algorithm.policy, **about))

    def save_final(self, algorithm: Algorithm[Any], run: Progress) -> None:
        """Write the policy as the final one, and whatever else the algorithm leaves."""
        about = run.account()
        self._write(FINAL_ACTOR, lambda path: save_policy(path, algorithm.policy, **about))
        del about["evaluation"]  # which is the policy's
        for name, write in algorithm.artefacts().items():
            self._write(name, lambda path, write=write: write(path, **about))

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        try:
            write(self.folder / name)
            self.unsaved.discard(name)
        except OSError as error:
            self.unsaved.add(name)
            _log.error("policy %s was not saved (%s); older ones are intact", self.folder / name, error)

"""The policy files of a run: the best one, numbered ones along the way, and the last."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from canter.algorithms.base import Algorithm
from canter.nn.actor_critic import Policy
from canter.storage.policy_file import (
    BEST,
    FINAL_ACTOR,
    FINAL_CRITIC,
    NoPolicy,
    PolicyFileCorrupt,
    ValueFunction,
    describe,
    read_policy_file,
    save_critic,
    save_policy,
    write_policy_file,
)

_log = logging.getLogger(__name__)


class Progress(Protocol):
    """How far a run has come."""

    @property
    def iteration(self) -> int:
        """Iterations done."""
        ...

    @property
    def env_steps(self) -> int:
        """Transitions so far."""
        ...

    @property
    def total_steps(self) -> int:
        """Transitions to train for."""
        ...

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 episodes; None before as many have ended."""
        ...

    @property
    def recent_lta(self) -> float | None:
        """Raw reward per unit of time in the last 20 rollouts; None before as many were collected."""
        ...


@dataclass(frozen=True)
class _Best:
    """The best policy so far, as it was then."""

    policy: Policy
    tensors: dict[str, Tensor]
    about: dict[str, Any]


class Policies:
    """Writes policy files into a folder. A disk that refuses costs the file, never the run and never an older file.

    The best policy is held in memory from the iteration that found it until `save_best`: early in a run nearly every
    iteration finds one. `by` says what makes it the best.
    """

    def __init__(self, folder: Path, by: Literal["return", "lta"] = "return") -> None:
        self.folder, self.by = folder, "return_" if by == "return" else by
        self.best_score = -math.inf
        self.best: _Best | None = None

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
        about = _account(run)
        score = about[self.by]
        if score is None or not score > self.best_score:
            return
        tensors = {name: tensor.clone() for name, tensor in algorithm.policy.actor.state_dict().items()}
        self.best, self.best_score = _Best(algorithm.policy, tensors, about), score

    def save_best(self) -> None:
        """Write the best policy, if it is not on the disk yet."""
        if self.best is None:
            return
        best, self.best = self.best, None
        info = describe(best.policy.config, best.policy.spec, "actor", **best.about)
        self._write(BEST, lambda path: write_policy_file(path, info, best.tensors))

    def save_numbered(self, algorithm: Algorithm[Any], run: Progress) -> None:
        """Write the policy under the number of its steps."""
        about = _account(run)
        self._write(f"step-{run.env_steps:09d}.safetensors", lambda path: save_policy(path, algorithm.policy, **about))

    def save_final(self, algorithm: Algorithm[Any], run: Progress) -> None:
        """Write actor and critic as the final ones."""
        about = _account(run)
        self._write(FINAL_ACTOR, lambda path: save_policy(path, algorithm.policy, **about))
        critic = critic_of(algorithm)
        if critic is not None:
            self._write(FINAL_CRITIC, lambda path: save_critic(path, critic, **about))

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        try:
            write(self.folder / name)
        except OSError as error:
            _log.error("policy %s was not saved (%s); older ones are intact", self.folder / name, error)


def _account(run: Progress) -> dict[str, Any]:
    """What a policy file says of the run."""
    return {"env_steps": run.env_steps, "return_": run.recent_return, "lta": run.recent_lta}


def critic_of(algorithm: Any) -> ValueFunction | None:
    """The critic of an algorithm that has one."""
    critic = getattr(getattr(algorithm, "model", None), "critic", None)
    return None if critic is None else ValueFunction(critic, algorithm.policy.config, algorithm.policy.spec)

"""The policy files of a run: the best one, numbered ones along the way, and the last.

The best policies of all runs on one problem.

A problem is an environment with its settings, however many of it are stepped and in whatever way, and a yardstick: the
mean return of a run's final policy over so many new episodes, acting without noise. The return while training would
also tell how much noise a policy explores with, and the best of many checkpoints would be the luckiest one. Every run
plays episodes of its own, so a mean is as sure as its standard error says; a lead within twice that of the difference
is called noise. Results over another number of episodes are in a hall of their own.

Where episodes never end, or a run is judged by its long-run average (`checkpoints.best_by: lta`), there are two further
halls of the problem: by the average of the final policy without noise, and by that of the best policy while training,
which the run enters as it goes and where each run has one place.

    runs/hall_of_fame/CartPole-v1-1f3a9c02/index.json
    runs/hall_of_fame/CartPole-v1-1f3a9c02/<run>-<hash>.safetensors
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from canter.algorithms.base import Algorithm
from canter.core.plain import from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import replace_file
from canter.core.storage.lock import folder_mutex
from canter.core.storage.strict import read_json, write_json
from canter.envs import EnvConfig
from canter.nn.policy_file import (
    BEST,
    FINAL_ACTOR,
    POLICIES,
    NoPolicy,
    PolicyFileCorrupt,
    describe,
    read_policy_file,
    save_policy,
    write_policy_file,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProgressSnapshot:
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

    def consider(self, algorithm: Algorithm[Any], run: ProgressSnapshot) -> None:
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

    def save_numbered(self, algorithm: Algorithm[Any], run: ProgressSnapshot) -> None:
        """Write the policy under the number of its steps."""
        about = run.account()
        self._write(f"step-{run.env_steps:09d}.safetensors", lambda path: save_policy(path, algorithm.policy, **about))

    def save_final(self, algorithm: Algorithm[Any], run: ProgressSnapshot) -> None:
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


HALL, INDEX = "hall_of_fame", "index.json"
PLACES = 5
"""How many policies a hall keeps."""
STEPPING_SETTINGS = ("num_envs", "vectorization", "autoreset")
"""Settings of an environment that do not change the problem."""


class HallOfFameCorrupt(UserError):
    """An index that is not what was written; the message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One policy of a hall."""

    return_: float
    """Mean return."""
    error: float
    """Standard error of that mean."""
    run: str
    """Name of the run's folder."""
    seed: int
    env_steps: int
    """Transitions that it had learned from."""
    date: str
    """When it was entered, ISO 8601, UTC."""
    file: str
    """Its policy file in the hall, named after the run and the file's content."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """What the index of a hall says."""

    schema: Literal[1]
    """Version of the file; readers refuse what they do not know."""
    problem: dict[str, Any]
    entries: tuple[Entry, ...]
    """The best first."""


def enter_hall_of_fame(run: Path, env: EnvConfig, returns: Sequence[float], seed: int) -> str:
    """Enter the final policy of a run, which scored `returns`; says in a sentence how it compares with earlier runs.

    The hall is beside the run. It is optional: where it cannot be used, the sentence says why and nothing else fails.
    """
    mean, error = math.nan, math.nan
    if all(map(math.isfinite, returns)):
        mean = math.fsum(returns) / len(returns)
        error = math.sqrt(math.fsum((x - mean) ** 2 for x in returns) / max(1, len(returns) - 1) / len(returns))
    return _enter(run, problem_of(env) | {"episodes": len(returns)}, mean, error, seed)


def enter_by_average(
    run: Path, env: EnvConfig, average: tuple[float, float], seed: int, *, training: bool = False
) -> str:
    """The same by the reward per unit of time and half the width of its 95 % interval.

    It is that of the final policy without noise or, while `training`, of the best policy that the run has written.
    """
    # Resets only help to learn where a task never ends; its average is that without them.
    problem = problem_of(replace(env, reset_steps=None)) | {"average": "training" if training else "final"}
    return _enter(run, problem, average[0], average[1] / 1.96, seed)


def _enter(run: Path, problem: dict[str, Any], mean: float, error: float, seed: int) -> str:
    """Enter the final policy of a run, or its best one by the average while training, that did so well."""
    training = problem.get("average") == "training"
    policy = run / POLICIES / (BEST if training else FINAL_ACTOR)
    try:
        info, _ = read_policy_file(policy, "actor")
        data = policy.read_bytes()
        if not math.isfinite(mean) or not math.isfinite(error):
            raise ValueError("a return is NaN or infinite")
        entry = Entry(
            return_=mean,
            error=error,
            run=run.name,
            seed=seed,
            env_steps=info.env_steps,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            file=f"{run.name[:200]}-{hashlib.sha256(data).hexdigest()[:8]}.safetensors",
        )
        best = HallOfFame(run.parent / HALL, problem).enter(entry, data, one_per_run=training)
    except (OSError, ValueError) as failure:
        return f"The hall of fame was not updated: {failure}"
    return _verdict(problem, entry, best)


def _verdict(about: dict[str, Any], new: Entry, old: Entry | None) -> str:
    """How a new policy compares with the best of the others."""
    problem, form = (f"{about['id']} by long-run average", ".4g") if "average" in about else (about["id"], ".1f")
    mine = format(new.return_, form)
    if old is None:
        return f"First result on {problem}: {mine}"
    rival = f"run {old.run}" if old.run != new.run else "this run earlier"
    if new.return_ == old.return_:
        return f"As good as the best on {problem}: {mine}, like {rival}"
    noise = abs(new.return_ - old.return_) <= 2 * math.hypot(new.error, old.error)
    remark = " (the difference may be noise)" if noise else ""
    theirs = format(old.return_, form)
    if new.return_ > old.return_:
        return f"Best so far on {problem}: {mine}, beating {theirs} of {rival}{remark}"
    return f"Not the best on {problem}: {mine}, {rival} has {theirs}{remark}"


def problem_of(env: EnvConfig) -> dict[str, Any]:
    """What of an environment's settings makes the problem: its id, and what differs from the defaults."""
    defaults = to_plain(type(env)())
    problem = {name: value for name, value in to_plain(env).items() if value != defaults[name]}
    return {name: value for name, value in problem.items() if name not in STEPPING_SETTINGS} | {"id": env.id}


class HallOfFame:
    """The hall of one problem; any number of processes may enter policies at once."""

    def __init__(self, parent: Path, problem: Mapping[str, Any]) -> None:
        self.problem = dict(problem)
        readable = re.sub(r"[^\w.]+", "-", str(problem["id"]))[:80]
        text = json.dumps(self.problem, sort_keys=True)
        self.folder = parent / f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def enter(self, entry: Entry, policy: bytes, *, one_per_run: bool = False) -> Entry | None:
        """Take a policy up if it is among the best, perhaps in the place of another of its run.

        Gives the best of the others. The file comes before the index that names it, and files that no index names go
        last: a kill at any moment leaves an index whose files are there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_mutex(self.folder):
            others = [other for other in self._readable() if other.file != entry.file]
            if one_per_run:
                others = [other for other in others if other.run != entry.run]
            kept = sorted([*others, entry], key=lambda other: -other.return_)[:PLACES]
            if entry in kept:
                replace_file(self.folder / entry.file, policy)
                write_json(self.folder / INDEX, to_plain(Index(schema=1, problem=self.problem, entries=tuple(kept))))
            for file in (*self.folder.glob("*.safetensors"), *self.folder.glob(".*.partial")):
                if file.name not in {other.file for other in kept}:
                    file.unlink(missing_ok=True)
        return max(others, key=lambda other: other.return_, default=None)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, the best first; `HallOfFameCorrupt` if the index cannot be used."""
        path = self.folder / INDEX
        try:
            return from_plain(read_json(path), Index).entries
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise HallOfFameCorrupt(f"{path} cannot be used: {error}") from error

    def _readable(self) -> tuple[Entry, ...]:
        """All entries; an index that cannot be used is set aside, and the hall begins anew."""
        try:
            return self.entries()
        except HallOfFameCorrupt as error:
            aside = self.folder / f"{INDEX}.corrupt"
            os.replace(self.folder / INDEX, aside)
            _log.warning("%s; it is now %s, and the hall of fame begins anew", error, aside)
            return ()

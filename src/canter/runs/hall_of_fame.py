"""The hall of fame: the best policies of all runs on one problem.

A problem is an environment with its settings, except those that only affect how it is stepped, its
source (`canter.envs.source`), and a score: the mean return of a run's final policy over a number of
new episodes without exploration noise. The return during training would depend on the noise, and
the best of many checkpoints would be a lucky one. Every run plays its own episodes, so the standard
error says how certain a mean is; a lead within twice the standard error of the difference is
reported as possible noise. The mean of a single episode has no standard error and is not entered.

If episodes never end, or the score is the long-run average (`algorithm.objective: average` or
`checkpoints.best_by: lta`), the problem has two other halls instead: by the average of the final
policy without noise, and by that of the best policy during training, which a run enters as it
improves and where each run has one entry.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from canter.core.plain import from_plain, to_plain
from canter.core.registry import UserError
from canter.core.storage.files import read_json, replace_file, write_json
from canter.core.storage.lock import folder_mutex
from canter.envs import EnvConfig
from canter.envs.source import source_fingerprint
from canter.nn.policy_file import BEST, FINAL_ACTOR, POLICIES, read_policy_file
from canter.runs.records import HALL

_log = logging.getLogger(__name__)


INDEX = "index.json"
PLACES = 5
"""Number of policies that a hall keeps."""
STEPPING_SETTINGS = ("num_envs", "vectorization", "autoreset")
"""Environment settings that do not change the problem."""


class HallOfFameCorrupt(UserError):
    """A damaged index; the message names the file and what is wrong."""


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
    """Transitions that it was trained on."""
    date: str
    """Time of its entry, ISO 8601, UTC."""
    file: str
    """Its policy file in the hall, named after the run and the file's content."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Content of the index file of a hall."""

    schema: Literal[1]
    """Version of the file; readers refuse other versions."""
    problem: dict[str, Any]
    entries: tuple[Entry, ...]
    """Sorted, the best first."""


def enter_hall_of_fame(run: Path, env: EnvConfig, returns: Sequence[float], seed: int) -> str:
    """Enter the final policy of a run with its `returns`; return a sentence that compares it.

    The hall is next to the run. If it cannot be used, the sentence says why; no exception is
    raised.
    """
    if len(returns) < 2:
        return "One episode is too few for a comparison with other runs"
    mean = math.nan
    error = math.nan
    if all(map(math.isfinite, returns)):
        mean = math.fsum(returns) / len(returns)
        error = math.sqrt(math.fsum((x - mean) ** 2 for x in returns) / (len(returns) - 1) / len(returns))
    return _enter(run, problem_of(env), mean, error, seed)


def enter_by_average(
    run: Path, env: EnvConfig, average: tuple[float, float], seed: int, *, training: bool = False
) -> str:
    """Enter a policy by its reward per unit of time and half the width of its 95 % interval.

    This is the final policy without noise or, with `training`, the best policy written so far.
    """
    # In a task that never ends, resets only help training; the average is measured without them.
    problem = problem_of(replace(env, reset_steps=None)) | {"average": "training" if training else "final"}
    return _enter(run, problem, average[0], average[1] / 1.96, seed)


def _enter(run: Path, problem: dict[str, Any], mean: float, error: float, seed: int) -> str:
    """Enter the final policy of a run, or its best one by the average while training."""
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
        hall = HallOfFame(run.parent / HALL, problem)
        best = hall.enter(entry, data, one_per_run=training)
    except (OSError, ValueError) as failure:
        return f"The hall of fame was not updated: {failure}"
    since = " since its source changed; earlier scores are not compared" if best is None and hall.had_source() else ""
    return _verdict(problem, entry, best) + since


def _verdict(about: dict[str, Any], new: Entry, old: Entry | None) -> str:
    """Return a sentence that compares a new policy with the best of the others."""
    problem = about["id"]
    form = ".1f"
    if "average" in about:
        problem = f"{problem} by long-run average"
        form = ".4g"
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
    """Return what defines the problem: the id, the settings that are not the default, the source."""
    defaults = to_plain(type(env)())
    problem = {name: value for name, value in to_plain(env).items() if value != defaults[name]}
    problem = {name: value for name, value in problem.items() if name not in STEPPING_SETTINGS} | {"id": env.id}
    source = source_fingerprint(env.id)
    return problem if source is None else problem | {"source": source}


class HallOfFame:
    """The hall of fame of one problem; several processes may use it at once."""

    def __init__(self, root: Path, problem: Mapping[str, Any]) -> None:
        self.problem = dict(problem)
        readable = re.sub(r"[^\w.]+", "-", str(problem["id"]))[:80]
        text = json.dumps(self.problem, sort_keys=True)
        self.folder = root / f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def enter(self, entry: Entry, policy: bytes, *, one_per_run: bool = False) -> Entry | None:
        """Add a policy if it is among the best; return the best of the others.

        With `one_per_run` it replaces an earlier policy of its run. Files are written before the
        index and removed after it, so that a kill at any moment leaves an index whose files exist.
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

    def had_source(self) -> bool:
        """Return True if there is a hall of the same problem with another source."""
        others = self.folder.parent.glob(f"{self.folder.name[:-8]}*/{INDEX}")
        for path in others:
            with suppress(OSError, ValueError):
                problem = from_plain(read_json(path), Index).problem
                if problem != self.problem and problem | {"source": ""} == self.problem | {"source": ""}:
                    return True
        return False

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, the best first; raise HallOfFameCorrupt for a damaged index."""
        path = self.folder / INDEX
        try:
            return from_plain(read_json(path), Index).entries
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise HallOfFameCorrupt(f"{path} cannot be used: {error}") from error

    def _readable(self) -> tuple[Entry, ...]:
        """Return all entries; rename a damaged index and start with an empty one."""
        try:
            return self.entries()
        except HallOfFameCorrupt as error:
            aside = self.folder / f"{INDEX}.corrupt"
            os.replace(self.folder / INDEX, aside)
            _log.warning("%s; it is now %s, and the hall of fame starts empty", error, aside)
            return ()

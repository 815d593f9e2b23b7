"""The best policies of all runs on one problem.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canter.envs import EnvConfig
from canter.plain import to_plain
from canter.storage.durable import replace_file
from canter.storage.lock import guard
from canter.storage.policy_file import BEST, FINAL_ACTOR, POLICIES, read_policy_file
from canter.storage.strict_json import Malformed, parse_json
from canter.storage.untrusted import read_untrusted

HALL, INDEX = "hall_of_fame", "index.json"
SCHEMA = 1
PLACES = 5
"""How many policies a hall keeps."""
MAX_BYTES = 1 << 20
HOW_IT_IS_STEPPED = ("num_envs", "vectorization", "autoreset")
"""Settings of an environment that do not change the problem."""

_log = logging.getLogger(__name__)


class HallCorrupt(ValueError):
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


@dataclass(frozen=True)
class Verdict:
    """How a new policy compares with those before it."""

    problem: str
    entry: Entry
    best_before: Entry | None
    """The best of the others; None if there is none."""
    form: str = ".1f"
    """How results are written."""

    def __str__(self) -> str:
        new, old = self.entry, self.best_before
        mine = format(new.return_, self.form)
        if old is None:
            return f"First result on {self.problem}: {mine}"
        rival = f"run {old.run}" if old.run != new.run else "this run earlier"
        if new.return_ == old.return_:
            return f"As good as the best on {self.problem}: {mine}, like {rival}"
        noise = abs(new.return_ - old.return_) <= 2 * math.hypot(new.error, old.error)
        remark = " (the difference may be noise)" if noise else ""
        theirs = format(old.return_, self.form)
        if new.return_ > old.return_:
            return f"Best so far on {self.problem}: {mine}, beating {theirs} of {rival}{remark}"
        return f"Not the best on {self.problem}: {mine}, {rival} has {theirs}{remark}"


def enter_hall_of_fame(run: Path, env: EnvConfig, returns: Sequence[float], seed: int) -> str:
    """Enter the final policy of a run, which scored `returns`; says in a sentence how it compares with earlier runs.

    The hall is beside the run. It is optional: where it cannot be used, the sentence says why and nothing else fails.
    """
    try:
        return str(_enter(run, env, returns, seed))
    except (OSError, ValueError) as error:
        return f"The hall of fame was not updated: {error}"


def enter_by_average(
    run: Path, env: EnvConfig, average: tuple[float, float], seed: int, *, training: bool = False
) -> str:
    """The same by the reward per unit of time and half the width of its 95 % interval.

    It is that of the final policy without noise or, while `training`, of the best policy that the run has written.
    """
    mean, error = average[0], average[1] / 1.96
    # Resets only help to learn where a task never ends; its average is that without them.
    problem = problem_of(replace(env, reset_steps=None)) | {"average": "training" if training else "final"}
    try:
        entry, data = _entry(run, BEST if training else FINAL_ACTOR, mean, error, seed)
        verdict = Hall(run.parent / HALL, problem).enter(entry, data, one_per_run=training)
    except (OSError, ValueError) as failure:
        return f"The hall of fame was not updated: {failure}"
    return str(replace(verdict, problem=f"{env.id} by long-run average", form=".4g"))


def _enter(run: Path, env: EnvConfig, returns: Sequence[float], seed: int) -> Verdict:
    mean = math.fsum(returns) / len(returns)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in returns) / max(1, len(returns) - 1) / len(returns))
    entry, data = _entry(run, FINAL_ACTOR, mean, error, seed)
    return Hall(run.parent / HALL, {**problem_of(env), "episodes": len(returns)}).enter(entry, data)


def _entry(run: Path, file: str, mean: float, error: float, seed: int) -> tuple[Entry, bytes]:
    """A policy of a run that did so well, and its file's content."""
    policy = run / POLICIES / file
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
    return entry, data


def problem_of(env: EnvConfig) -> dict[str, Any]:
    """What of an environment's settings makes the problem: its id, and what differs from the defaults."""
    defaults = to_plain(type(env)())
    problem = {name: value for name, value in to_plain(env).items() if value != defaults[name]}
    return {name: value for name, value in problem.items() if name not in HOW_IT_IS_STEPPED} | {"id": env.id}


class Hall:
    """The hall of one problem; any number of processes may enter policies at once."""

    def __init__(self, parent: Path, problem: Mapping[str, Any]) -> None:
        self.problem = dict(problem)
        readable = re.sub(r"[^\w.]+", "-", str(problem["id"]))[:80]
        text = json.dumps(self.problem, sort_keys=True)
        self.folder = parent / f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def enter(self, entry: Entry, policy: bytes, *, one_per_run: bool = False) -> Verdict:
        """Take a policy up if it is among the best, perhaps in the place of another of its run; says how it compares.

        The file comes before the index that names it, and files that no index names go last: a kill at any moment
        leaves an index whose files are there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with guard(self.folder):
            others = [other for other in self._readable() if other.file != entry.file]
            if one_per_run:
                others = [other for other in others if other.run != entry.run]
            kept = sorted([*others, entry], key=lambda other: -other.return_)[:PLACES]
            if entry in kept:
                replace_file(self.folder / entry.file, policy)
                document = {"schema": SCHEMA, "problem": self.problem, "entries": [asdict(other) for other in kept]}
                text = json.dumps(document, indent=1, allow_nan=False) + "\n"
                replace_file(self.folder / INDEX, text.encode())
            for file in (*self.folder.glob("*.safetensors"), *self.folder.glob(".*.partial")):
                if file.name not in {other.file for other in kept}:
                    file.unlink(missing_ok=True)
        return Verdict(str(self.problem["id"]), entry, max(others, key=lambda other: other.return_, default=None))

    def entries(self) -> list[Entry]:
        """All entries, the best first; `HallCorrupt` if the index cannot be used."""
        path = self.folder / INDEX
        try:
            return _parse_index(parse_json(read_untrusted(path, MAX_BYTES, within=self.folder)))
        except FileNotFoundError:
            return []
        except (OSError, Malformed) as error:
            raise HallCorrupt(f"{path} cannot be used: {error}") from error

    def _readable(self) -> list[Entry]:
        """All entries; an index that cannot be used is set aside, and the hall begins anew."""
        try:
            return self.entries()
        except HallCorrupt as error:
            aside = self.folder / f"{INDEX}.corrupt"
            os.replace(self.folder / INDEX, aside)
            _log.warning("%s; it is now %s, and the hall of fame begins anew", error, aside)
            return []


def _parse_index(document: Any) -> list[Entry]:
    match document:
        case {"schema": 1, "problem": dict(), "entries": list(entries)}:
            return [_parse_entry(entry) for entry in entries]
    raise Malformed(f"it is no index of schema {SCHEMA}")


def _parse_entry(plain: Any) -> Entry:
    match plain:
        case {
            "return_": float() | int(),
            "error": float() | int(),
            "run": str(),
            "seed": int(),
            "env_steps": int(),
            "date": str(),
            "file": str(),
        } if len(plain) == 7:
            return Entry(**plain)
    raise Malformed(f"an entry is malformed: {str(plain)[:100]}")

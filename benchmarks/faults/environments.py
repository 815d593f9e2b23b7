"""`canter train` on environments that misbehave, in every way and however they are stepped, then resumed.

A run must end with exit code 1 and no traceback on the terminal, within the time-out, say which environment it was and
at which step, and have saved all rollouts before the one of that step. Mended, it must go on to its end. `close` that
fails must not harm a run at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kills import NAME, spawn, wait
from misbehaving import CLOSE, PROCESS, RESETS, STEPS

from canter.core.storage.checkpoint import CheckpointStore

HORIZON, NUM_ENVS = 16, 2
EARLY, LATE = 340, 640
"""Steps; the look before a run takes about 320, with environments of its own."""
HOWS = {
    "sync": ["--env.vectorization=sync"],
    "threads": ["--env.vectorization=threads"],
    "forked": ["--env.vectorization=forked"],
    "async": ["--env.vectorization=async"],
    "next_step": ["--env.autoreset=next_step"],
    "disabled": ["--env.autoreset=disabled"],
}
FLAGS = [f"--algorithm.horizon={HORIZON}", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--console=quiet"]
FLAGS += [f"--num-envs={NUM_ENVS}", "--total-steps=1600", "--env.step-timeout=5", "--env.close-timeout=2"]
SECONDS = 60
"""What takes longer hangs."""


@dataclass
class Misbehaviour:
    """What came of all runs."""

    runs: int = 0
    resumed: int = 0
    rollouts_lost: int = 0
    """The most that one run has lost."""
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def cases() -> Iterator[tuple[str, str, int]]:
    """Kind, way of stepping and first bad step."""
    for at in (EARLY, LATE):
        for kind in (*STEPS, *RESETS, "close_raises"):
            for how in HOWS:
                yield kind, how, at
        for kind in (*PROCESS, "close_hangs"):
            yield kind, "async", at
            yield kind, "forked", at


def misbehave(scratch: Path, count: int) -> Misbehaviour:
    """So many of the cases, spread evenly; every tenth is resumed."""
    result, everything = Misbehaviour(), list(cases())
    step = max(1, len(everything) // max(count, 1))
    for number, (kind, how, at) in enumerate(everything[::step][:count] if count < len(everything) else everything):
        runs = scratch / "misbehaving"
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True)
        _one(result, runs, kind, how, at, resume=number % 10 == 0)
    return result


def _one(result: Misbehaviour, runs: Path, kind: str, how: str, at: int, *, resume: bool) -> None:
    name, log, start = f"{kind}, {how}, step {at}", runs / "log.txt", time.monotonic()
    own = [f"--env.options.kind={kind}", f"--env.options.at={at}", "--run-dir", str(runs), "--name", NAME]
    importing = ["--allow-import", "misbehaving"]
    code = wait(spawn([*importing, "train", "misbehaving:Misbehaving", *FLAGS, *HOWS[how], *own], log))
    seconds, text = time.monotonic() - start, " ".join(log.read_text(errors="replace").split())
    result.runs, result.slowest = result.runs + 1, max(result.slowest, round(seconds, 1))
    if "Traceback" in text:
        result.wrong.append(f"{name}: a traceback on the terminal")
    if seconds > SECONDS:
        result.wrong.append(f"{name}: took {seconds:.0f} s")
    if (runs / NAME / "run.lock").exists():
        result.wrong.append(f"{name}: the lock is still there")
    if kind in CLOSE:
        if code != 0:
            result.wrong.append(f"{name}: exit code {code} of a good run, {text[-300:]}")
        return
    saved = CheckpointStore(runs / NAME / "checkpoints").steps()
    rows = [json.loads(line)["iteration"] for line in (runs / NAME / "metrics.jsonl").read_text().splitlines()]
    said = re.search(r"environment (\d).* at its step (\d+)", text)
    if code != 1 or not said or not saved or rows != list(range(1, saved[-1] + 1)):
        result.wrong.append(f"{name}: exit code {code}, {len(rows)} rows, checkpoints {saved}, {text[-300:]}")
        return
    # An observation counts with the step that it leads to, which may be the first of the next rollout.
    lost = max(1, -(-(int(said[2]) - saved[-1] * HORIZON) // HORIZON))
    result.rollouts_lost = max(result.rollouts_lost, lost)
    if lost > 1:
        result.wrong.append(f"{name}: {lost} rollouts lost")
    if resume:
        result.resumed += 1
        mended = [*importing, "resume", str(runs / NAME), "--console=quiet"]
        code = wait(spawn(mended, log, lambda: os.environ.update(MENDED="yes")))
        if code != 0:
            result.wrong.append(f"{name}: resumed with exit code {code}, {log.read_text()[-300:]}")

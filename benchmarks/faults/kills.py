"""`canter train` killed with SIGKILL, at random moments and at every file operation of a save, then resumed.

After each kill the folder must be usable. Once resumed to its end, the run must have left what the run that nobody
killed has left, to the bit: checkpoints with weights, moments, statistics, random states and environments; policies;
metrics but for the clocks. Children are forks of this process, which has imported torch once for all of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from canter.cli import main
from canter.runs.hall_of_fame import HALL
from canter.runs.run_folder import CONFIG, Parts, RunFolder, never_began
from canter.runs.run_record import run_status
from canter.storage.checkpoint import CheckpointStore, load_checkpoint
from canter.storage.policy_file import BEST, POLICIES, read_policy_file
from canter.storage.validity import flatten

ITERATIONS = 14
MILESTONE = 10
"""An iteration whose save writes a numbered policy, marks its checkpoint to be kept and drops another."""
FLAGS = ["--algorithm.horizon=16", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--seed=3"]
FLAGS += ["--checkpoints.save-every=1", "--checkpoints.keep-last=1", "--checkpoints.num-checkpoints=3"]
NUM_ENVS = {"CartPole-v1": 16, "tensor:cartpole": 32}
OPERATIONS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link")
UNHARMED = 77
NAME = "run"


@dataclass(frozen=True)
class Aim:
    """Before a file operation of one save, which is after the one before it; number 0 is none of them."""

    iteration: int
    final: bool = False
    """The save at the end, not the one after the last iteration."""
    number: int = 0


@dataclass
class Kills:
    """What came of all kills."""

    kills: int = 0
    chains: int = 0
    """Runs that were brought to their end, each after one or several kills."""
    before_the_first_checkpoint: int = 0
    unusable: list[str] = field(default_factory=list)
    not_exact: list[str] = field(default_factory=list)


def train_arguments(env_id: str, runs: Path) -> list[str]:
    steps = ITERATIONS * 16 * NUM_ENVS[env_id]
    sizes = [f"--num-envs={NUM_ENVS[env_id]}", f"--total-steps={steps}"]
    return ["train", env_id, *FLAGS, *sizes, "--run-dir", str(runs), "--name", NAME]


def go_on_arguments(env_id: str, runs: Path) -> list[str]:
    """What a user would type after a crash: resume, or train again where the run had not even written its settings."""
    if (runs / NAME / CONFIG).exists():
        return ["resume", str(runs / NAME)]
    return train_arguments(env_id, runs)


def spawn(arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Start a `canter` command as a child; gives its process number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        prepare()
        main(arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """Exit code of a child, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def remains(folder: Path) -> dict[str, Any]:
    """What a finished run has left, without what tells the time."""
    marked = sorted(path.stem for path in (folder / "checkpoints").glob("*.keep"))
    trees = {name: load_checkpoint(folder / "checkpoints" / name) for name in marked}
    for tree in trees.values():
        del tree["run"]["seconds"]
    clocks = ('"seconds"', '"wall_time"', '"time/')
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [[item for item in line.strip("{}").split(", ") if not item.startswith(clocks)] for line in lines]
    policies = {path.name: path.read_bytes() for path in (folder / POLICIES).iterdir()}
    scraps = [path.name for path in folder.rglob(".*") if not path.name.endswith(".guard")]
    settings = (folder / CONFIG).read_text()
    return {"checkpoints": trees, "policies": policies, "metrics": metrics, "scraps": scraps, "settings": settings}


def differences(one: Any, other: Any) -> list[str]:
    """Paths at which two trees are not equal to the bit."""
    one, other = flatten(one), flatten(other)

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return type(a) is type(b) and a == b

    return [name for name in {**one, **other} if not same(one.get(name), other.get(name))]


def faults_of(folder: Path) -> str | None:
    """Why a folder could not be gone on with, if it could not."""
    if not (folder / CONFIG).exists():
        return None if not folder.exists() or never_began(folder) else "there are no settings"
    try:
        store = CheckpointStore(folder / "checkpoints")
        if store.steps():
            store.load_latest()
        for path in (folder / POLICIES).glob("*.safetensors"):
            read_policy_file(path)
        if run_status(folder) not in ("interrupted", "finished", "unknown"):
            return f"its status is {run_status(folder)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Campaign:
    """Kills runs on one environment under one folder."""

    def __init__(self, env_id: str, scratch: Path, result: Kills) -> None:
        self.env_id, self.result = env_id, result
        self.scratch = scratch / env_id.replace(":", "-")
        self.scratch.mkdir(parents=True)
        self.log = self.scratch / "log.txt"
        with contextlib.redirect_stdout(io.StringIO()):
            main([*train_arguments(env_id, self.scratch), "--dry-run"])  # imports now what each child would import
        start = time.monotonic()
        if wait(spawn(train_arguments(env_id, self.scratch / "reference"), self.log)) != 0:
            raise RuntimeError(f"the run that nobody kills failed: {self.log.read_text()[-2000:]}")
        self.duration = time.monotonic() - start
        self.reference = remains(self.scratch / "reference" / NAME)

    def note(self, runs: Path, where: str) -> None:
        """Count a kill and look at what it left."""
        self.result.kills += 1
        self.result.before_the_first_checkpoint += not CheckpointStore(runs / NAME / "checkpoints").steps()
        fault = faults_of(runs / NAME)
        if fault:
            self.result.unusable.append(f"{self.env_id}{where}: {fault}")

    def fail(self, where: str, code: int) -> None:
        """Note that a run could not go on, with its last words."""
        self.result.unusable.append(f"{self.env_id}{where}: exit code {code}, {self.log.read_text()[-500:]}")

    def finish(self, runs: Path, where: str) -> None:
        """Compare a run that was brought to its end with the one that nobody killed."""
        self.result.chains += 1
        try:
            found = differences(remains(runs / NAME), self.reference)
            index = list((runs / HALL).glob("*/index.json"))
            if len(index) != 1 or index[0].read_text().count('"run": "run"') != 1:
                found.append("hall of fame")
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            self.result.not_exact.append(f"{self.env_id}{where}: {', '.join(found[:5])}")
        else:
            shutil.rmtree(runs)

    def random_chain(self, rng: random.Random, most: int) -> None:
        """One run, killed at random moments until it has come to its end or was killed often enough."""
        runs = self.scratch / f"chain-{self.result.chains}"
        where = ""
        for attempt in range(most + 1):
            pid = spawn(go_on_arguments(self.env_id, runs), self.log)
            if attempt < most:
                delay = rng.uniform(0, self.duration)
                time.sleep(delay)
                os.kill(pid, signal.SIGKILL)
            code = wait(pid)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                self.fail(where, code)
                return
            where += f", killed after {delay:.3f} s"
            self.note(runs, where)
        self.finish(runs, where)

    def aimed_kills(self, every: int = 1) -> None:
        """A kill before each file operation of three saves; or of every so many operations."""
        best = read_policy_file(self.scratch / "reference" / NAME / POLICIES / BEST)[0].env_steps
        iteration_of_best = best // (16 * NUM_ENVS[self.env_id])
        for aim in (Aim(MILESTONE), Aim(iteration_of_best), Aim(ITERATIONS, final=True)):
            template = self.scratch / f"template-{aim.iteration}-{aim.final}"
            before = Aim(aim.iteration - (not aim.final))
            if wait(spawn(train_arguments(self.env_id, template), self.log, lambda aim=before: arm(aim))) != UNHARMED:
                raise RuntimeError(f"no run to begin with: {self.log.read_text()[-2000:]}")
            number = (every + 1) // 2
            while self.aimed_kill(template, replace(aim, number=number)):
                number += every

    def aimed_kill(self, template: Path, aim: Aim) -> bool:
        """One of them; False if the save has fewer operations."""
        where = f", {aim}"
        runs = self.scratch / "aimed"
        shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(template, runs, symlinks=True)
        code = wait(spawn(["resume", str(runs / NAME)], self.log, lambda: arm(aim)))
        if code == UNHARMED:
            return False
        if code == -signal.SIGKILL:
            self.note(runs, where)
            code = wait(spawn(["resume", str(runs / NAME)], self.log))
        if code == 0:
            self.finish(runs, where)
        else:
            self.fail(where, code)
        return True


def arm(aim: Aim) -> None:
    """Let this process die where it is aimed at, or leave after that save."""
    save, count = RunFolder.save, 0

    def hook(name: str) -> None:
        original = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == aim.number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, counted)

    def armed(folder: RunFolder, parts: Parts, *, final: bool = False) -> None:
        if parts.run.iteration == aim.iteration and final == aim.final:
            for name in OPERATIONS:
                hook(name)
            save(folder, parts, final=final)
            os._exit(UNHARMED)
        save(folder, parts, final=final)

    RunFolder.save = armed

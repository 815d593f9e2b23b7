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

from canter.app.cli import main
from canter.core.storage.checkpoint import CheckpointStore, load_checkpoint
from canter.core.storage.validity import flatten
from canter.nn.policy_file import BEST, POLICIES, read_policy_file
from canter.runs.hall_of_fame import HALL
from canter.runs.records import CONFIG, is_unstarted, run_status
from canter.runs.run_folder import RunFolder
from canter.runs.state import TrainState

ITERATIONS = 14
MILESTONE = 10
"""An iteration whose save writes a numbered policy, marks its checkpoint to be kept and drops another."""
FLAGS = ["--algorithm.horizon=16", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--seed=3"]
FLAGS += ["--total-steps=null", f"--until.iterations={ITERATIONS}"]
FLAGS += ["--checkpoints.save-every=1", "--checkpoints.keep-last=1", "--checkpoints.num-checkpoints=3"]
IMPORT = ["--allow-import", "bonus"]
MEMORY, CELL = "--algorithm.model.policy.rnn", "--algorithm.model.policy.rnn.cell"
CASES: dict[str, list[str]] = {
    "CartPole-v1": ["--num-envs=16"],
    "tensor:cartpole": ["--num-envs=32"],
    "async": ["CartPole-v1", "--num-envs=4", "--env.vectorization=async"],
    "threads of environments": ["CartPole-v1", "--num-envs=4", "--env.vectorization=threads"],
    "next step": ["CartPole-v1", "--num-envs=8", "--env.autoreset=next_step"],
    "Pendulum-v1": ["--num-envs=4"],
    "shared trunk": ["CartPole-v1", "--num-envs=8", "--algorithm.model.shared-trunk=true"],
    "tensor:pendulum": ["--num-envs=32"],
    "tensor:quadrotor": ["--num-envs=16"],
    "average reward": ["tensor:queue", "--num-envs=16", "--env.reset-steps=100"],
    "LSTM": ["tensor:cartpole", "--num-envs=16", f"{CELL}=lstm"],
    "GRU": ["CartPole-v1", "--num-envs=8", f"{CELL}=gru", f"{MEMORY}.position=after_mlp"],
    "central value": ["tensor:cartpole", "--num-envs=16", "--algorithm.central-value.epochs=2"],
    "central value of agents": ["tensor:rendezvous", "--num-envs=8", "--algorithm.central-value.epochs=2"],
    "agents": ["tensor:rendezvous", "--num-envs=8"],
    "self-play": ["tensor:rps", "--num-envs=32"],
    "extension": ["tensor:cartpole", "--num-envs=16", "--algorithm.extensions=[{kind: bonus}]", *IMPORT],
    "threads of the update": ["tensor:cartpole", "--num-envs=32", "--execution.threads=2"],
    "autograd": ["CartPole-v1", "--num-envs=8", "--execution.engine=autograd"],
    "adaptive rate": [
        *("tensor:pendulum", "--num-envs=16", "--algorithm.optimizer.learning-rate.kind=adaptive_kl"),
        "--algorithm.optimizer.learning-rate.start=1e-3",
    ],
    "linear rate, two optimisers": [
        *("tensor:pendulum", "--num-envs=16", "--algorithm.optimizer.learning-rate.kind=linear"),
        *("--algorithm.optimizer.learning-rate.start=1e-3", "--algorithm.critic-optimizer.learning-rate=2e-3"),
    ],
    "beta": ["tensor:pendulum", "--num-envs=16", "--algorithm.model.distribution=beta"],
    "rare rows": ["tensor:cartpole", "--num-envs=16", "--log-every=4"],
}
"""Flags of what is killed, by name; the first of them, or else the name, is the environment."""
RESTARTS = ("async",)
"""Whose environments cannot be looked into, so that episodes start anew after a kill: bits are not promised, but no row
of metrics may be missing or doubled."""
AIMED = ("CartPole-v1", "tensor:cartpole")
"""Whose saves are killed at every file operation."""
OPERATIONS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link")
UNHARMED = 77
NAME, BEFORE = "run", "/before-"


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
    by_case: dict[str, int] = field(default_factory=dict)
    unusable: list[str] = field(default_factory=list)
    not_exact: list[str] = field(default_factory=list)


def train_arguments(case: str, runs: Path) -> list[str]:
    env = [] if not CASES[case][0].startswith("--") else [case]
    return ["train", *env, *FLAGS, *CASES[case], "--run-dir", str(runs), "--name", NAME]


def resume_arguments(case: str, runs: Path) -> list[str]:
    return ["resume", str(runs / NAME), *(IMPORT if IMPORT[-1] in CASES[case] else [])]


def go_on_arguments(case: str, runs: Path) -> list[str]:
    """What a user would type after a crash: resume, or train again where the run had not even written its settings."""
    if not (runs / NAME / CONFIG).exists():
        return train_arguments(case, runs)
    scratch = [] if CheckpointStore(runs / NAME / "checkpoints").steps() else ["--from-scratch"]
    return [*resume_arguments(case, runs), *scratch]


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
        del tree["run"]["seconds"], tree["identity"]["run"]
    clocks = ('"seconds"', '"wall_time"', '"time/')
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [[item for item in line.strip("{}").split(", ") if not item.startswith(clocks)] for line in lines]
    policies = {path.name: path.read_bytes() for path in (folder / POLICIES).iterdir()}
    # What --from-scratch has set aside stays as the kill left it.
    scraps = [path.name for path in folder.rglob(".*") if not path.name.endswith(".guard") and BEFORE not in str(path)]
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
        return None if not folder.exists() or is_unstarted(folder) else "there are no settings"
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
    """Kills runs of one case under one folder."""

    def __init__(self, case: str, scratch: Path, result: Kills) -> None:
        self.case, self.result = case, result
        self.scratch = scratch / case.replace(":", "-").replace(" ", "-")
        self.scratch.mkdir(parents=True)
        self.log = self.scratch / "log.txt"
        with contextlib.redirect_stdout(io.StringIO()):
            main([*train_arguments(case, self.scratch), "--dry-run"])  # imports now what each child would import
        start = time.monotonic()
        if wait(spawn(train_arguments(case, self.scratch / "reference"), self.log)) != 0:
            raise RuntimeError(f"the run that nobody kills failed: {self.log.read_text()[-2000:]}")
        self.duration = time.monotonic() - start
        self.reference = remains(self.scratch / "reference" / NAME)

    def note(self, runs: Path, where: str) -> None:
        """Count a kill and look at what it left."""
        self.result.kills += 1
        self.result.by_case[self.case] = self.result.by_case.get(self.case, 0) + 1
        self.result.before_the_first_checkpoint += not CheckpointStore(runs / NAME / "checkpoints").steps()
        fault = faults_of(runs / NAME)
        if fault:
            self.result.unusable.append(f"{self.case}{where}: {fault}")

    def fail(self, where: str, code: int) -> None:
        """Note that a run could not go on, with its last words."""
        self.result.unusable.append(f"{self.case}{where}: exit code {code}, {self.log.read_text()[-500:]}")

    def finish(self, runs: Path, where: str) -> None:
        """Compare a run that was brought to its end with the one that nobody killed."""
        self.result.chains += 1
        try:
            found = self.differences(remains(runs / NAME))
            index = list((runs / HALL).glob("*/index.json"))
            entries = [path.read_text().count('"run": "run"') for path in index]
            if entries != [1] * len(list((self.scratch / "reference" / HALL).glob("*/index.json"))):
                found.append("hall of fame")
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            self.result.not_exact.append(f"{self.case}{where}: {', '.join(found[:5])}")
        else:
            shutil.rmtree(runs)

    def differences(self, left: dict[str, Any]) -> list[str]:
        """In what a run is not the one that nobody killed."""
        if self.case not in RESTARTS:
            return differences(left, self.reference)
        rows = [[item for item in row if item.startswith('"iteration"')] for row in left["metrics"]]
        expected = [[f'"iteration": {number}'] for number in range(1, ITERATIONS + 1)]
        return differences({"rows": rows, "scraps": left["scraps"]}, {"rows": expected, "scraps": []})

    def random_chain(self, rng: random.Random, most: int) -> None:
        """One run, killed at random moments until it has come to its end or was killed often enough."""
        runs = self.scratch / f"chain-{self.result.chains}"
        where = ""
        for attempt in range(most + 1):
            pid = spawn(go_on_arguments(self.case, runs), self.log)
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
        iteration_of_best = best // (16 * int(CASES[self.case][0].partition("=")[2]))
        for aim in (Aim(MILESTONE), Aim(iteration_of_best), Aim(ITERATIONS, final=True)):
            template = self.scratch / f"template-{aim.iteration}-{aim.final}"
            before = Aim(aim.iteration - (not aim.final))
            if wait(spawn(train_arguments(self.case, template), self.log, lambda aim=before: arm(aim))) != UNHARMED:
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
        code = wait(spawn(resume_arguments(self.case, runs), self.log, lambda: arm(aim)))
        if code == UNHARMED:
            return False
        if code == -signal.SIGKILL:
            self.note(runs, where)
            code = wait(spawn(resume_arguments(self.case, runs), self.log))
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

    def armed(folder: RunFolder, parts: TrainState, *, final: bool = False) -> None:
        if parts.run.iteration == aim.iteration and final == aim.final:
            for name in OPERATIONS:
                hook(name)
            save(folder, parts, final=final)
            os._exit(UNHARMED)
        save(folder, parts, final=final)

    RunFolder.save = armed

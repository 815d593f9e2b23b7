"""Run folders of strangers: pipes, devices, links, bombs and escapes where a run has its files, under every command.

A command must end soon, by success or by one clear line, take no memory to speak of and print nothing that a terminal
would obey. What cannot be used must not be taken for good.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fuzz import Fuzz, Refused, damage_checkpoint, damaged, edited_settings, judge, say
from kills import NAME, spawn

from canter.nn.policy_file import BEST, POLICIES

SECONDS = 60
"""After which a command hangs; a resumed run plays a hundred episodes, and machines may be busy."""
MEMORY = 1 << 20
"""Kilobytes that a process may take in all; torch itself takes about half of it."""
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202e"
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _text(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a device": _link("/dev/zero"),
    "link to a terminal": _link("/dev/tty"),
    "link out": _link("/etc/hostname"),
    "link to a folder": _link("/tmp"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "terabyte of nothing": _sparse,
    "nothing": _text(""),
    "laughs": _text(LAUGHS),
    "deep lists": _text("[" * 500_000),
    "deep mappings": _text('{"a":' * 100_000),
    "infinite number": _text('{"iteration": 1e999, "env_steps": NaN, "schema": -Infinity}'),
    "long number": _text('{"env_steps": ' + "9" * 100_000 + "}"),
    "long line": _text("x" * (3 << 20)),
    "zeros": _text(bytes(1 << 20)),
    "escapes": _text(f'env: {{id: "{ESCAPES}"}}\n"{ESCAPES}": 1\n'.encode()),
    "absurd sizes": _text(
        "env: {id: tensor:cartpole, num_envs: 1000000000}\n"
        "algorithm: {model: {policy: {hidden: [100000000, 100000000]}}}\n"
    ),
}


def checkpoints_of(run: Path) -> list[Path]:
    """The folders of its checkpoints, the newest last."""
    return sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir())


def targets(run: Path) -> list[Path]:
    """What may be replaced."""
    newest = checkpoints_of(run)[-1]
    names = ("config.yaml", "run.json", "metrics.jsonl", "run.lock", ".run.lock.guard", "edits.jsonl")
    checkpoint = [newest / name for name in ("state.json", "manifest.json", "tensors.safetensors")]
    policies = [run / POLICIES / BEST, run / POLICIES / "final_actor.safetensors"]
    return [*(run / name for name in names), *checkpoint, *policies, run / "checkpoints", run / POLICIES]


def commands(run: Path) -> dict[str, list[str]]:
    """What reads a run."""
    return {
        "runs": ["runs", "--run-dir", str(run.parent)],
        "runs --json": ["runs", "--json", "--run-dir", str(run.parent)],
        "report": ["report", str(run), "--out", str(run.parent / "page.html")],
        "eval": ["eval", str(run), "--episodes", "2"],
        "resume": ["resume", str(run), "--console", "quiet"],
        "train --config": ["train", "--config", str(run / "config.yaml"), "--dry-run"],
    }


MUST_REFUSE = {
    ("config.yaml", "eval"),
    ("config.yaml", "resume"),
    ("config.yaml", "train --config"),
    (BEST, "eval"),
    ("checkpoints", "resume"),
    (POLICIES, "resume"),
}
"""Where whatever is put in the place of a file makes the command impossible."""


def check(code: int, out: str, err: str, must_refuse: bool) -> bool:
    """Raise for what no command may do, `Refused` for a clear refusal; whether the rest is as it should be."""
    odd = [c for c in out + err if not c.isprintable() and c not in "\n\t"]
    if odd or "Traceback" in err:
        raise RuntimeError(f"printed {odd[:3]}, {err[-300:]}")
    if code == 0:
        return not must_refuse
    if code not in (1, 2) or not err.splitlines()[-1].startswith("canter: "):
        raise RuntimeError(f"exit code {code}, {err[-300:]}")
    raise Refused(err)


def plant(runs: Path, case: int, rng: random.Random) -> tuple[str, list[str], bool]:
    """Something hostile in a copy of the run; what and where, the command to try, and whether it must be refused."""
    shutil.rmtree(runs / "hostile", ignore_errors=True)
    run = shutil.copytree(runs / NAME, runs / "hostile" / NAME)
    kind, target = list(KINDS)[case % len(KINDS)], rng.choice(targets(run))
    command = rng.choice(list(commands(run)))
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    KINDS[kind](target)
    same = kind == "folder" and target.name in ("checkpoints", POLICIES)  # an empty one is a strange one at most
    harmless = kind == "absurd sizes" and command == "eval"  # it plays a policy of its own size in two environments
    must = (target.name, command) in MUST_REFUSE and not (same and target.name == POLICIES) and not harmless
    return f"{kind} as {target.name} under {command}", commands(run)[command], must


def fuzz_hostile(runs: Path, count: int, rng: random.Random) -> Fuzz:
    """All in this process; the slowest and the memory that it has grown by tell whether something was swallowed."""
    result, before = Fuzz(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(count):
        name, command, must = plant(runs, case, rng)
        judge(result, name, lambda command=command, must=must: check(*say(*command), must), SECONDS)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > MEMORY:
        result.wrong.append(f"memory has grown by {grown} kB")
    shutil.rmtree(runs / "hostile", ignore_errors=True)
    return result


def run_command(arguments: list[str], log: Path) -> tuple[int, str, str]:
    """Exit code and all output of a command in a process of its own; raises for one that hangs or takes too much."""
    log.unlink(missing_ok=True)
    pid, deadline = spawn(arguments, log), time.monotonic() + SECONDS
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"more than {SECONDS} s")
        time.sleep(0.01)
    if usage.ru_maxrss > MEMORY:
        raise MemoryError(f"{usage.ru_maxrss} kB")
    return os.waitstatus_to_exitcode(status), "", log.read_text(errors="surrogateescape")


def damage(runs: Path, case: int, rng: random.Random) -> tuple[str, list[str], bool]:
    """An accident to a file of a copy of the run, and a command that reads it."""
    shutil.rmtree(runs / "hostile", ignore_errors=True)
    run = shutil.copytree(runs / NAME, runs / "hostile" / NAME)
    steps = checkpoints_of(run)
    match case % 3:
        case 0:
            what = damage_checkpoint(steps[-1], steps[0], rng)
            return what, commands(run)["resume"], False
        case 1:
            policy = run / POLICIES / BEST
            whole = policy.read_bytes()
            policy.write_bytes(damaged(whole, rng))
            return "policy damaged", commands(run)["eval"], policy.read_bytes() != whole
    name = rng.choice(["run.json", "metrics.jsonl", "config.yaml"])
    (run / name).write_bytes(damaged((run / name).read_bytes(), rng))
    return f"{name} damaged", commands(run)[rng.choice(["runs", "runs --json", "report"])], False


def settings(runs: Path, case: int, rng: random.Random) -> tuple[str, list[str], bool]:
    """A damaged settings file; what it comes to in this process is what it must come to by command."""
    file = runs / "settings.yaml"
    file.write_bytes(edited_settings(rng))
    command = ["train", "--config", str(file), "--print-config"]
    return f"settings {case}", command, say(*command)[0] != 0


def by_command(runs: Path, count: int, rng: random.Random) -> dict[str, Fuzz]:
    """So many of each kind in processes of their own, forks of this one, which has imported torch once for all."""
    results: dict[str, Fuzz] = {}
    for name, make in (("files", damage), ("configs", settings), ("hostile files", plant)):
        result = results[f"{name} by command"] = Fuzz()
        for case in range(count):
            what, command, must = make(runs, case, rng)

            def run(command: list[str] = command, must: bool = must) -> bool:
                return check(*run_command(command, runs / "command.txt"), must)

            judge(result, what, run, seconds=SECONDS + 10)
    return results

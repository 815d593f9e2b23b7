"""Start runs without waiting for imports: a server process imports everything once and forks.

The server reads a line of JSON for each run and forks a process for it, in a session of its own, so
that Ctrl-C reaches it once. It writes the pid of each run, and its exit code at the end. Runs
outlive the server, which ends with the process that it serves. With a GPU or on macOS, where forked
processes are not safe, a run starts as a new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from canter.core.storage.lock import is_alive

LOOK_SECONDS = 0.05
"""Time between looks of the server for runs that have ended."""
KILLED = -signal.SIGKILL
SERVER = """
from canter.app.cli import load_everything, main
from canter.app.experiments.launcher import serve
load_everything()
serve(main)
"""


@dataclass
class LaunchedRun:
    """The process of a run."""

    pid: int
    returncode: int | None = None
    """Exit code, negative for a signal; None while the process runs."""


class Launcher:
    """Starts runs inside its `with` block; however the block ends, runs that are left save and end."""

    def __init__(self) -> None:
        self.runs: dict[int, LaunchedRun] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop all runs by SIGINT, wait for them, and end the server."""
        for run in self.runs.values():
            if run.returncode is None and is_alive(run.pid):
                os.kill(run.pid, signal.SIGINT)
        while self.update():
            time.sleep(LOOK_SECONDS)
        if self.server is not None:
            self.server.communicate()

    def start(self, argv: Sequence[str], log: Path) -> LaunchedRun:
        """Start `canter` with these arguments; its output goes to the end of the file `log`."""
        if self.server is not None and self.server.poll() is not None:
            self.update()
            self.server.communicate()  # closes its pipes
            self.server = None
        if self.server is None:
            command = [sys.executable, "-c", SERVER]
            pipe = subprocess.PIPE
            self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        order = {"argv": list(argv), "log": str(log.absolute())}
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(order).encode() + b"\n")
        while True:
            message = self._read(block=True)
            if message is None:
                raise RuntimeError(f"the process that starts runs has ended; see {log}")
            if "started" in message:
                run = LaunchedRun(message["started"])
                self.runs[run.pid] = run
                return run

    def update(self) -> list[LaunchedRun]:
        """Read the exit codes of runs that have ended and return the others."""
        while self._read(block=False) is not None:
            pass
        left = [run for run in self.runs.values() if run.returncode is None]
        if self.server is not None and self.server.poll() is not None:
            for run in left:  # the server was killed: exit codes are lost
                run.returncode = None if is_alive(run.pid) else KILLED
        return left

    def _read(self, *, block: bool) -> dict[str, Any] | None:
        """Return the next message of the server; None if there is none."""
        pipe = None if self.server is None else self.server.stdout
        while b"\n" not in self.text:
            if pipe is None or not (block or select.select([pipe], [], [], 0)[0]):
                return None
            received = os.read(pipe.fileno(), 1 << 16)
            if not received:
                return None
            self.text += received
        line, _, self.text = self.text.partition(b"\n")
        message = json.loads(line)
        if "ended" in message:
            self.runs[message["ended"]].returncode = message["code"]
        return message


def serve(main: Callable[[list[str]], Any]) -> None:
    """Call `main` with the arguments of each order on stdin, in a process that is forked for it."""
    text = b""
    running: set[int] = set()
    while True:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _write({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
        if not select.select([0], [], [], LOOK_SECONDS)[0]:
            continue
        received = os.read(0, 1 << 16)
        if not received:
            return
        *lines, text = (text + received).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _redirect(order["log"])
                if not is_safe_after_fork():
                    os.execv(sys.executable, [sys.executable, "-m", "canter", *order["argv"]])
                sys.argv = ["canter", *order["argv"]]
                main(order["argv"])
                return
            running.add(pid)
            _write({"started": pid})


def is_safe_after_fork() -> bool:
    """Return whether a forked process can train: not with CUDA, nor with the frameworks of macOS."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


def _write(message: dict[str, int]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _redirect(log: str) -> None:
    """Give a forked process a session, no input, and a file for its output."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(nothing)
    os.close(file)

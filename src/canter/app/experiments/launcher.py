"""Start runs without waiting for imports: a server process imports everything once and forks.

The server receives an order in JSON for each run and forks a process for it, in a session of its own,
so that Ctrl-C reaches it once. It sends the pid of each run, and its exit code at the end. Runs
outlive the server, which ends with the process that it serves. With a GPU or on macOS, where forked
processes are not safe, a run starts as a new process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from canter.core.storage.lock import is_alive

POLL_SECONDS = 0.05
"""Time after which the server checks again which runs have ended."""
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
    server: subprocess.Popen[bytes]
    """The server that forked it, from which its exit code comes."""
    returncode: int | None = None
    """Exit code, negative for a signal; None while the process runs."""


class Launcher:
    """Starts runs inside its `with` block; however the block ends, runs that are left save and end."""

    def __init__(self) -> None:
        self.runs: dict[int, LaunchedRun] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop all runs by SIGINT, wait for them, and end the server."""
        for run in self.runs.values():
            if run.returncode is None and is_alive(run.pid):
                os.kill(run.pid, signal.SIGINT)
        while self.update():
            time.sleep(POLL_SECONDS)
        self._close()

    def _close(self) -> None:
        """End the server."""
        if self.server is not None and self.connection is not None:
            self.connection.close()
            self.server.wait()
            self.connection = None

    def start(self, argv: Sequence[str], log: Path) -> LaunchedRun:
        """Start `canter` with these arguments; its output goes to the end of the file `log`."""
        server, connection = self._open()
        connection.send_bytes(json.dumps({"argv": list(argv), "log": str(log.absolute())}).encode())
        while True:
            message = self._read(block=True)
            if message is None:
                raise RuntimeError(f"the process that starts runs has ended; see {log}")
            if "started" in message:
                run = LaunchedRun(message["started"], server)
                self.runs[run.pid] = run
                return run

    def _open(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Return the server and the connection to it; start one if there is none, or it was killed."""
        if self.server is not None and self.server.poll() is not None:
            self.update()
            self._close()
        if self.server is None or self.connection is None:
            self.connection, other = Pipe()
            command = [sys.executable, "-c", SERVER, str(other.fileno())]
            nothing = subprocess.DEVNULL
            fds = [other.fileno()]
            self.server = subprocess.Popen(command, stdin=nothing, pass_fds=fds, start_new_session=True)
            other.close()
        return self.server, self.connection

    def update(self) -> list[LaunchedRun]:
        """Read the exit codes of runs that have ended and return the others."""
        while self._read(block=False) is not None:
            pass
        left = [run for run in self.runs.values() if run.returncode is None]
        for run in left:
            if run.server.poll() is not None:  # it was killed: exit codes are lost
                run.returncode = None if is_alive(run.pid) else KILLED
        return left

    def _read(self, *, block: bool) -> dict[str, Any] | None:
        """Return the next message of the server; None if there is none."""
        try:
            if self.connection is None or not (block or self.connection.poll()):
                return None
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # it was killed
            return None
        if "ended" in message:
            self.runs[message["ended"]].returncode = message["code"]
        return message


def serve(main: Callable[[list[str]], Any]) -> None:
    """Call `main` with the arguments of each order, in a process that is forked for it."""
    connection = Connection(int(sys.argv[1]))
    running: set[int] = set()
    while True:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                connection.send_bytes(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
        if not connection.poll(POLL_SECONDS):
            continue
        try:
            order = json.loads(connection.recv_bytes())
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _redirect(order["log"])
            if not is_safe_after_fork():
                os.execv(sys.executable, [sys.executable, "-m", "canter", *order["argv"]])
            sys.argv = ["canter", *order["argv"]]
            main(order["argv"])
            return
        running.add(pid)
        connection.send_bytes(json.dumps({"started": pid}).encode())


def is_safe_after_fork() -> bool:
    """Return whether a forked process can train: not with CUDA, nor with the frameworks of macOS."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


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

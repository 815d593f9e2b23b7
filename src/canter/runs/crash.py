"""Traces and a last message of a run whose process crashes or is killed.

Nothing here imports torch: the witness imports this module after the run is gone.
"""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from canter.core.storage.files import read_untrusted

CRASH = "crash.txt"
MAX_CRASH_BYTES = 1 << 20
WITNESS = "import sys; sys.stdin.buffer.read(); from canter.runs.crash import report_end; report_end(*sys.argv[1:])"
"""Program that waits until the other end of its standard input is closed."""
PATIENCE = 1.0
"""Seconds that a process may take to be gone after its files were closed."""


class CrashFile:
    """Lets Python write the line of a crash (segmentation fault, abort) to a file of the run.

    The file is removed if nothing crashed. A fault handler that is enabled already is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.absolute() / CRASH
        self.file: IO[str] | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Open the file, without what an earlier attempt left in it."""
        if not faulthandler.is_enabled():
            self.file = self.path.open("w")
            faulthandler.enable(self.file, all_threads=False)

    def write(self, row: dict[str, Any]) -> None:
        """Write nothing: rows are no crash."""

    def close(self) -> None:
        """Close the file, and remove it if it is empty."""
        if self.file is not None:
            faulthandler.disable()
            with suppress(OSError):  # an environment may have closed it
                self.file.close()
            self.file = None
            if self.path.stat().st_size == 0:
                self.path.unlink()


class Witness:
    """Starts a small process that reports on standard error if this one dies without a word.

    A process that crashes or is killed says nothing itself. The witness waits for the end of a
    pipe, which the system closes for it; a run that ends by itself ends the witness first.
    """

    def __init__(self, folder: Path, resume: str) -> None:
        self.arguments = [str(folder.absolute()), resume, str(os.getpid())]
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe = -1
        self.identity = (0, 0)
        """Device and inode of the pipe: an environment may close its number, which is used again."""

    def start(self, settings: dict[str, Any]) -> None:
        """Start the process, outside of the group that Ctrl-C reaches."""
        end, self.pipe = os.pipe()
        self.identity = _identity(self.pipe)
        command = [sys.executable, "-S", "-c", WITNESS, *self.arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command, stdin=end, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        os.close(end)

    def write(self, row: dict[str, Any]) -> None:
        """Write nothing."""

    def close(self) -> None:
        """End the process: the run ends by itself."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None
        with suppress(OSError):
            if _identity(self.pipe) == self.identity:
                os.close(self.pipe)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def last_crash(folder: Path) -> str | None:
    """Return how the last attempt of a run crashed, and the innermost line; None if it did not."""
    try:
        lines = read_untrusted(folder / CRASH, MAX_CRASH_BYTES, within=folder).decode(errors="replace").splitlines()
    except OSError:
        return None
    places = [line.strip() for line in lines if line.startswith("  File ")]
    return f"{lines[0]} ({(places or ['no place'])[0]})" if lines else None


def report_end(folder: str, resume: str, process: str) -> None:
    """Say on standard error how a run ended and what is saved, unless its process is still there."""
    deadline = time.monotonic() + PATIENCE
    while os.getppid() == int(process):  # its files are closed first, or an environment closed them all
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    crash = last_crash(Path(folder))
    how = f"crashed: {crash}" if crash else "was killed, by a signal or for lack of memory"
    names = os.listdir(Path(folder) / "checkpoints") if (Path(folder) / "checkpoints").is_dir() else []
    saved = max((int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), default=None)
    kept = "nothing is saved" if saved is None else f"iteration {saved} is saved"
    with suppress(OSError):
        os.write(2, f"canter: the process of this run {how}; {kept}. Go on with: {resume}\n".encode())

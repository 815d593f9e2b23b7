"""What the parents leave beside their checkpoints, where their users look for it."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def is_first() -> bool:
    """Whether this process writes files: the only one or torchrun's first, also before and after they train."""
    return int(os.environ.get("RANK", "0")) == 0


class NoWriter:
    """A writer of scalars that forgets them."""

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Forget it."""

    def flush(self) -> None:
        """There is nothing to write."""


def open_writer(folder: str) -> Any:
    """A writer of TensorBoard's event files; one that forgets where TensorBoard is missing, and on other ranks."""
    if not is_first():
        return NoWriter()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _say_once('no scalars are written for TensorBoard: pip install "canter[tensorboard]"')
        return NoWriter()
    return SummaryWriter(log_dir=folder, flush_secs=10)


@cache
def _say_once(message: str) -> None:
    _log.warning(message)


def store_code_state(folder: Path, files: Iterable[str]) -> None:
    """Write `NAME.diff` for the repository around each file: its commit, its status and what is not committed."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        place = Path(file) if Path(file).is_dir() else Path(file).parent
        root, commit = _git(place, "rev-parse", "--show-toplevel"), _git(place, "rev-parse", "HEAD")
        if root is None or commit is None:
            _log.info("%s is in no git repository", file)
            continue
        path = folder / f"{Path(root).name}.diff"
        if not path.exists():
            parts = {"commit": commit, "status": _git(place, "status"), "diff": _git(place, "diff", "HEAD")}
            path.write_text("\n\n\n".join(f"--- git {name} ---\n{text}" for name, text in parts.items()))


def _git(place: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(place), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Finding runs by what people type, without torch: `canter runs` should not wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from canter.registry import nearest
from canter.runs.run_record import CONFIG

RUNS, LATEST = Path("runs"), "latest"
SWEEP = "sweep.json"
"""In the folder of a sweep: what is to be run."""


def find_run(text: str, parent: Path = RUNS) -> Path:
    """The run folder that `text` means: a path, `latest`, or the beginning of exactly one name under `parent`."""
    if (exact := _exactly(text, parent)) is not None:
        return exact
    matching = list(_matching(text, parent))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{text!r} could be any of {', '.join(sorted(path.name for path in matching))}")
    raise ValueError(
        f"no run {text!r} here or under {parent}: {nearest(text, [path.name for path in run_folders(parent)])}"
    )


def find_all(text: str, parent: Path = RUNS) -> list[Path]:
    """All runs that `text` means: one, those of a folder such as a sweep's, or all whose names begin with it."""
    if (exact := _exactly(text, parent)) is not None:
        return [exact]
    for folder in (Path(text), parent / text):
        if folder.is_dir() and (inside := list(run_folders(folder))):
            return inside
    return list(_matching(text, parent)) or [find_run(text, parent)]


def run_folders(parent: Path, marks: tuple[str, ...] = (CONFIG,)) -> Iterator[Path]:
    """The runs in a folder, and in the folders of sweeps within it, by name: folders with one of the files `marks`."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if path.is_symlink() or not path.is_dir():
            continue
        if any(os.path.isfile(path / name) for name in marks):  # False, not an error, in a folder of somebody else
            yield path
        elif os.path.isfile(path / SWEEP):
            yield from run_folders(path, marks)


def _exactly(text: str, parent: Path) -> Path | None:
    for candidate in (Path(text), parent / text):
        if (candidate / CONFIG).is_file():
            return candidate.resolve() if candidate.is_symlink() else candidate
    return None


def _matching(text: str, parent: Path) -> Iterator[Path]:
    """Runs whose name, or name in their sweep, begins so."""
    for path in run_folders(parent):
        if path.name.startswith(text) or str(path.relative_to(parent)).startswith(text):
            yield path

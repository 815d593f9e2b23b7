"""What runs have come to, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from canter.app.report.data import read_run
from canter.app.report.page import GENERATOR, comparison_page, run_page
from canter.core.registry import UserError
from canter.core.storage.files import replace_file

__all__ = ["write_report"]

REPORT = "report.html"
BEGINNING = 1024
"""Bytes of a file within which a report names its generator."""


def write_report(paths: Sequence[Path], out: Path | None = None, *, threshold: float | None = None) -> Path:
    """Write the report of one run folder, or the comparison of several; gives the file.

    By default the file is `report.html` in the folder of the one run, or in the current folder for several. A file that
    is no report is never overwritten. `threshold` is the return whose reaching is timed; by default it follows from the
    runs that are compared.
    """
    if not paths:
        raise UserError("a report needs at least one run")
    runs = [read_run(path) for path in dict.fromkeys(path.resolve() for path in paths)]
    out = out or (paths[0] / REPORT if len(runs) == 1 else Path(REPORT))
    page = run_page(runs[0], threshold) if len(runs) == 1 else comparison_page(runs, threshold)
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder, so {out.name} cannot be written there")
    if out.exists() and not is_report(out):
        raise UserError(f"{out} exists and is no report of canter; choose another file with --out")
    replace_file(out, page.encode(), 0o666)
    return out


def is_report(path: Path) -> bool:
    """Whether a file was written by `write_report`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'content="{GENERATOR}"'.encode() in file.read(BEGINNING)

"""`canter envs`, `canter presets` and `canter runs`: what there is."""

from __future__ import annotations

import inspect
import json
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canter.cli.parser import Parser, UsageError
from canter.cli.runs import RUNS
from canter.console.figures import number
from canter.console.printable import printable
from canter.envs.robots import mjlab
from canter.envs.schemes import schemes
from canter.envs.tensor import tensor_envs
from canter.recipes import presets
from canter.report.data import read_last_row, read_settings
from canter.report.numbers import duration
from canter.runs.run_folder import CONFIG, METRICS
from canter.runs.run_record import RECORD, read_record, run_status

PROBE = "probe-"


def envs_command(argv: list[str]) -> None:
    """List the environments and how their ids are written."""
    Parser("envs", usage="", description="List the environments and how their ids are written.").parse(argv)
    print("In torch, for any device:")
    print(summaries({f"tensor:{name}": tensor_envs[name] for name in tensor_envs if not name.startswith(PROBE)}))
    probes = ", ".join(name.removeprefix(PROBE) for name in tensor_envs if name.startswith(PROBE))
    text = f"tensor:{PROBE}NAME  Tiny tasks whose answer is known, to test an algorithm; NAME is one of {probes}"
    print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    print("\nFrom elsewhere, by the scheme before the colon:")
    print(summaries({f"{scheme}:ID": schemes[scheme] for scheme in schemes if scheme != "tensor"}))
    if robots := mjlab.tasks():
        print("\nOf mjlab, which is installed here, each with the settings that it is registered with:")
        print("\n".join(f"  mjlab:{name}" for name in robots))
    print("\n`canter presets` lists those with known-good settings.")


def summaries(things: Mapping[str, Any]) -> str:
    """A line for each name, with the first line of its thing's docstring."""
    width = max(map(len, things))
    lines = {name: (inspect.getdoc(thing) or "").partition("\n")[0] for name, thing in things.items()}
    return "\n".join(f"  {name:<{width}}  {line}".rstrip() for name, line in lines.items())


def presets_command(argv: list[str]) -> None:
    """List the known-good settings."""
    about = "List the known-good settings; they are found by environment id, or by name with --preset."
    Parser("presets", usage="", description=about).parse(argv)
    rows = [(name, presets[name].env.id, f"{presets[name].total_steps:,}") for name in presets]
    print_table(("PRESET", "ENVIRONMENT", "STEPS"), rows, right=("STEPS",))


def runs_command(argv: list[str]) -> None:
    """List the runs and how far they have come."""
    parser = Parser(
        "runs",
        usage="[--run-dir DIR] [--json]",
        description="List the runs, the newest first: how far they have come and how they do.",
    )
    parser.flag("--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are looked for (default {RUNS})")
    parser.flag("--json", action="store_true", help="print all that is known of them as JSON")
    arguments = parser.parse(argv)
    found = find_runs(Path(arguments.run_dir))
    if arguments.json:
        print(json.dumps(found, indent=1, default=str))  # a damaged file may hold dates where numbers belong
    elif not found:
        print(f"No runs under {arguments.run_dir}; to make one: canter train CartPole-v1")
    else:
        head = ("RUN", "ENVIRONMENT", "STATUS", "STEPS", "RETURN", "TIME", "AGE")
        print_table(head, [shown_run(run) for run in found], right=("STEPS", "RETURN", "TIME", "AGE"))


def find_runs(parent: Path) -> list[dict[str, Any]]:
    """What is known of every run under `parent`, the newest first; of a damaged one, what can be read."""
    if parent.exists() and not parent.is_dir():
        raise UsageError(f"--run-dir {parent} is no folder")
    inside = list(parent.iterdir()) if parent.exists() else []
    found = [summary(path) for path in inside if not path.is_symlink() and is_run(path)]
    return sorted(found, key=lambda run: (-run["updated"], run["name"]))


def is_run(path: Path) -> bool:
    """Whether a folder holds anything of a run."""
    return any(os.path.isfile(path / name) for name in (CONFIG, RECORD, METRICS))


def summary(path: Path) -> dict[str, Any]:
    """One run; None where nothing is known."""
    settings, row, status = read_settings(path / CONFIG), read_last_row(path / METRICS), run_status(path)
    steps, budget = row.get("env_steps"), settings.get("total_steps")
    if status == "unknown" and steps is not None and isinstance(budget, int) and steps >= budget:
        status = "finished"
    env_id = settings.get("env.id")
    return {
        "name": path.name,
        "path": str(path),
        "env": env_id if isinstance(env_id, str) else None,
        "seed": settings.get("seed"),
        "status": status,
        "ranks": ranks if isinstance(ranks := read_record(path).get("ranks"), int) else 1,
        "env_steps": None if steps is None else int(steps),
        "total_steps": budget,
        "return": row.get("return"),
        "seconds": row.get("seconds"),
        "updated": row["wall_time"] if "wall_time" in row else path.stat().st_mtime,
    }


def shown_run(run: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one run."""
    steps = "-" if run["env_steps"] is None else f"{run['env_steps']:,}"
    spent = "-" if run["seconds"] is None else duration(run["seconds"])
    age = max(0.0, time.time() - run["updated"])
    # The larger unit is enough: 3 d 4 h becomes 3 d.
    old = " ".join(duration(age).split()[:2])
    status = run["status"] if run["ranks"] == 1 else f"{run['status']}, {run['ranks']} ranks"
    return run["name"], run["env"] or "-", status, steps, number(run["return"]), spent, old


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows under their heads; columns named in `right` are aligned there."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    signs = [">" if name in right else "<" for name in head]
    for row in cells:
        print("  ".join(f"{row[i]:{signs[i]}{widths[i]}}" for i in range(len(head))).rstrip())

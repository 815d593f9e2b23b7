"""`canter envs`, `canter presets` and `canter runs`: what there is, told without importing torch."""

from __future__ import annotations

import inspect
import json
import textwrap
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from canter.app.cli.index import UsageError, gymnasium_ids, read_index
from canter.app.cli.parser import Parser
from canter.app.console.text import in_units, number, printable, two_columns
from canter.runs.records import (
    CONFIG,
    METRICS,
    RECORD,
    read_last_row,
    read_record,
    read_settings,
    run_folders,
    run_status,
)

PROBE = "probe-"


def envs_command(argv: list[str]) -> None:
    """List the environments and how their ids are written."""
    parser = Parser(
        "envs",
        "[FILTER]",
        "List the environments and how their ids are written; with FILTER all whose id contains it, "
        "Gymnasium's and those of installed packages included.",
    )
    parser.add_argument("filter", metavar="FILTER", nargs="?", help="part of an id, such as cart or ALE/")
    wanted = parser.parse(argv).filter
    index = read_index()
    if wanted is not None:
        print_matching(wanted, index)
        return
    tensor = index["tensor"]
    print("In torch, for any device:")
    print(two_columns({f"tensor:{name}": tensor[name] for name in tensor if not name.startswith(PROBE)}))
    probes = ", ".join(name.removeprefix(PROBE) for name in tensor if name.startswith(PROBE))
    text = f"tensor:{PROBE}NAME  Tiny tasks whose answer is known, to test an algorithm; NAME is one of {probes}"
    print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    print("\nFrom elsewhere, by the scheme before the colon:")
    print(two_columns({f"{name}:ID": text for name, text in index["schemes"].items() if name != "tensor"}))
    if robots := mjlab_ids():
        print("\nOf mjlab, which is installed here, each with the settings that it is registered with:")
        print("\n".join(f"  {name}" for name in robots))
    print("\n`canter envs FILTER` looks among Gymnasium's too, `canter presets` lists those with known-good settings.")


def print_matching(wanted: str, index: dict[str, Any]) -> None:
    """Every id that contains the text."""
    for module in index["namespaces"].values():
        if find_spec(module) is not None:
            import_module(module)  # which tells Gymnasium its ids
    ids = {f"tensor:{name}": text for name, text in index["tensor"].items()}
    # Reversed: of several the shortest name, which `train` takes.
    preset = {env: f"preset {name}" for name, env, _ in reversed(index["presets"])}
    ids |= {name: preset.get(name, "") for name in (*gymnasium_ids(), *mjlab_ids())}
    found = {name: text for name, text in ids.items() if wanted.lower() in name.lower()}
    if not found:
        raise UsageError(
            f"no environment here has {wanted!r} in its id. Packages bring more: pip install ale-py (ALE/...), "
            'gymnasium[box2d] (LunarLander-v3), "canter[mujoco]", "canter[envpool]", "canter[pettingzoo]"'
        )
    print(two_columns(found))


def mjlab_ids() -> list[str]:
    """Tasks of mjlab, where that is installed; to know them takes torch."""
    if find_spec("mjlab") is None:
        return []
    from canter.envs.robots import mjlab

    return [f"mjlab:{name}" for name in mjlab.tasks()]


def summary_of(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def presets_command(argv: list[str]) -> None:
    """List the known-good settings."""
    about = "List the known-good settings; they are found by environment id, or by name with --preset."
    Parser("presets", "", about).parse(argv)
    rows = [(name, env, f"{steps:,}") for name, env, steps in read_index()["presets"]]
    print_table(("PRESET", "ENVIRONMENT", "STEPS"), rows, right=("STEPS",))


def runs_command(argv: list[str]) -> None:
    """List the runs and how far they have come."""
    parser = Parser(
        "runs",
        "[--run-dir DIR] [--json]",
        "List the runs, the newest first: how far they have come, how they do, and how good the final\n"
        "policy was in new episodes without noise (SCORE), or its reward per unit of time where none end.",
    )
    parser.run_dir()
    parser.switch("--json", "print all that is known of them as JSON")
    arguments = parser.parse(argv)
    found = find_runs(arguments.run_dir)
    if arguments.json:
        print(json.dumps(found, indent=1, default=str))  # a damaged file may hold dates where numbers belong
    elif not found:
        print(f"No runs under {arguments.run_dir}; to make one: canter train CartPole-v1")
    else:
        head = ("RUN", "ENVIRONMENT", "STATUS", "STEPS", "RETURN", "SCORE", "TIME", "AGE")
        print_table(head, [shown_run(run) for run in found], right=("STEPS", "RETURN", "SCORE", "TIME", "AGE"))


def find_runs(parent: Path) -> list[dict[str, Any]]:
    """What is known of every run under `parent`, the newest first; of a damaged one, what can be read."""
    if parent.exists() and not parent.is_dir():
        raise UsageError(f"--run-dir {parent} is no folder")
    found = [summary(path, parent) for path in run_folders(parent, marks=(CONFIG, RECORD, METRICS))]
    return sorted(found, key=lambda run: (-run["updated"], run["name"]))


def summary(path: Path, parent: Path) -> dict[str, Any]:
    """One run; None where nothing is known."""
    settings, row, status = read_settings(path / CONFIG), read_last_row(path / METRICS), run_status(path)
    steps, budget = row.get("env_steps"), settings.get("total_steps")
    if status == "unknown" and steps is not None and isinstance(budget, int) and steps >= budget:
        status = "finished"
    record, env_id = read_record(path), settings.get("env.id")
    score, ranks = record.get("score"), record.get("ranks")
    return {
        "name": str(path.relative_to(parent)),
        "path": str(path),
        "env": env_id if isinstance(env_id, str) else None,
        "seed": settings.get("seed"),
        "status": status,
        "ranks": ranks if isinstance(ranks, int) else 1,
        "env_steps": None if steps is None else int(steps),
        "total_steps": budget,
        "return": row.get("return"),
        "score": score if isinstance(score, dict) else None,
        "seconds": row.get("seconds"),
        "updated": row["wall_time"] if "wall_time" in row else path.stat().st_mtime,
    }


def shown_run(run: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one run."""
    steps = "-" if run["env_steps"] is None else f"{run['env_steps']:,}"
    spent = "-" if run["seconds"] is None else in_units(run["seconds"])
    age = max(0.0, time.time() - run["updated"])
    # The larger unit is enough: 3 d 4 h becomes 3 d.
    old = " ".join(in_units(age).split()[:2])
    status = run["status"] if run["ranks"] == 1 else f"{run['status']}, {run['ranks']} ranks"
    score = run["score"] or {}
    value = score.get("mean", score.get("long_run_average"))
    shown = number(value) if isinstance(value, int | float) else "-"
    return run["name"], run["env"] or "-", status, steps, number(run["return"]), shown, spent, old


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows under their heads; columns named in `right` are aligned there."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    signs = [">" if name in right else "<" for name in head]
    for row in cells:
        print("  ".join(f"{row[i]:{signs[i]}{widths[i]}}" for i in range(len(head))).rstrip())

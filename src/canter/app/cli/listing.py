"""`canter envs`, `canter presets`, `canter runs` and `canter report`; only the last uses torch."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
import webbrowser
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from canter.app.cli.index import gymnasium_ids, read_index
from canter.app.cli.parser import UsageError
from canter.app.console.text import format_duration, format_number, printable, two_columns
from canter.runs.metrics import METRICS, read_last_row
from canter.runs.records import (
    CONFIG,
    RECORD,
    by_average,
    find_all,
    is_average_score,
    read_record,
    read_settings,
    run_folders,
    run_status,
    score_value,
)

PROBE = "probe-"
"""Prefix of the tensor environments that test algorithms."""


SIMULATORS = {
    "gymnax": ("gymnax", '"canter[jax]"'),
    "brax": ("brax", '"canter[jax]"'),
    "playground": ("mujoco_playground", '"canter[playground]"'),
    "maniskill": ("mani_skill", "mani_skill"),
}
"""Package of each simulator whose import takes seconds, and what pip installs, by scheme."""


def envs_command(arguments: argparse.Namespace) -> None:
    """List the environments and the form of their ids."""
    if arguments.filter is not None:
        print_matching(arguments.filter)
        return
    tensor = read_index("tensor")
    print("In torch, for any device:")
    print(two_columns({f"tensor:{name}": tensor[name] for name in tensor if not name.startswith(PROBE)}))
    probes = ", ".join(name.removeprefix(PROBE) for name in tensor if name.startswith(PROBE))
    text = f"tensor:{PROBE}NAME  Tiny tasks whose answer is known, to test an algorithm; NAME is one of {probes}"
    print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    print("\nFrom other packages, by the scheme before the colon:")
    schemes = read_index("schemes")
    print(two_columns({f"{name}:ID": text for name, text in schemes.items() if name not in ("tensor", *SIMULATORS)}))
    mjlab_tasks = mjlab_ids()
    if mjlab_tasks:
        print("\nOf mjlab, which is installed here, each with the settings that it is registered with:")
        print("\n".join(f"  {name}" for name in mjlab_tasks))
    print("\nOf simulators in JAX, and of ManiSkill:")
    print(two_columns({f"{scheme}:ID": simulator_state(scheme) for scheme in SIMULATORS}))
    print("\n`canter envs FILTER` searches Gymnasium's too, `canter presets` lists those with known-good settings.")


def print_matching(text: str) -> None:
    """Print every id that contains the text."""
    for module in read_index("namespaces").values():
        if find_spec(module) is not None:
            import_module(module)  # registers its ids with Gymnasium
    ids = {f"tensor:{name}": summary for name, summary in read_index("tensor").items()}
    # Reversed: of several presets the shortest name is shown, which `train` uses.
    presets = {env: f"preset {name}" for name, env, _ in reversed(read_index("presets"))}
    ids |= {name: presets.get(name, "") for name in (*gymnasium_ids(), *mjlab_ids(), *simulator_ids(text))}
    matching = {name: summary for name, summary in ids.items() if text.lower() in name.lower()}
    if not matching:
        raise UsageError(
            f"no environment here has {text!r} in its id. Packages bring more: pip install ale-py (ALE/...), "
            'gymnasium[box2d] (LunarLander-v3), "canter[mujoco]", "canter[envpool]", "canter[pettingzoo]", '
            '"canter[jax]" (gymnax:, brax:)'
        )
    print(two_columns(matching))


def mjlab_ids() -> list[str]:
    """Return the ids of mjlab's tasks if it is installed; imports torch to find them."""
    if find_spec("mjlab") is None:
        return []
    from canter.envs.robots import mjlab

    return [f"mjlab:{name}" for name in mjlab.tasks()]


def simulator_ids(text: str) -> list[str]:
    """Return the ids of the simulator whose scheme the text names; imports it, which takes seconds."""
    scheme, colon, _ = text.partition(":")
    if not colon or scheme not in SIMULATORS or find_spec(SIMULATORS[scheme][0]) is None:
        return []
    if scheme == "maniskill":
        from canter.envs.robots import maniskill

        return [f"maniskill:{name}" for name in maniskill.tasks()]
    from canter.envs import jax_envs

    return jax_envs.ids_of(scheme)


def simulator_state(scheme: str) -> str:
    """Return how to list, or how to install, the environments of a simulator."""
    package, requirement = SIMULATORS[scheme]
    installed = find_spec(package) is not None
    return f"installed; `canter envs {scheme}:` lists them" if installed else f"pip install {requirement}"


def presets_command(arguments: argparse.Namespace) -> None:
    """List the presets: known-good settings."""
    rows = [(name, env, f"{steps:,}") for name, env, steps in read_index("presets")]
    print_table(("PRESET", "ENVIRONMENT", "STEPS"), rows, right=("STEPS",))


def runs_command(arguments: argparse.Namespace) -> None:
    """List the runs and their progress."""
    runs = find_runs(arguments.run_dir)
    if arguments.json:
        print(json.dumps(runs, indent=1, default=str))  # a damaged file may hold dates instead of numbers
    elif not runs:
        print(f"No runs under {arguments.run_dir}; to make one: canter train CartPole-v1")
    else:
        head = ("RUN", "ENVIRONMENT", "STATUS", "STEPS", "RETURN", "SCORE", "TIME", "AGE")
        print_table(head, [run_cells(run) for run in runs], right=("STEPS", "RETURN", "SCORE", "TIME", "AGE"))


def find_runs(root: Path) -> list[dict[str, Any]]:
    """Return a summary of every run under `root`, newest first; of a damaged run a part."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"--run-dir {root} is not a folder")
    runs = [run_summary(path, root) for path in run_folders(root, marks=(CONFIG, RECORD, METRICS))]
    return sorted(runs, key=lambda run: (-run["updated"], run["name"]))


def run_summary(path: Path, root: Path) -> dict[str, Any]:
    """Return what is known about a run; None for what is not."""
    settings = read_settings(path / CONFIG)
    row = read_last_row(path / METRICS)
    status = run_status(path)
    steps = row.get("env_steps")
    budget = settings.get("total_steps")
    if status == "unknown" and steps is not None and isinstance(budget, int) and steps >= budget:
        status = "finished"
    record = read_record(path)
    env_id = settings.get("env.id")
    score = record.get("score")
    ranks = record.get("ranks")
    return {
        "name": str(path.relative_to(root)),
        "path": str(path),
        "env": env_id if isinstance(env_id, str) else None,
        "seed": settings.get("seed"),
        "status": status,
        "ranks": ranks if isinstance(ranks, int) else 1,
        "env_steps": None if steps is None else int(steps),
        "total_steps": budget,
        "by_average": by_average(settings),
        "return": row.get("return"),
        "score": score if isinstance(score, dict) else None,
        "seconds": row.get("seconds"),
        "updated": row["wall_time"] if "wall_time" in row else path.stat().st_mtime,
    }


def run_cells(run: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run in the table."""
    age = max(0.0, time.time() - run["updated"])
    value = score_value(run["score"], average=run["by_average"])
    unit = " per time" if is_average_score(run["score"], average=run["by_average"]) else ""
    return (
        run["name"],
        run["env"] or "-",
        run["status"] if run["ranks"] == 1 else f"{run['status']}, {run['ranks']} ranks",
        "-" if run["env_steps"] is None else f"{run['env_steps']:,}",
        format_number(run["return"]),
        "-" if value is None else format_number(value) + unit,
        "-" if run["seconds"] is None else format_duration(run["seconds"]),
        " ".join(format_duration(age).split()[:2]),  # the larger unit is enough: 3 d 4 h becomes 3 d
    )


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table; columns named in `right` are aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    alignments = [">" if name in right else "<" for name in head]
    for row in cells:
        print("  ".join(f"{row[i]:{alignments[i]}{widths[i]}}" for i in range(len(head))).rstrip())


def report_command(arguments: argparse.Namespace) -> None:
    """Write a page about one run, or one that compares several."""
    from canter.app.report import write_report

    paths = [path for text in arguments.runs for path in find_all(text, arguments.run_dir)]
    if not paths:
        raise UsageError(f"{' '.join(arguments.runs)}: the hall of fame has no runs; name a run, or several")
    written = write_report(paths, arguments.out, threshold=arguments.threshold)
    print(f"The report is in {written}")
    if arguments.open:
        webbrowser.open(written.resolve().as_uri())

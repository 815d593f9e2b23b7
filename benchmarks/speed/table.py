"""Prints the results of `cpu.py` and `gpu.py` as Markdown tables.

    python benchmarks/speed/table.py

Those of a CPU first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"


def markdown(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"**{title}**", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def speed_rows(results: dict[str, Any], reference: str) -> list[list[str]]:
    """Halves, whole, rate, how many times the reference that is, host syncs; or the error."""
    own = results.get(reference, {}).get("steps_per_second")
    rows = []
    for name, result in results.items():
        if "error" in result:
            rows.append([name, "", "", "", result["error"].replace("|", "/"), "", ""])
            continue
        rate = result["steps_per_second"]
        times = [number(result.get(key)) for key in ("collect_ms", "learn_ms", "iteration_ms")]
        rows.append([name, *times, number(rate, 0), f"{rate / own:.2f}" if own else "", number(result.get("syncs"), 0)])
    return rows


def iteration_table(title: str, results: dict[str, Any], reference: str) -> str:
    head = ("trainer", "collect ms", "learn ms", "iteration ms", "steps/s", f"x {reference}", "host syncs")
    return markdown(title, head, speed_rows(results, reference))


def runs_row(name: str, result: dict[str, Any], seconds: str) -> list[str]:
    """Seconds and steps of those seeds that reached the goal, and how many did."""
    if "error" in result:
        return [name, result["error"].replace("|", "/"), "", ""]
    runs = result["runs"]
    good = [run for run in runs if run.get("reached")]
    times = ", ".join(number(run[seconds]) for run in good)
    steps = number(median(run["env_steps"] for run in good), 0) if good else ""
    return [name, times, steps, f"{len(good)} of {len(runs)}"]


def cpu_tables(document: dict[str, Any]) -> str:
    tables = []
    for part, results in document["parts"].items():
        if "error" in results:
            tables.append(f"**{part}** failed: {results['error']}\n")
        elif part == "cartpole":
            best = {name: fastest_threads(result) for name, result in results.items()}
            rows = [runs_row(name, result, "wall_s") for name, result in best.items()]
            head = ("trainer", "seconds by seed", "median steps", "reached")
            tables.append(markdown("CartPole-v1, from the shell to a mean return of 475", head, rows))
        else:
            rows = []
            for row, result in zip(speed_rows(results, "Canter"), results.values(), strict=True):
                rows.append([row[0], str(result.get("threads", "")), *row[4:6]])
            tables.append(markdown(part, ("trainer", "threads", "steps/s", "x Canter"), rows))
    return "\n".join(tables)


def fastest_threads(result: dict[str, Any]) -> dict[str, Any]:
    """The runs with the number of threads whose median time is smaller."""
    by_threads: dict[int, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        by_threads.setdefault(run.get("threads", 0), []).append(run)
    return {"runs": min(by_threads.values(), key=lambda runs: median(run.get("wall_s", 1e9) for run in runs))}


def scale_table(results: dict[str, Any]) -> str:
    rows = []
    for name, sizes in results.items():
        if "error" in sizes:
            rows.append([name, sizes["error"], "", "", ""])
            continue
        for size, result in sizes.items():
            if "error" in result:
                rows.append([name, f"{int(size):,}", result["error"], "", ""])
                continue
            cells = [number(result.get("iteration_ms")), number(result.get("steps_per_second"), 0)]
            rows.append([name, f"{int(size):,}", *cells, number(result.get("peak_memory_mb"), 0)])
    return markdown("scale", ("trainer", "environments", "iteration ms", "steps/s", "peak MB"), rows)


def learn_tables(results: dict[str, Any]) -> str:
    head = ("trainer", "seconds by seed", "median steps", "reached")
    tables = []
    for task, by_trainer in results.items():
        rows = [runs_row(name, result, "seconds") for name, result in by_trainer.items() if name != "goal"]
        tables.append(markdown(f"{task} to a mean return of {by_trainer['goal']}", head, rows))
    return "\n".join(tables)


def gpu_tables(document: dict[str, Any]) -> str:
    tables = []
    show: dict[str, Callable[[dict[str, Any]], str]] = {
        "learn": learn_tables,
        "scale": scale_table,
        "kinds": lambda results: iteration_table("other policies", results, "LSTM graph"),
    }
    for part, results in document["parts"].items():
        if "error" in results:
            tables.append(f"**{part}** failed: {results['error']}\n")
        elif part == "speed":
            tables += [iteration_table(f"networks {width}", of, "Canter graph") for width, of in results.items()]
        else:
            tables.append(show[part](results))
    return "\n".join(tables)


if __name__ == "__main__":
    for name, tables in {"cpu": cpu_tables, "gpu": gpu_tables}.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            print(tables(json.loads(path.read_text())))

"""Steps per second of one process on one core, of two ranks with a core each, and of one process on both cores.

Beside them, as what the machine allows: two processes with a core and half of the environments each, which know nothing
of each other.

    python benchmarks/ranks/scaling.py
    python benchmarks/ranks/scaling.py --algorithm.num-minibatches 2 --out FILE

Flags that it does not know itself are handed to `canter train`. They take turns, so that a machine which others
use too is as busy for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from launching import about, end, rows_of, start, wait_for

ONE, TWO, BOTH = "one process, one core", "two ranks, a core each", "one process, two cores"
APART = "two processes, apart"
WARM_UP = 2
"""Iterations that are not counted."""


def measure(way: str, cores: list[str], env: str, num_envs: int, iterations: int, flags: list[str]) -> float:
    """Steps per second from the end of the warm-up to the end of the run, by the times of the rows."""
    runs = [([core], num_envs // 2) for core in cores] if way == APART else [(cores[: 1 + (way != ONE)], num_envs)]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for number, (own, envs) in enumerate(runs):
            command = ["train", env, f"--num-envs={envs}", f"--until.iterations={iterations}", "--console=quiet"]
            command += ["--total-steps=null", f"--run-dir={folder}", f"--name={number}"]
            command += ["--checkpoints.save-every=1000000", *flags]
            processes.append(start(2 if way == TWO else None, *command, cores=",".join(own)))
        paths = [Path(folder) / str(number) for number in range(len(runs))]
        found: list[list[dict[str, Any]]] = []

        def have_all() -> bool:
            found[:] = [rows_of(path) for path in paths]
            return all(len(rows) >= iterations for rows in found) or any(each.poll() is not None for each in processes)

        wait_for(have_all, 600.0, every=1.0)  # seldom: looking takes time of the cores that are measured
        said = [end(process, 0.0) for process in processes]  # without the score, which says nothing about ranks
        assert all(len(rows) >= iterations for rows in found), said
        return sum(map(_speed, found))


def _speed(rows: list[dict[str, Any]]) -> float:
    first, last = rows[WARM_UP - 1], rows[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"])


def main() -> None:
    """Measure all, several times, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", nargs=2, default=["0", "1"], help="two that share nothing, by `lscpu -e`")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    arguments, flags = parser.parse_known_args()
    before, speeds = about(), {way: list[float]() for way in (ONE, TWO, BOTH, APART)}
    for _ in range(arguments.repeats):
        for way, found in speeds.items():
            found.append(measure(way, arguments.cores, arguments.env, arguments.num_envs, arguments.iterations, flags))
            print(f"{way}: {found[-1]:,.0f} steps/s", flush=True)
    medians = {way: statistics.median(found) for way, found in speeds.items()}
    alone = medians[ONE]
    results = {
        "about": before,
        "load_average_at_the_end": about()["load_average"],
        "env": arguments.env,
        "num_envs": arguments.num_envs,
        "flags": flags,
        "steps_per_second": speeds,
        "median": medians,
        "times_one_process_on_one_core": {way: median / alone for way, median in medians.items()},
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["times_one_process_on_one_core"], indent=1))


if __name__ == "__main__":
    main()

"""Ten thousand iterations with checkpoints and rows of metrics: memory, open files and threads must stay flat.

    python benchmarks/faults/soak.py                      writes soak.json beside it
    python benchmarks/faults/soak.py --iterations 500     a short one

The exit code is 1 if, between the first fifth and the end, the process grew by more than 8 MiB or by a single open file
or thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import canter
from canter.core.machine import describe_machine, describe_versions

CASES: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"env": {"id": "CartPole-v1", "num_envs": 2}},
    "asynchronous": {"env": {"id": "CartPole-v1", "num_envs": 2, "vectorization": "async"}},
    "memory": {
        "env": {"id": "tensor:cartpole", "num_envs": 8},
        "algorithm": {"model": {"policy": {"rnn": {"cell": "lstm", "hidden": 16}}}},
    },
}
ALLOWED_MIB = 8.0


def footprint() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 2),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def soak(name: str, iterations: int, runs: Path) -> dict[str, Any]:
    """Footprints of one run, twenty times on its way."""
    samples: list[dict[str, float]] = []

    def sample(report: Any, *_: Any) -> None:
        if report.iteration % max(iterations // 20, 1) == 0:
            samples.append({"iteration": report.iteration} | footprint())

    settings = CASES[name]
    small = {"horizon": 16, "epochs": 1, "num_minibatches": 1} | settings.get("algorithm", {})
    steps = 16 * settings["env"]["num_envs"]
    start = time.monotonic()
    canter.train(
        **settings | {"algorithm": small},
        total_steps=iterations * steps,
        checkpoints={"save_every": 10 * steps},
        run_dir=str(runs),
        console="quiet",
        on_iteration=sample,
    )
    first, last = samples[len(samples) // 5], samples[-1]
    grown = {key: round(last[key] - first[key], 2) for key in ("MiB", "files", "threads")}
    seconds = round(time.monotonic() - start)
    return {"iterations": last["iteration"], "seconds": seconds, "grown": grown, "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("soak.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document = {
        "command": " ".join(["python benchmarks/faults/soak.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "cases": {},
    }
    wrong = False
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as runs:
            document["cases"][name] = found = soak(name, arguments.iterations, Path(runs))
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        print(name, found["iterations"], "iterations:", found["grown"], flush=True)
        grown = found["grown"]
        wrong |= grown["MiB"] > ALLOWED_MIB or grown["files"] > 0 or grown["threads"] > 0
    sys.exit(wrong)


if __name__ == "__main__":
    main()

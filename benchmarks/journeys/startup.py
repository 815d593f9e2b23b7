"""How long one waits for an answer that needs no torch: median of ten, each in a new process.

    python benchmarks/journeys/startup.py

The commands are started in turns, so that a busy moment of the machine does not fall on one of them alone. Beside the
clock's time `results/startup.json` has the processor's, which other programs on the machine disturb less, and the load.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

TIMES = 10
RESULTS = Path(__file__).parent / "results" / "startup.json"
COMMANDS = {
    "canter --help": 0,
    "canter --version": 0,
    "canter envs": 0,
    "canter runs": 0,
    "canter trian CartPole-v1": 2,
    "canter train CartPole-v1 --algorithm.gama 0.9": 2,
}
"""What is typed, and the exit code that it must have."""
LIMIT = 0.5


def once(command: str, expected: int, folder: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    argv = [sys.executable, "-m", *command.split()]
    code = subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code != expected:
        raise SystemExit(f"{command}: exit code {code}, expected {expected}")
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    load = [round(value, 1) for value in os.getloadavg()]
    with tempfile.TemporaryDirectory() as folder:
        for command, code in COMMANDS.items():
            once(command, code, folder)  # files are read into memory once
        turns = [{command: once(command, code, folder) for command, code in COMMANDS.items()} for _ in range(TIMES)]
    rows = {}
    for command in COMMANDS:
        clock, processor = (median(turn[command][i] for turn in turns) for i in range(2))
        rows[command] = {"seconds": round(clock, 3), "processor_seconds": round(processor, 3), "below": clock < LIMIT}
    found = {
        "median_of": TIMES,
        "limit_seconds": LIMIT,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": {"before": load, "after": [round(value, 1) for value in os.getloadavg()]},
        "note": "a load above the number of cores means that other programs ran at the same time",
        "commands": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

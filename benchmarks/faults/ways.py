"""How runs of misbehaving environments end, by kind and way of stepping: sync, forked, async.

    python benchmarks/faults/ways.py            writes ways.json
    python benchmarks/faults/ways.py --table    prints it as a table

A run is ended after 40 seconds if it waits; time-outs of steps and of closing are 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from canter.core.machine import describe_machine, describe_versions
from canter.core.storage.checkpoint import CheckpointStore

HERE = Path(__file__).parent
RESULTS = HERE / "ways.json"
KINDS = ("raise_value_error", "raise_system_exit", "obs_nan", "reward_text", "four_values", "reset_raises")
KINDS += ("exit", "kill", "segfault", "hang", "stop", "spin", "close_raises", "close_hangs", "chdir")
KINDS += ("long_message", "flood", "close_stdout", "close_descriptors")
WAYS = ("sync", "forked", "async")
FLAGS = ["--algorithm.horizon=16", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--console=quiet"]
FLAGS += ["--num-envs=2", "--total-steps=1600", "--env.step-timeout=3", "--env.close-timeout=3"]
AT = 400
LIMIT = 40.0
"""Seconds after which a run counts as waiting."""


def run(kind: str, way: str) -> dict[str, Any]:
    """Train on a kind of environment, stepped in one of the ways; return how the run ended."""
    with tempfile.TemporaryDirectory() as scratch:
        own = [f"--env.options.kind={kind}", f"--env.options.at={AT}", f"--env.vectorization={way}", "--name=run"]
        command = [sys.executable, "-m", "canter", "--allow-import", "misbehaving", "train", "misbehaving:Misbehaving"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, *FLAGS, *own, "--run-dir=runs"],
            cwd=scratch,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text = process.communicate(timeout=LIMIT)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text = process.communicate()[1]
            process.returncode = 124
        folder = Path(scratch) / "runs" / "run"
        return {
            "kind": kind,
            "way": way,
            "result": result_of(process.returncode, text),
            "iterations_saved": max(CheckpointStore(folder / "checkpoints").steps(), default=0),
            "names_environment": bool(re.search(r"environment \d|misbehaving:Misbehaving", text)),
            "characters_printed": len(text),
            "seconds": round(time.monotonic() - start, 1),
        }


def result_of(code: int, text: str) -> str:
    """Return the end of a run in a few words."""
    if code == 124:
        return "waits"
    if code < 0:
        return f"dies of {signal.Signals(-code).name}"
    if "Traceback" in text:
        return f"traceback, exit code {code}"
    return {0: "finishes", 1: "is saved"}.get(code, f"ends with exit code {code}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    cells = {(row["kind"], row["way"]): f"{row['result']} ({row['iterations_saved']})" for row in rows}
    lines = [f"| kind | {' | '.join(WAYS)} |", "| --- " * (len(WAYS) + 1) + "|"]
    lines += [f"| `{kind}` | {' | '.join(cells[kind, way] for way in WAYS)} |" for kind in KINDS]
    return "\n".join(lines)


def main() -> None:
    """Run all kinds in all ways, two at a time, or print the results that are stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print ways.json as a table")
    if parser.parse_args().table:
        print(table(json.loads(RESULTS.read_text())["results"]))
        return
    cases = [*product(KINDS, WAYS)]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(partial(_reported), cases))
    document = {
        "command": "python benchmarks/faults/ways.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "iterations_before": (AT - 1) // 16,
        "results": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def _reported(case: tuple[str, str]) -> dict[str, Any]:
    """Run a case and print its result."""
    row = run(*case)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()

"""Runs of the command line, alone or under torchrun, and what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from canter.core.storage.checkpoint import CheckpointStore
from canter.core.storage.tree import encode

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def start(ranks: int | None, *command: Any, restarts: int = 0, cores: str | None = None) -> subprocess.Popen[str]:
    """`canter COMMAND` by so many ranks, or in one process; on these cores only, such as "0,1"."""
    own = [sys.executable] if ranks is None else [*TORCHRUN, f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    pinned = [] if cores is None else ["taskset", "-c", cores]
    arguments = [*pinned, *own, "-m", "canter", *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def end(process: subprocess.Popen[str], seconds: float = 300.0) -> str:
    """What it printed, once it has ended; it is killed if it does not."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0] + "\nkilled: it did not end"


def ranks_of(agent: int | None) -> dict[int, int]:
    """Process ids by rank, of one torchrun's children; None for all that are left without a torchrun."""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(item.split("=", 1) for item in (folder / "environ").read_text().split("\0") if "=" in item)
        except (OSError, ValueError):
            continue
        if "RANK" in variables and parent == (1 if agent is None else agent):
            found[int(variables["RANK"])] = int(folder.name)
    return found


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics; what is being written at the moment may end with half a line."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60.0, every: float = 0.02) -> bool:
    """Whether it came true in time; asked `every` so many seconds."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(every)
    return False


def outcome(run: Path) -> dict[str, Any]:
    """What must be equal to the bit: the state of all ranks, and all rows but for the clocks."""
    step, tree = CheckpointStore(run / "checkpoints").load_latest()
    state = {name: tree[name] for name in ("algorithm", "collector")}
    # The time that a rank has spent is no part of it.
    state["ranks"] = [[entry for entry in rank if entry[0] != ["run", "seconds"]] for rank in tree.get("ranks", [])]
    rows = [{k: v for k, v in row.items() if "time" not in k and k != "seconds"} for row in rows_of(run)]
    digest = hashlib.sha256(b"".join(encode(state))).hexdigest()
    return {"iteration": step, "state": digest, "rows": hashlib.sha256(json.dumps(rows).encode()).hexdigest()}


def about() -> dict[str, Any]:
    """The machine, and how busy it was."""
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": cores,
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

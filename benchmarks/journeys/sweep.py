"""Twenty runs, two at a time, one of them killed: none is lost, and one report tells of all.

    python benchmarks/journeys/sweep.py

A sweep of tiny CartPole runs is started in an empty folder. As soon as its third run has a checkpoint, that run's
process is killed as `kill -9` does. The sweep goes on with the others and says what failed; the same command again
goes on with the killed run alone. `results/sweep.json` has what was found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS, JOBS, STEPS, ROLLOUT = 20, 2, 4096, 256
VICTIM = "seed2"
RESULTS = Path(__file__).parent / "results" / "sweep.json"
CANTER = [sys.executable, "-m", "canter"]
FLAGS = ["--total-steps", str(STEPS), "--algorithm.horizon", str(ROLLOUT // 8), "--checkpoints.save-every", "1"]
FLAGS += ["--seed", f"0..{RUNS - 1}", "--jobs", str(JOBS), "--name", "twenty"]


def kill_one(folder: Path, sweep: subprocess.Popen[str]) -> int:
    """Kill the victim in the middle of its work; gives how many steps it had done."""
    run = folder / VICTIM
    while not any((run / "checkpoints").glob("step-*")):
        if sweep.poll() is not None:
            raise SystemExit("the sweep ended before there was anything to kill")
        time.sleep(0.01)
    os.kill(json.loads((run / "run.json").read_text())["pid"], signal.SIGKILL)
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["env_steps"]


def told_of(run: Path) -> dict[str, object]:
    """What a run left: how it ended, and whether its log has every rollout once."""
    record = json.loads((run / "run.json").read_text())
    steps = [json.loads(line)["env_steps"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "status": record["status"],
        "resumed": record["resumed"] is not None,
        "every_rollout_once": steps == list(range(ROLLOUT, STEPS + 1, ROLLOUT)),
        "score": record["score"]["mean"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, start = Path(place) / "runs" / "twenty", time.perf_counter()
        command = [*CANTER, "sweep", "CartPole-v1", *FLAGS]
        first = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        killed_at = kill_one(folder, first)
        _, complaint = first.communicate()
        halfway = time.perf_counter()
        again = subprocess.run([*CANTER, "sweep", "twenty"], cwd=place, capture_output=True, text=True, check=False)
        runs = {path.name: told_of(path) for path in sorted(folder.glob("seed*")) if path.is_dir()}
        page = (folder / "report.html").read_text() if (folder / "report.html").is_file() else ""
        found = {
            "command": " ".join(["canter", "sweep", "CartPole-v1", *FLAGS]),
            "runs": len(runs),
            "finished": sum(run["status"] == "finished" for run in runs.values()),
            "logs_whole": sum(bool(run["every_rollout_once"]) for run in runs.values()),
            "killed": {"run": VICTIM, "after_steps": killed_at},
            "gone_on_with": [name for name, run in runs.items() if run["resumed"]],
            "first_exit_code": first.returncode,
            "first_said": complaint.strip().splitlines()[-1] if complaint.strip() else "",
            "second_exit_code": again.returncode,
            "report_kilobytes": len(page) // 1000,
            "seeds_in_report": sum(name in page for name in runs),
            "seconds": {"sweep": round(halfway - start, 1), "going_on": round(time.perf_counter() - halfway, 1)},
            "cores": os.cpu_count(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
            "scores": {name: run["score"] for name, run in runs.items()},
        }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""A run that four ranks begin, three go on with and four finish: does it end, and has it learned?

python benchmarks/ranks/elastic.py
"""

from __future__ import annotations

import json
import re
import signal
import tempfile
from pathlib import Path

from launching import about, end, rows_of, start, wait_for

FLAGS = ["CartPole-v1", "--num-envs=12", "--total-steps=60000", "--console=quiet", "--resume-if-present"]
STAGES = ((4, 10), (3, 22), (4, None))
"""Ranks, and the iteration after which torchrun is asked to end."""


def main() -> None:
    """Train in three stages, and write what came of it."""
    stages, said = [], ""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for ranks, until in STAGES:
            process = start(ranks, "train", *FLAGS, f"--run-dir={folder}", "--name=run")
            if until is not None:
                wait_for(lambda until=until: len(rows_of(run)) >= until, 300.0)
                process.send_signal(signal.SIGTERM)
            said = end(process)
            rows = rows_of(run)
            stages.append(
                {"ranks": ranks, "iterations": len(rows), "return": rows[-1]["return"], "code": process.returncode}
            )
            stages[-1]["restarts"] = re.findall(r"all episodes restart: (.*)", said)
            print(stages[-1], flush=True)
        counted = [row["iteration"] for row in rows_of(run)]
    score = re.search(r"Final score: mean return ([\d.]+)", said)
    results = {
        "about": about(),
        "command": ["canter", "train", *FLAGS],
        "stages": stages,
        "every_iteration_once": counted == list(range(1, len(counted) + 1)),
        "final_score": float(score[1]) if score else None,
    }
    (Path(__file__).parent / "results" / "elastic.json").write_text(json.dumps(results, indent=1) + "\n")
    assert score is not None, said


if __name__ == "__main__":
    main()

"""A sweep: every combination of settings and seeds, each run in its own process, and one report at the end.

    python examples/sweep.py

The command `canter sweep` can be killed and restarted without losing a run; a program reads the results from
`canter runs --json`.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

CANTER = [sys.executable, "-m", "canter"]
FOLDER = Path("runs", "learning-rates")
SETTINGS = ["--algorithm.optimizer.learning-rate", "1e-4,1e-3", "--seed", "0", "--total-steps", "4096"]

if __name__ == "__main__":
    new = ["tensor:cartpole", *SETTINGS, "--name", FOLDER.name]  # for five seeds each: --seed 0..4
    subprocess.run([*CANTER, "sweep", *([FOLDER.name] if FOLDER.exists() else new), "--jobs", "2"], check=True)

    found = subprocess.run([*CANTER, "runs", "--json", "--run-dir", FOLDER], check=True, capture_output=True, text=True)
    scores = defaultdict(list)
    for run in json.loads(found.stdout):
        scores[run["name"].partition("-seed")[0]].append(run["score"]["mean"])
    for name, values in sorted(scores.items()):
        print(f"{name}: mean score {mean(values):.0f} over {len(values)} seeds")

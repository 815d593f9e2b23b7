"""Compare updates with those of RSL-RL 5.5.1 and rl_games 1.6.5, 1.6.1 and 2.0, number for number.

    python benchmarks/parity/updates.py [--parents PYTHON] [--release 1.6.1=FOLDER] [--release 2.0=FOLDER]
        [--only PART_OF_A_NAME] [--write]

runs every case of `tests/parity/update_cases.py` by the parents themselves (`parents.py`, with an interpreter that has
them installed) and by Canter, and prints the largest difference of a parameter, a statistic and the learning rate. It
fails if one is above 1e-6. `--write` keeps the numbers of the cases that ran for `tests/parity/test_updates.py`,
which needs neither of them. FOLDER holds the package `rl_games` of that release; Isaac Lab's fork is one of 1.6.1.
"""

# pyright: reportMissingImports=false

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
from update_cases import CASES  # noqa: E402
from update_here import learn  # noqa: E402

EXPECTED = ROOT / "tests" / "parity" / "expected_updates.json"


def differences(found: dict[str, Any], expected: dict[str, list[float]]) -> dict[str, float]:
    """The largest one of each kind; what only one side has is a mistake of this script."""
    groups = {"parameters": [0.0], "statistics": [0.0], "learning rate": [0.0]}
    for name, exact in expected.items():
        kind = "learning rate" if name == "learning_rate" else "parameters"
        kind = "statistics" if name.endswith(("_mean", "_variance")) else kind
        exact = np.asarray(exact)
        error = np.abs(np.asarray(found[name]).ravel() - exact)
        groups[kind].append(float((error / np.abs(exact)).max() if kind == "learning rate" else error.max()))
    return {kind: max(errors) for kind, errors in groups.items()}


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--parents", default=sys.executable, help="interpreter that has the parents installed")
    options.add_argument("--release", action="append", default=[], help="RELEASE=FOLDER of another rl_games")
    options.add_argument("--write", action="store_true", help="keep the parents' numbers for the tests")
    options.add_argument("--only", default="", help="cases whose name contains this")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "parents.json"
        script = Path(__file__).with_name("parents.py")
        command = [chosen.parents, str(script), str(out)]
        subprocess.run([*command, "", chosen.only], check=True, cwd=folder)
        parents = json.loads(out.read_text())
        for release, _, source in (option.partition("=") for option in chosen.release):
            path = {"PYTHONPATH": str(Path(source).absolute())}
            subprocess.run([*command, release, chosen.only], check=True, cwd=folder, env=os.environ | path)
            parents["cases"] |= json.loads(out.read_text())["cases"]
    print(", ".join(f"{name} {version}" for name, version in parents["versions"].items()))
    print("| case | parameters | statistics | learning rate (relative) |\n| --- | --- | --- | --- |")
    worst = 0.0
    for name, expected in parents["cases"].items():
        with pytest.MonkeyPatch.context() as patch:
            found = learn(CASES[name], "autograd", patch)
        errors = differences(found, expected)
        worst = max(worst, *errors.values())
        print(f"| {name} | " + " | ".join(f"{error:.1e}" for error in errors.values()) + " |")
    if chosen.write:
        kept = json.loads(EXPECTED.read_text())
        cases = {name: found for name, found in (kept | parents["cases"]).items() if name in CASES}
        EXPECTED.write_text(frozen({"versions": parents["versions"], "cases": cases}))
    return 0 if worst <= 1e-6 else 1


def frozen(parents: dict[str, Any]) -> str:
    """One line for each case, with eight digits, which is what float32 has."""
    lines = [f'"versions": {json.dumps(parents["versions"])}']
    for name, found in parents["cases"].items():
        rounded = {key: [float(f"{value:.8g}") for value in numbers] for key, numbers in found.items()}
        lines.append(f"{json.dumps(name)}: {json.dumps(rounded, separators=(',', ':'))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())

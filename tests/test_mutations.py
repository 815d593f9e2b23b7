"""The planted mistakes of benchmarks/mutation still fit the code that they change."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_planted_mistakes_apply_and_compile() -> None:
    command = [sys.executable, "benchmarks/mutation/run.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"change `old` and `function` in benchmarks/mutation/planted:\n{done.stderr}"
    assert "apply and compile" in done.stdout

"""Five users' first day by real commands: benchmarks/journeys/journeys.py ends without a hurt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "journeys" / "journeys.py"
JOURNEYS = ("stable-baselines3", "queueing", "robotics", "code-reader", "team-lead")


@pytest.mark.long
@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_ends_without_a_hurt(name, tmp_path):
    if name == "robotics":
        pytest.importorskip("mujoco")
    out = tmp_path / "journeys.json"
    command = [sys.executable, str(SCRIPT), name, "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(out.read_text())["journeys"][name]["steps"]


def test_the_committed_result_has_all_journeys():
    result = json.loads((SCRIPT.parent / "results" / "journeys.json").read_text())
    assert tuple(result["journeys"]) == JOURNEYS

"""Run every example as a user does: in its own process and folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from covering import usual_of

EXAMPLES = Path(__file__).parents[1] / "examples"
LAST_LINES = {
    "own_environment": r"0\.\d+ degrees off on average; the run is runs/own_environment-Thermostat-\S+",
    "torch_simulator": r"mean return -\d\.\d of at most 0",
    "callbacks": r"ended by on_iteration; the best policy is in runs/\S+/policies",
    "sweep": r"learning_rate1e-4: mean score \d+ over 1 seeds",
    "recurrent": r"the cue was \+1, the answer is \+1",
    "self_play": r"all of them +rock 0\.[23]\d  paper 0\.[234]\d  scissors 0\.[234]\d",
    "queue_network": r"cost per unit of time: [23]\.\d+ \+- 0\.\d+",
    "export_onnx": r"cartpole\.onnx: at most \de[+-]\d+ from the policy; return \d+",
    "policy_to_c": r"cartpole\.h, cartpole\.npz, cartpole\.contract\.yaml; return [2-5]\d\d",
    "control_loop": r"balanced for \d+ steps, \d+ microseconds each",
}
"""The last line that each example prints after it has learned."""
ELSEWHERE = {
    "convert_motion": "tests/core/data/test_motion.py",
    "ros_node": "tests/play/test_robot_examples.py",
}
LINES = 45


@pytest.mark.parametrize("name", usual_of(LAST_LINES, ["own_environment", "control_loop"]))
def test_an_example_runs_from_an_empty_folder(name, tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(LAST_LINES[name], ran.stdout.splitlines()[-1]), ran.stdout


@pytest.mark.long
def test_the_control_loop_in_c_balances_the_pole(tmp_path):
    for command in (
        [sys.executable, EXAMPLES / "policy_to_c.py"],
        ["gcc", "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-I.", EXAMPLES / "policy.c", "-o", "loop", "-lm"],
        ["./loop"],
    ):
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
    assert int(re.search(r"balanced for (\d+) of 500 steps", ran.stdout)[1]) > 200


@pytest.mark.filterwarnings("default")  # as in a notebook
def test_the_notebook_runs_from_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert cell.keys() - {"execution_count", "outputs"} == {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert (cell["execution_count"], cell["outputs"]) == (None, []), "clear the outputs before committing"
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
    assert "Final score: mean return" in capsys.readouterr().out
    assert names["steps"] > 10


def test_all_examples_are_run_and_short():
    programs = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert programs.keys() == LAST_LINES.keys() | ELSEWHERE.keys()
    for name in LAST_LINES:
        text = programs[name].read_text()
        assert f"python examples/{name}.py" in text
        assert text.count("\n") <= LINES, name

"""An engineer: seeds on two cores, one report, the best run trained further, exported and run without Canter."""

import json

import numpy as np
import pytest

import canter

DEPLOYED = """
import json
import sys

import gymnasium
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("controller.onnx", providers=["CPUExecutionProvider"])
about = json.loads(session.get_modelmeta().custom_metadata_map["canter"])
name, steps, over = next(iter(about["inputs"])), 0, False
env = gymnasium.make("CartPole-v1")
observation, _ = env.reset(seed=3)
actions = []
while not over and steps < 50:
    action = session.run(None, {name: observation[None].astype(np.float32)})[0][0]
    actions.append([observation.tolist(), int(action)])
    observation, _, terminated, truncated, _ = env.step(action)
    steps, over = steps + 1, terminated or truncated
assert "canter" not in sys.modules and "torch" not in sys.modules
print(json.dumps(actions))
"""

FLAGS = ("--total-steps", "2048", "--algorithm.horizon", "64")


@pytest.mark.long
def test_from_seeds_to_a_controller_that_needs_no_canter(user):
    told = user.types("sweep", "CartPole-v1", "--seed", "0,1", *FLAGS, "--jobs", "2", "--name", "seeds")
    assert "0 of 2 to go" in told
    assert (user.folder / "runs/seeds/report.html").is_file()
    assert "seeds/seed1" in user.types("runs")

    found = json.loads(user.types("runs", "--json"))
    best = max(found, key=lambda run: run["score"]["mean"])
    assert {run["status"] for run in found} == {"finished"}
    told = user.types("report", "runs/seeds", "--out", "comparison.html")
    assert (user.folder / "comparison.html").is_file()

    user.types("resume", best["path"], "--total-steps", "3072", "--console", "lines")
    user.types("eval", best["path"], "--episodes", "20", "--json", "scores.json")
    assert json.loads((user.folder / "scores.json").read_text())["episodes"] == 20
    told = user.types("export", best["path"], "--output", "controller.onnx")
    assert "the same actions on 1,000 observations" in told
    beside = json.loads((user.folder / "controller.onnx.json").read_text())
    assert beside["env"] == "CartPole-v1" and str(user.folder) not in json.dumps(beside)

    user.writes("robot.py", DEPLOYED)
    actions = json.loads(user.runs("robot.py"))
    policy = canter.load(best["path"])
    assert all(policy.predict(np.array(seen, np.float32))[0] == action for seen, action in actions)
    assert len(actions) > 8

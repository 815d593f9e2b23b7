"""LEAPP's file next to an ONNX file: its content, and LEAPP itself where it is installed."""

import hashlib
from dataclasses import replace

import pytest
import torch
import yaml
from test_export import CASES, Noise, trained

from canter.core.interface import Interface, Signal
from canter.play.contract import ContractError, write_leapp
from canter.play.export import collect_inputs, export_policy
from covering import usual_of


def export(name, folder):
    config, obs, action = CASES[name]
    env = Noise(obs, action)
    named = Signal(name="arm", size=3, components=("a", "b", "c"))
    env.spec = replace(env.spec, interface=Interface(action=(named,) if name == "lstm" else None))
    policy = trained(config, env)
    inputs = collect_inputs(policy, env, 20, seed=0)
    export_policy(policy, folder / "policy.onnx", "onnx", *inputs)
    return policy, inputs, write_leapp(folder / "policy.onnx")


def test_the_description_feeds_the_recurrent_state_back(tmp_path):
    _, _, path = export("lstm", tmp_path)
    description = yaml.safe_load(path.read_text())
    node = description["models"]["policy"]
    assert [entry["name"] for entry in node["inputs"]] == ["policy", "state_0", "state_1", "state_2", "state_3"]
    assert node["outputs"][0] == {
        "name": "action",
        "dtype": "float32",
        "shape": [1, 3],
        "type": "tensor",
        "element_names": [["arm/a", "arm/b", "arm/c"]],
    }
    assert "element_names" not in node["inputs"][0]  # nothing declares them
    pipeline = description["pipeline"]
    assert pipeline["inputs"] == {"policy": ["policy"]}
    assert pipeline["feedback_flow"]["policy/next_state_3"] == ["policy/state_3"]
    digest = hashlib.sha256((tmp_path / "policy.onnx").read_bytes()).hexdigest()
    assert node["parameters"]["sha256sum"] == digest
    with pytest.raises(ContractError, match=r"policy.leapp.yaml already exists"):
        write_leapp(tmp_path / "policy.onnx")


@pytest.mark.parametrize("name", usual_of(["gaussian-clip", "dict", "lstm", "gru", "categorical-masked"], ["lstm"]))
def test_leapp_returns_the_policys_actions(name, tmp_path):
    leapp = pytest.importorskip("leapp", reason="leapp is not installed: pip install leapp")
    policy, (obs, _), path = export(name, tmp_path)
    manager = leapp.InferenceManager(str(path))
    state = policy.initial_state(1)
    for index in range(10):
        row = {key.partition("/")[2]: None for key in manager.inputs}
        row = {group: obs[group][index : index + 1] for group in row}
        action, state = policy.act(row, state)
        (got,) = manager.run_policy({f"policy/{group}": value for group, value in row.items()}).values()
        torch.testing.assert_close(got, action, atol=1e-5, rtol=0)

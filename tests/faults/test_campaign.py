"""A small version of benchmarks/faults: kills, damaged and forged files, code in disguise."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "faults"
COUNTS = {"kills": 2, "every": 40, "checkpoints": 40, "policies": 60, "configs": 40, "records": 40, "disguises": 20}
COUNTS |= {"hostile": 18, "commands": 3, "misbehaving": 5}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults") / "results.json"
    flags = [f"--{name}={count}" for name, count in COUNTS.items()]
    command = [sys.executable, str(CAMPAIGN / "run.py"), *flags, "--cases", "tensor:cartpole", "--out", str(out)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    parts = json.loads(out.read_text())["parts"].values()
    return {name: kind for part in parts for name, kind in part["results"].items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["random kills", "aimed kills"])
def test_after_any_kill_a_run_continues_to_the_same_end(kind, results):
    found = results[kind]
    assert found["kills"] >= COUNTS["kills"]
    assert found["chains"] > 0
    assert found["unusable"] == found["not_exact"] == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["checkpoints", "policies", "configs", "records"])
def test_damage_is_named_or_harmless(kind, results):
    found = results[f"fuzzed {kind}"]
    assert found["cases"] == found["refused"] + found["fine"] == COUNTS[kind]
    assert found["wrong"] == []
    assert kind != "checkpoints" or found["previous_used"] > COUNTS[kind] / 4


@pytest.mark.long
def test_a_misbehaving_environment_costs_one_rollout_at_most(results):
    found = results["misbehaving environments"]
    assert found["runs"] == COUNTS["misbehaving"]
    assert found["rollouts_lost"] == 1
    assert found["wrong"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("code in disguise", "disguises"),
        ("hostile files", "hostile"),
        ("files by command", "commands"),
        ("configs by command", "commands"),
        ("hostile files by command", "commands"),
    ],
)
def test_code_is_not_run_and_strangers_folders_are_refused_or_harmless(kind, count, results):
    found = results[kind]
    assert found["cases"] == found["refused"] + found["fine"] == COUNTS[count]
    assert found["wrong"] == []


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_the_code_was_armed(protocol, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CAMPAIGN)
    from disguise import CALLS, payload

    for call in CALLS:
        mark = tmp_path / call
        made = pickle.loads(payload(call, protocol, mark))
        assert mark.exists()
        if call == "builtins.open":
            made.close()

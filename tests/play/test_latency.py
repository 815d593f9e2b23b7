"""Latency of every kind of exported file: each is measured on the inputs it was verified on."""

import pytest
from test_export import CASES, Noise, trained

from canter.play import latency
from canter.play.export import SUFFIXES, collect_inputs, export_policy
from canter.play.latency import STEPS, measure_latency
from covering import usual_of


@pytest.mark.parametrize("format", usual_of(list(SUFFIXES), ["c", "numpy"]))
def test_every_kind_of_file_is_measured(format, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "STEPS", 200)
    config, obs, action = CASES["lstm"]
    env = Noise(obs, action)
    policy = trained(config, env)
    inputs = collect_inputs(policy, env, 20, seed=0)
    path = tmp_path / f"policy{SUFFIXES[format]}"
    export_policy(policy, path, format, *inputs)
    p50, p99 = measure_latency(path, inputs)
    assert 0 < p50 <= p99 < 1
    assert STEPS > 1000

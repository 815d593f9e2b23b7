"""The doctor of a running run: findings in the report, and results that do not depend on it."""

import json
import logging

import gymnasium
import pytest
import torch

import canter
from canter.algorithms.doctor import live
from canter.core.struct import tree_leaves

QUIET = {"final_evaluation": False, "console": "quiet"}


class Unrewarded(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 0.0


def unrewarded():
    return Unrewarded(gymnasium.make("CartPole-v1"))


def test_a_run_without_reward_has_a_finding_everywhere(tmp_path, caplog):
    found = []

    def keep(report):
        found.append([finding.rule for finding in report.findings])

    with caplog.at_level(logging.WARNING, logger="canter"):
        canter.train(unrewarded, keep, run_dir=tmp_path, name="run", total_steps=16_000, num_envs=8, **QUIET)
    assert found[0] == []
    assert found[-1] == ["no_reward"]
    assert [finding.rule for finding in canter.diagnose(tmp_path / "run")] == ["no_reward"]
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["findings"]
    assert [finding["rule"] for finding in stored] == ["no_reward"]
    assert caplog.text.count("doctor: No reward so far") == 1


@pytest.mark.parametrize(
    "env, settings",
    [
        ("CartPole-v1", {"total_steps": 5_000}),
        ("Pendulum-v1", {"total_steps": 1_300, "algorithm": {"kind": "sac", "warmup_steps": 1_100}}),
    ],
)
def test_equal_bits_with_and_without_the_doctor(env, settings, monkeypatch):
    def train():
        result = canter.train(env, folder=False, **settings, **QUIET)
        return [leaf.clone() for leaf in tree_leaves(result.algorithm.state_tensors())]

    with_doctor = train()
    monkeypatch.setattr(live.Doctor, "looks_at", lambda self, iteration: False)
    without = train()
    assert all(torch.equal(a, b) for a, b in zip(with_doctor, without, strict=True))


def test_signals_are_in_the_log_of_some_iterations(tmp_path):
    canter.train("CartPole-v1", run_dir=tmp_path, name="run", total_steps=6_000, **QUIET)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "doctor/action_effect" in row] == [1, 5]
    first = rows[0]
    assert first["doctor/ratio_error"] < 1e-5
    assert first["doctor/action_effect"] > 3
    assert (first["doctor/reward_min"], first["doctor/reward_max"]) == (1, 1)
    assert first["doctor/obs_constant"] == 0

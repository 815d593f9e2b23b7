"""The doctor of a running run: findings in the report, and results that do not depend on it."""

import json
import logging

import gymnasium
import pytest
import torch

import canter
from canter.algorithms.doctor import live
from canter.algorithms.ppo.ppo import PPO
from canter.app.cli import main
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
        pytest.param(
            "CartPole-v1", {"total_steps": 5_000, "execution": {"engine": "autograd"}}, marks=pytest.mark.long
        ),
        ("Pendulum-v1", {"total_steps": 1_300, "algorithm": {"kind": "sac", "warmup_steps": 1_100}}),
    ],
    ids=["ppo-native", "ppo-autograd", "sac"],
)
def test_equal_bits_with_the_doctor_on_and_off(env, settings):
    def train(doctor):
        rows = []
        result = canter.train(env, lambda report: rows.append(report.row()) and None, folder=False, doctor=doctor,
                              **settings, **QUIET)  # fmt: skip
        measured = any(name.startswith("doctor/") for row in rows for name in row)
        algorithm = result.algorithm
        random = [generator.get_state() for generator in algorithm.generators()]
        return measured, [leaf.clone() for leaf in tree_leaves(algorithm.state_tensors())] + random

    measured, with_doctor = train(True)
    assert measured
    measured, without = train(False)
    assert not measured
    assert all(torch.equal(a, b) for a, b in zip(with_doctor, without, strict=True))


def test_the_doctor_computes_nothing_if_it_is_off(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("computed with doctor=off")

    for name in ("rollout_signals", "episode_signals", "diagnose_signals", "Signals"):
        monkeypatch.setattr(live, name, refuse)
    monkeypatch.setattr(PPO, "signals", refuse)
    settings = ["--total-steps", "3000", "--final-episodes", "1", "--console", "quiet"]
    main(["train", "CartPole-v1", "--doctor", "off", *settings, "--run-dir", str(tmp_path), "--name", "run"])
    assert "doctor: false" in (tmp_path / "run" / "config.yaml").read_text()
    assert "findings" not in json.loads((tmp_path / "run" / "run.json").read_text())


def test_signals_are_in_the_log_of_some_iterations(tmp_path):
    canter.train("CartPole-v1", run_dir=tmp_path, name="run", total_steps=6_000, **QUIET)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "doctor/action_effect" in row] == [1, 5]
    first = rows[0]
    assert first["doctor/ratio_error"] < 1e-5
    assert first["doctor/action_effect"] > 3
    assert (first["doctor/reward_min"], first["doctor/reward_max"]) == (1, 1)
    assert first["doctor/obs_constant"] == 0

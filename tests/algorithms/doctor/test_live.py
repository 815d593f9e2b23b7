"""The doctor of a running run: findings in the report, and results that do not depend on it."""

import json
import logging

import gymnasium
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import canter
from canter.algorithms.base import plan_of
from canter.algorithms.doctor import live
from canter.algorithms.doctor.live import Doctor
from canter.algorithms.ppo.ppo import PPO
from canter.app.cli import main
from canter.app.experiments.settings import base_config, with_overrides
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
        ("CartPole-v1", {"total_steps": 2_048, "algorithm": {"horizon": 64}}),
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

    for name in ("measure", "episode_signals", "diagnose_signals", "Signals"):
        monkeypatch.setattr(live, name, refuse)
    monkeypatch.setattr(PPO, "signals", refuse)
    settings = ["--total-steps", "3000", "--final-episodes", "1", "--console", "quiet"]
    main(["train", "CartPole-v1", "--doctor", "off", *settings, "--run-dir", str(tmp_path), "--name", "run"])
    assert "doctor: false" in (tmp_path / "run" / "config.yaml").read_text()
    assert "findings" not in json.loads((tmp_path / "run" / "run.json").read_text())


class HostReads(TorchDispatchMode):
    """Notes operations that read a tensor on the host or copy one from there: on a GPU they wait for it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "lift_fresh", "nonzero"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def first_rollout(task, device):
    """Return a trainer with a preset's settings and few environments, and its first rollout, measured once."""
    config = with_overrides(base_config(task, None, device=device)[0], {"env.num_envs": 16})
    trainer = canter.Trainer(with_overrides(config, {"total_steps": 16 * 10 * plan_of(config.algorithm).horizon}))
    return trainer, trainer.collect()


def test_signals_are_computed_without_reads_of_the_host():
    trainer, rollout = first_rollout("tensor:quadrotor", "cpu")
    with trainer, HostReads() as reads:
        trainer.doctor.measure(rollout, 1)
    assert "doctor/action_effect" in trainer.doctor.signals
    assert reads.names == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("task", ["tensor:cartpole", "tensor:quadrotor"])
def test_signals_do_not_wait_for_the_gpu(task):
    trainer, rollout = first_rollout(task, "cuda")
    with trainer:
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.doctor.measure(rollout, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert "doctor/action_effect" in trainer.doctor.signals


@pytest.mark.parametrize(
    "samples, on_gpu, rollouts, looks",
    [
        # Every fifth (second, twelfth) of 60, or four of those, then a third as often.
        (1_000, False, 60, [1, 5, 10, 15, 20, 30, 45, 60]),
        (100_000, False, 60, [1, 2, 4, 6, 8, 10, 12, 18, 24, 30, 36, 42, 48, 54, 60]),
        (100_000, True, 60, [1, 12, 24, 36, 48]),
        (100_000, True, 6000, [1, *range(120, 1201, 120), *range(1440, 6001, 360)]),
    ],
)
def test_the_doctor_looks_at_few_iterations(samples, on_gpu, rollouts, looks):
    doctor = Doctor(lambda rollout: {}, (), {}, samples=samples, rollouts=rollouts, unit=1, on_gpu=on_gpu)
    assert [iteration for iteration in range(1, rollouts + 1) if doctor.looks_at(iteration)] == looks


def test_signals_are_in_the_log_of_some_iterations(tmp_path):
    canter.train("CartPole-v1", run_dir=tmp_path, name="run", total_steps=6_000, **QUIET)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "doctor/action_effect" in row] == [1, 5]
    first = rows[0]
    assert first["doctor/ratio_error"] < 1e-5
    assert first["doctor/action_effect"] > 3
    assert (first["doctor/reward_min"], first["doctor/reward_max"]) == (1, 1)
    assert first["doctor/obs_constant"] == 0

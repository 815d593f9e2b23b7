"""Algorithms describe themselves to what is around them, which names no algorithm."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import canter
from canter.algorithms.base import ReportSpec, RolloutPlan, plan_of, report_spec_for, report_spec_of, title_of
from canter.algorithms.ppo import PPOConfig
from canter.envs.tensor import CartPole
from canter.training.collector import Collector

SOURCE = Path(canter.__file__).parent
AROUND = ("app/check", "app/cli", "app/console", "app/report", "core/storage", "play", "runs", "training")


@dataclass(frozen=True)
class SilentConfig:
    horizon: int = 8


def test_settings_without_optional_members_are_fine():
    assert report_spec_of(SilentConfig()) == report_spec_for("no such algorithm") == ReportSpec()
    assert plan_of(SilentConfig()) == RolloutPlan(horizon=8)
    assert title_of(SilentConfig()) == "Silent"


def test_ppo_has_a_plan():
    config = PPOConfig(horizon=32, epochs=3, num_minibatches=4, gamma=0.9, gae_lambda=0.8)
    expected = RolloutPlan(horizon=32, epochs=3, num_minibatches=4, gamma=0.9, gae_lambda=0.8)
    assert (title_of(config), plan_of(config)) == ("PPO", expected)
    assert plan_of(PPOConfig(objective="average")).gamma == 1.0


def test_ppo_reports_every_metric_of_its_report_spec():
    env = CartPole(4)
    algorithm = PPOConfig(horizon=8, num_minibatches=1).build(env.spec, 0)
    metrics = algorithm.update(Collector(env, algorithm, 0).collect())
    spec = report_spec_for("ppo")
    names = [line.metric for line in spec.headlines if line.metric != "policy/std"]  # of Gaussians only
    for name in (*names, spec.optimizer_steps, *spec.counters):
        assert any(metric == name or metric.startswith(f"{name}/") for metric in metrics), name
    assert all(hasattr(algorithm.config, key) for key in spec.settings.values())


@pytest.mark.parametrize("room", AROUND)
def test_nothing_around_the_algorithms_names_one_or_a_metric_of_it(room):
    named = re.compile(r"\bPPO|\bppo\b|\bSAC|\bsac\b|[\"'](loss|policy|value|optim)/")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((SOURCE / room).rglob("*.py"))
        for line in path.read_text().splitlines()
        if named.search(line)
    ]
    assert found == []

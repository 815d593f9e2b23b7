"""Rows of the log apart from iterations: nothing that is learned or counted depends on them."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPO, PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.envs.tensor import CartPole
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import Linear
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.episodes import EpisodeTracker
from canter.training.guard import RunFailed
from canter.training.progress import UntilConfig
from canter.training.trainer import Trainer, train

ALGORITHM = PPOConfig(
    horizon=16, epochs=1, num_minibatches=2, optimizer=OptimizerConfig(learning_rate=Linear(1e-3)), target_kl=0.001
)
CONFIG = TrainConfig(env=EnvConfig(id="tensor:cartpole", num_envs=8), algorithm=ALGORITHM, total_steps=16 * 8 * 12)
WITH_FILLER_ROWS = replace(CONFIG, env=EnvConfig(id="CartPole-v1", num_envs=8, autoreset="next_step"))


def trained(config, **parts):
    reports = []
    algorithm = train(config, reports.append, **parts)
    return reports, torch.cat([p.detach().reshape(-1) for p in algorithm.model.parameters()])


def metrics_of(row):
    """Return the metrics of a row without those of the doctor, which looks in some rows only."""
    return {name: value for name, value in row.metrics.items() if not name.startswith("doctor/")}


@pytest.mark.parametrize("config", [CONFIG, WITH_FILLER_ROWS], ids=["tensor", "filler rows"])
def test_what_is_learned_and_counted_does_not_depend_on_how_often_is_logged(config):
    every, parameters = trained(config)
    for log_every in (5, 100):
        some, same = trained(replace(config, log_every=log_every))
        assert torch.equal(same, parameters)
        kept = [report for report in every if report.iteration in {row.iteration for row in some}]
        # Near the end of the budget there may be further ones: whether it is used up must be read.
        assert set(range(log_every, every[-1].iteration, log_every)) <= {row.iteration for row in some}
        assert len(some) < len(every)
        assert some[-1].iteration == every[-1].iteration
        for name in ("env_steps", "train_steps", "rollouts", "episodes", "resets", "updates", "minibatch_updates"):
            assert [getattr(row, name) for row in some] == [getattr(row, name) for row in kept], name
        for name in ("return_", "length", "success_rate"):  # of the last 100 episodes: none was lost
            assert [getattr(row, name) for row in some] == [getattr(row, name) for row in kept], name
        assert [metrics_of(row) for row in some] == [metrics_of(row) for row in kept]
        assert sum(row.rollout_steps for row in some) == every[-1].env_steps


def test_a_row_is_about_all_iterations_since_the_row_before():
    every, _ = trained(CONFIG)
    some, _ = trained(replace(CONFIG, log_every=4))
    first = every[:4]
    assert some[0].rollout_steps == sum(report.rollout_steps for report in first)
    rewards = [report.rollout_reward * report.rollout_steps for report in first]
    assert some[0].rollout_reward == pytest.approx(sum(rewards) / some[0].rollout_steps)
    ended = [report.episodes - before for report, before in zip(first, [0, *(r.episodes for r in first)], strict=False)]
    returns = [report.rollout_return * count for report, count in zip(first, ended, strict=True) if count]
    assert some[0].rollout_return == pytest.approx(sum(returns) / sum(ended))


def test_learning_counts_as_such_in_iterations_without_a_row(monkeypatch):
    update = PPO.update
    monkeypatch.setattr(PPO, "update", lambda self, rollout: time.sleep(0.02) or update(self, rollout))
    rows, _ = trained(replace(CONFIG, log_every=4))
    assert all(row.times["update"] >= 4 * 0.02 for row in rows[:2])


def test_the_device_is_read_once_for_a_row(monkeypatch):
    reads, read = [], EpisodeTracker.read
    monkeypatch.setattr(EpisodeTracker, "read", lambda self, steps: reads.append(steps) or read(self, steps))
    trained(replace(CONFIG, log_every=6))
    assert reads == [6 * 16, 12 * 16]


def test_a_checkpoint_has_a_row_and_a_resumed_run_learns_the_same(tmp_path):
    config = replace(CONFIG, log_every=5)
    straight = trained(config, folder=RunFolder(tmp_path / "straight", CheckpointConfig(save_every=3)))[1]
    rows = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [3, 5, 6, 9, 10, 12]
    with Trainer(config, folder=RunFolder(tmp_path / "parts")) as trainer:
        trainer.learn(7)
    assert torch.equal(trained(config, folder=RunFolder(tmp_path / "parts"))[1], straight)


class Spoilt(CartPole):
    """Gives NaN as a reward at its step 40, and only then."""

    count = 0

    def step(self, action):
        step = super().step(action)
        self.count += 1
        if self.count == 41:
            step.reward[3] = math.nan
        return step


def test_nan_between_two_rows_still_stops_the_run_and_is_named():
    with pytest.raises(RunFailed, match=r"environment 3 returned reward = nan at its step 40\."):
        train(replace(CONFIG, log_every=6), env=Spoilt(8))


def test_a_mean_return_is_looked_at_where_a_row_is_logged():
    config = replace(CONFIG, algorithm=replace(ALGORITHM, optimizer=OptimizerConfig()), log_every=7)
    reports, _ = trained(replace(config, total_steps=None, until=UntilConfig(mean_return=1.0)))
    assert reports[-1].iteration % 7 == 0


def test_no_iterations_at_all_between_rows_are_refused():
    with pytest.raises(ValueError, match="log_every=0 must be at least 1"):
        replace(CONFIG, log_every=0)

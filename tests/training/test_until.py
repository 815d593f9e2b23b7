"""End conditions of a run other than its budget of steps."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.nn.optimizer import OptimizerConfig
from canter.nn.schedules import AdaptiveKL, Linear
from canter.runs.records import read_record
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.progress import UntilConfig
from canter.training.trainer import Trainer, train

CONFIG = TrainConfig(
    env=EnvConfig(id="tensor:cartpole", num_envs=16),
    algorithm=PPOConfig(horizon=16, epochs=1, num_minibatches=2),
    total_steps=None,
    until=UntilConfig(iterations=4),
)


def ended(config, **parts):
    """The reports of a run, and what ended it."""
    reports = []
    with Trainer(config, reports.append, **parts) as trainer:
        trainer.learn()
        return reports, trainer.progress.ended_by


def test_a_run_ends_after_its_iterations():
    reports, ended_by = ended(CONFIG)
    assert ([report.iteration for report in reports], ended_by) == ([1, 2, 3, 4], "until.iterations")


def test_whichever_end_comes_first_counts():
    assert ended(replace(CONFIG, total_steps=16 * 16 * 3))[1] == "total_steps"
    reports, ended_by = ended(replace(CONFIG, total_steps=16 * 16 * 5))
    assert (len(reports), ended_by) == (4, "until.iterations")


def test_a_run_ends_at_the_first_mean_return_that_is_high_enough_once_100_episodes_are_over():
    free = ended(replace(CONFIG, until=UntilConfig(iterations=30)))[0]
    goal = free[24].return_
    first = next(report for report in free if report.episodes >= 100 and report.return_ >= goal)
    reports, ended_by = ended(replace(CONFIG, until=UntilConfig(mean_return=goal)))
    assert (reports[-1].iteration, ended_by) == (first.iteration, "until.mean_return")


@pytest.mark.parametrize("answer", [False, "stop"])
def test_a_run_ends_when_its_callback_says_so(answer):
    config = replace(CONFIG, env=EnvConfig(id="tensor:cartpole", num_envs=2))
    with Trainer(config, lambda report: answer if report.iteration == 2 else None) as trainer:
        trainer.learn()
        assert (trainer.progress.iteration, trainer.progress.ended_by) == (2, "on_iteration")


def test_a_run_ends_when_its_time_is_up(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    reports, ended_by = ended(replace(CONFIG, until=UntilConfig(seconds=2000.0)))
    assert ended_by == "until.seconds"
    assert reports[-2].seconds < 2000 <= reports[-1].seconds


@pytest.mark.parametrize("until", [UntilConfig(iterations=2), UntilConfig(mean_return=1.0), UntilConfig(seconds=1e-3)])
def test_a_run_that_a_condition_ended_is_finished_and_resuming_adds_nothing(tmp_path, until):
    config = replace(CONFIG, until=until)
    ended_by = ended(config, folder=RunFolder(tmp_path))[1]
    record = read_record(tmp_path)
    assert (record["status"], record["ended_by"]) == ("finished", ended_by)
    assert ended(config, folder=RunFolder(tmp_path)) == ([], ended_by)
    assert read_record(tmp_path)["status"] == "finished"


def test_schedules_and_kept_checkpoints_follow_the_iterations_where_no_steps_are_given(tmp_path):
    algorithm = replace(CONFIG.algorithm, optimizer=OptimizerConfig(learning_rate=Linear(1e-3)))
    folder = RunFolder(tmp_path, CheckpointConfig(save_every=100, keep_last=1, num_checkpoints=2))
    reports, _ = ended(replace(CONFIG, algorithm=algorithm), folder=folder)
    rates = [report.metrics["optim/learning_rate/model"] for report in reports]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert folder.store.steps() == [2, 4]


def test_settings_that_need_a_run_length_are_refused_by_key_without_one():
    unlimited = {"total_steps": None, "until": UntilConfig(mean_return=400.0)}
    linear = replace(CONFIG.algorithm, optimizer=OptimizerConfig(learning_rate=Linear(1e-3)))
    with pytest.raises(ValueError, match=r"algorithm\.optimizer\.learning_rate: Linear follows the progress"):
        replace(CONFIG, **unlimited, algorithm=linear)
    with pytest.raises(ValueError, match=r"checkpoints\.num_checkpoints=3 are spread over the run"):
        replace(CONFIG, **unlimited, checkpoints=CheckpointConfig(num_checkpoints=3))
    adaptive = replace(CONFIG.algorithm, optimizer=OptimizerConfig(learning_rate=AdaptiveKL(1e-3)))
    assert replace(CONFIG, **unlimited, algorithm=adaptive).until.mean_return == 400.0


def test_a_run_without_an_end_is_refused():
    with pytest.raises(ValueError, match="total_steps=null leaves the run without an end"):
        TrainConfig(total_steps=None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("iterations", 0, "iterations=0 must be at least 1"),
        ("seconds", 0.0, r"seconds=0\.0 must be above 0"),
        ("mean_return", math.nan, "mean_return=nan must be finite"),
    ],
)
def test_values_out_of_range_are_refused_by_name(key, value, message):
    with pytest.raises(ValueError, match=message):
        UntilConfig(**{key: value})


def test_train_takes_such_a_run_too():
    assert train(CONFIG).policy is not None


def test_a_run_that_paused_learns_what_it_would_have_learned_without_the_pause(tmp_path):
    """The learning rate falls to zero at `total_steps`, whatever the pauses."""
    steps = 16 * 16
    algorithm = replace(CONFIG.algorithm, optimizer=OptimizerConfig(learning_rate=Linear(1e-2)))
    whole = replace(CONFIG, algorithm=algorithm, total_steps=6 * steps, until=UntilConfig())
    expected = train(whole).state_dict()["model"]
    for pause, iterations in ((steps + 1, 2), (4 * steps, 4), (None, 6)):
        config = replace(whole, until=UntilConfig(steps=pause))
        with Trainer(config, folder=RunFolder(tmp_path)) as trainer:
            model = trainer.learn().state_dict()["model"]
            assert trainer.progress.iteration == iterations
    assert trainer.progress.ended_by == "total_steps"
    assert all(torch.equal(model[name], expected[name]) for name in expected)

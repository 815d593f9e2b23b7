"""A run folder given from Python: it has its settings, knows changes, and can be resumed by name and by command."""

import json
import logging
import os
from dataclasses import replace
from typing import Any

import pytest

import canter
from canter.app.cli import main
from canter.app.experiments.folders import stored_config
from canter.core.registry import UserError
from canter.training.trainer import Trainer

CONFIG = canter.TrainConfig(
    env=canter.EnvConfig(id="tensor:cartpole", num_envs=4),
    algorithm=canter.PPOConfig(horizon=16, epochs=1, num_minibatches=1),
    total_steps=128,
    checkpoints=canter.CheckpointConfig(save_every=1, keep_last=9),
)
QUIET: Any = {"console": "quiet", "final_evaluation": False}


def with_gamma(gamma: float) -> canter.TrainConfig:
    return replace(CONFIG, total_steps=256, algorithm=replace(CONFIG.algorithm, gamma=gamma))


@pytest.mark.parametrize("trains", ["train", "Trainer"])
def test_the_settings_are_written_and_followed(tmp_path, trains):
    folder = canter.RunFolder(tmp_path / "run")
    if trains == "train":
        canter.train(CONFIG, folder=folder, **QUIET)
    else:
        with Trainer(CONFIG, folder=folder) as trainer:
            trainer.learn()
    assert stored_config(tmp_path / "run") == CONFIG
    assert folder.store.steps() == [0, 1, 2]  # of `config.checkpoints`


def test_changed_settings_are_reported_and_recorded(tmp_path, caplog):
    canter.train(CONFIG, folder=canter.RunFolder(tmp_path / "run"), **QUIET)
    with caplog.at_level(logging.WARNING):
        canter.train(with_gamma(0.5), folder=canter.RunFolder(tmp_path / "run"), **QUIET)
    assert "From iteration 2 on: algorithm.gamma 0.99 -> 0.5, total_steps 128 -> 256" in caplog.text
    (line,) = (tmp_path / "run" / "edits.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"]["algorithm.gamma"] == ["0.99", "0.5"]
    assert stored_config(tmp_path / "run").algorithm.gamma == 0.5


def test_settings_that_cannot_change_are_refused(tmp_path):
    canter.train(CONFIG, folder=canter.RunFolder(tmp_path / "run"), **QUIET)
    with pytest.raises(UserError, match=r"total_steps=64 is below the 128 steps that are done"):
        canter.train(replace(CONFIG, total_steps=64), folder=canter.RunFolder(tmp_path / "run"), **QUIET)
    with pytest.raises(UserError, match=r"algorithm\.model\.policy\.hidden cannot change"):
        canter.resume(tmp_path / "run", algorithm={"model.policy.hidden": [8]}, **QUIET)
    assert stored_config(tmp_path / "run") == CONFIG


def test_resume_says_from_where_it_continues(tmp_path, capsys, monkeypatch):
    canter.train(CONFIG, folder=canter.RunFolder(tmp_path / "run"), **QUIET)
    result = canter.resume("run", run_dir=tmp_path, total_steps=256, console="lines", final_evaluation=False)
    out = capsys.readouterr().out
    assert "Continuing after 2 iterations, 128 steps" in out
    assert "From iteration 2 on: total_steps 128 -> 256" in out
    assert result.ended_by == "total_steps"
    monkeypatch.chdir(tmp_path)
    main(["resume", str(tmp_path / "run"), "--total-steps", "320", "--console", "lines"])
    assert "Continuing after 4 iterations, 256 steps" in capsys.readouterr().out


def test_a_run_of_an_unnamed_environment_resumes_with_its_environment(tmp_path):
    def make():
        import gymnasium

        return gymnasium.make("CartPole-v1")

    settings: Any = {"algorithm": CONFIG.algorithm, "num_envs": 2} | QUIET
    canter.train(make, total_steps=64, folder=canter.RunFolder(tmp_path / "run"), **settings)
    result = canter.resume(tmp_path / "run", env=make, total_steps=128, **QUIET)
    assert result.ended_by == "total_steps"
    with pytest.raises(UserError, match=r"env is Pendulum-v1, and .* learns in python:environment"):
        canter.resume(tmp_path / "run", env="Pendulum-v1", **QUIET)


def test_a_run_killed_in_its_first_iterations_can_be_resumed(tmp_path):
    folder = canter.RunFolder(tmp_path / "run", canter.CheckpointConfig(save_every=50))
    with Trainer(CONFIG, folder=folder):
        assert folder.store.steps() == [0]
        folder.log({"iteration": 1})  # the rows of lost iterations
    assert canter.resume(tmp_path / "run", **QUIET).ended_by == "total_steps"


def test_the_umask_says_who_may_read_a_run(tmp_path):
    before = os.umask(0o002)
    try:
        canter.train(CONFIG, folder=canter.RunFolder(tmp_path / "run"), **QUIET)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*")}
    assert {path.name: oct(mode) for path, mode in modes.items() if mode != (0o775 if path.is_dir() else 0o664)} == {}

"""Checkpoints, policies and the hall of fame as `canter train` leaves them."""

import pytest

import canter
from canter.app.cli import main
from canter.core.storage.checkpoint import CheckpointStore


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SHORT = ["--algorithm.horizon=16", "--algorithm.epochs=1", "--algorithm.num-minibatches=1", "--num-envs=16"]


def train(name, *flags):
    main(["train", "tensor:cartpole", *SHORT, "--total-steps=2560", "--name", name, *flags])


def test_every_kind_of_checkpoint_is_a_flag_and_runs_are_compared(tmp_path, capsys):
    flags = ("save-every=4", "keep-last=1", "num-checkpoints=2", "best=false")
    train("first", *(f"--checkpoints.{flag}" for flag in flags))
    run = tmp_path / "runs" / "first"
    assert CheckpointStore(run / "checkpoints").steps() == [5, 10]
    names = sorted(path.stem for path in (run / "policies").iterdir())
    assert names == ["final_actor", "final_critic", "step-000001280", "step-000002560"]
    policy = canter.load_policy(run)
    env = canter.EnvConfig(id="tensor:cartpole", num_envs=4).build("cpu")
    assert canter.evaluate(policy, env, episodes=4, seed=0).mean > 0
    assert "First result on tensor:cartpole" in capsys.readouterr().out
    train("second", "--seed=5", "--num-envs=8")
    out = capsys.readouterr().out
    assert " of run first" in out or "run first has" in out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--checkpoints.save-every=0", "checkpoints.save_every=0 must be at least 1"),
        ("--checkpoints.keep-last=0", "checkpoints.keep_last=0 must be at least 1"),
        ("--checkpoints.num-checkpoints=-1", "checkpoints.num_checkpoints=-1 must not be negative"),
        ("--checkpoints.every=3", "unknown flag --checkpoints.every: did you mean --checkpoints.save-every"),
    ],
)
def test_bad_settings_get_one_clear_line(flag, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        train("x", flag)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_whose_settings_were_changed_is_refused_in_one_line(tmp_path, capsys):
    train("run")
    settings = tmp_path / "runs" / "run" / "config.yaml"
    changed = settings.read_text().replace("hidden: [64, 64]", "hidden: [32, 32]")
    assert changed != settings.read_text()
    settings.write_text(changed)
    with pytest.raises(SystemExit) as leaving:
        main(["resume", "run", "--total-steps", "5000"])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert "model.policy.hidden is [64, 64] in what was saved and [32, 32] here" in error
    assert settings.read_text() == changed

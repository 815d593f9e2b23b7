"""A run with a folder: what it leaves, how it stops, how it goes on."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from canter.recipes import preset_for
from canter.runtime.checkpoint import NoCheckpoint
from canter.runtime.lock import RunLocked
from canter.runtime.run_folder import RunFolder
from canter.runtime.trainer import RunStopped, train


def config_for(env_id="tensor:pendulum", iterations=6):
    preset = preset_for(env_id)
    algorithm = replace(preset.algorithm, horizon=16, num_minibatches=4, epochs=2)
    return replace(preset, algorithm=algorithm, total_steps=iterations * 16 * preset.env.num_envs)


def stop_after(iteration):
    """A callback that sends this process SIGTERM, as a scheduler would."""

    def callback(report):
        if report.iteration == iteration:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


def lines(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "wall_time")} for row in rows]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


@pytest.mark.parametrize("env_id", ["tensor:pendulum", "CartPole-v1"])
def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(tmp_path, env_id):
    config = config_for(env_id)
    straight = train(config, folder=RunFolder(tmp_path / "straight", save_every=2))
    for iteration in (1, 4):
        with pytest.raises(RunStopped, match="SIGTERM") as stopped:
            train(config, stop_after(iteration), folder=RunFolder(tmp_path / "stopped", save_every=2))
        assert stopped.value.received == signal.SIGTERM
    resumed = train(config, folder=RunFolder(tmp_path / "stopped", save_every=2))
    assert equal(straight.state_dict()["model"], resumed.state_dict()["model"])
    assert equal(straight.state_dict()["optimizer"]["model"], resumed.state_dict()["optimizer"]["model"])
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


def test_a_run_killed_between_checkpoints_repeats_what_was_lost(tmp_path):
    config = config_for()
    train(config, folder=RunFolder(tmp_path / "straight", save_every=2))

    def die(report):
        if report.iteration == 5:
            raise RuntimeError("as good as kill -9: nothing is saved on the way out")

    with pytest.raises(RuntimeError):
        train(config, die, folder=RunFolder(tmp_path / "killed", save_every=2))
    assert [row["iteration"] for row in lines(tmp_path / "killed")] == [1, 2, 3, 4, 5]
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "cut o')
    train(config, folder=RunFolder(tmp_path / "killed", save_every=2))
    assert lines(tmp_path / "killed") == lines(tmp_path / "straight")


def test_a_finished_run_can_be_extended(tmp_path):
    train(config_for(iterations=3), folder=RunFolder(tmp_path))
    reports = []
    train(config_for(iterations=5), reports.append, folder=RunFolder(tmp_path))
    assert [report.iteration for report in reports] == [4, 5]


def test_a_second_writer_is_refused(tmp_path):
    with RunFolder(tmp_path), pytest.raises(RunLocked, match=str(os.getpid())):
        train(config_for(), folder=RunFolder(tmp_path))


def test_checkpoints_that_are_all_corrupt_never_mean_starting_from_zero(tmp_path):
    train(config_for(iterations=1), folder=RunFolder(tmp_path))
    for path in tmp_path.glob("checkpoints/step-*/tensors.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(NoCheckpoint, match="tensors"):
        train(config_for(), folder=RunFolder(tmp_path))


def test_a_full_disk_costs_the_checkpoint_not_the_run(tmp_path, monkeypatch, caplog):
    folder = RunFolder(tmp_path, save_every=2)
    save = folder.store.save

    def full(step, tree):
        if step == 4:
            raise OSError(28, "No space left on device")
        return save(step, tree)

    monkeypatch.setattr(folder.store, "save", full)
    train(config_for(), folder=folder)
    assert folder.store.steps() == [2, 6]
    assert "iteration 4 was not saved" in caplog.text


def test_metrics_that_cannot_be_written_do_not_end_the_run(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    train(config_for(iterations=1), folder=folder)
    assert "training goes on" in caplog.text

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from canter.config.presets import preset_for
from canter.runs.records import RunRecord, read_record, run_status, write_score
from canter.runs.run_folder import RunFolder
from canter.training.trainer import RunStopped, train


def config_for(iterations):
    preset = preset_for("tensor:pendulum")
    assert preset is not None
    algorithm = replace(preset.algorithm, horizon=8, num_minibatches=1, epochs=1)
    return replace(preset, algorithm=algorithm, total_steps=iterations * 8 * preset.env.num_envs)


def test_a_record_has_place_time_and_machine_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["canter", "train", "Pendulum-v1"])
    seen = []
    train(
        config_for(2),
        lambda report: seen.append((run_status(tmp_path), read_record(tmp_path))),
        folder=RunFolder(tmp_path),
    )
    status, during = seen[0]
    assert status == during["status"] == "running"
    assert during["ended"] is None
    record = read_record(tmp_path)
    assert (record["status"], record["pid"], record["command"]) == ("finished", os.getpid(), sys.argv)
    assert record["started"] == during["started"] <= record["ended"]
    assert record["machine"]["cpu"]
    assert record["versions"]["torch"]
    assert record["resumed"] is None
    assert run_status(tmp_path) == "finished"


def test_a_stopped_run_says_so_and_continues_its_record(tmp_path):
    def stop(report):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunStopped):
        train(config_for(3), stop, folder=RunFolder(tmp_path))
    started = read_record(tmp_path)["started"]
    assert run_status(tmp_path) == "stopped"
    train(config_for(3), folder=RunFolder(tmp_path))
    record = read_record(tmp_path)
    assert (record["status"], record["started"]) == ("finished", started)
    assert record["resumed"] >= started


def test_an_error_is_noted(tmp_path):
    def fail(report):
        raise ZeroDivisionError("by the user's own callback")

    with pytest.raises(ZeroDivisionError):
        train(config_for(2), fail, folder=RunFolder(tmp_path))
    assert run_status(tmp_path) == "failed"
    assert read_record(tmp_path)["error"] == "ZeroDivisionError: by the user's own callback"


def test_a_second_interrupt_is_no_failure(tmp_path):
    def interrupt(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config_for(2), interrupt, folder=RunFolder(tmp_path))
    assert run_status(tmp_path) == "stopped"


def test_a_killed_process_is_distinguished_from_a_running_one(tmp_path):
    code = """
import sys, time
import canter

def stay(report):
    print("entered", flush=True)
    time.sleep(600)

config = canter.TrainConfig(env=canter.EnvConfig(id="tensor:cartpole"), algorithm=canter.PPOConfig(horizon=8))
canter.train(config, stay, folder=canter.RunFolder(sys.argv[1]), console="quiet")
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "entered\n"
        assert run_status(tmp_path) == "running"
        assert read_record(tmp_path)["pid"] == process.pid
        process.kill()
    assert run_status(tmp_path) == "interrupted"
    assert read_record(tmp_path)["status"] == "running"


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"status": 3}', '{"status": "interrupted"}', "[" * 100_000])
def test_a_record_that_is_missing_or_damaged_is_unknown(text, tmp_path):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert run_status(tmp_path) == "unknown"
    train(config_for(1), folder=RunFolder(tmp_path))
    assert run_status(tmp_path) == "finished"


def test_a_record_that_cannot_be_written_costs_nothing_else(tmp_path, caplog):
    (tmp_path / "run.json").mkdir()
    train(config_for(1), folder=RunFolder(tmp_path))
    assert "run.json could not be written" in caplog.text
    assert RunFolder(tmp_path).store.steps() == [0, 1]


def test_a_score_that_is_no_number_costs_the_score_and_not_the_record(tmp_path, caplog):
    RunRecord(tmp_path).note(status="finished")
    write_score(tmp_path, {"mean": float("nan")})
    assert read_record(tmp_path) == {"status": "finished"}
    assert "could not be written" in caplog.text

"""`canter doctor RUN --try`: the run is left alone, and copies of it are compared."""

import hashlib

import pytest

import canter
from canter.algorithms.doctor.findings import Finding
from canter.app.cli import main
from canter.app.doctor.diagnosis import try_change

FINDING = Finding((), "Too far.", {"algorithm.clip_ratio": 0.2}, rule="large_updates", title="Updates are too large")


def files_of(path):
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def run(tmp_path):
    settings = {"total_steps": 30_000, "algorithm": {"clip_ratio": 5.0}}
    canter.train(
        "CartPole-v1", lambda report: report.iteration < 4, run_dir=tmp_path, name="run", console="quiet",
        final_evaluation=False, **settings,
    )  # fmt: skip
    return tmp_path / "run"


def test_copies_continue_and_the_run_is_left_alone(run):
    before = files_of(run)
    trial = try_change(run, FINDING, iterations=2, seeds=2)
    assert files_of(run) == before
    assert len(trial.changed) == len(trial.without) == 2
    assert trial.changed != trial.without
    assert trial.difference is not None
    fork = run.parent / "run-try" / "changed-0"
    assert "clip_ratio: 0.2" in (fork / "config.yaml").read_text()
    assert len((fork / "metrics.jsonl").read_text().splitlines()) == 6
    assert "run-try/changed-" in trial.go_on


def test_a_change_of_the_networks_is_tried_from_the_start(run):
    finding = Finding((), "Large.", {"algorithm.model.normalize_value": False}, rule="reward_scale", title="Scale")
    trial = try_change(run, finding, iterations=1, seeds=2)
    assert " train --config " in trial.go_on
    assert not (run.parent / "run-try").exists()


def test_the_command_tries_nothing_in_a_healthy_run(run, capsys):
    main(["doctor", str(run), "--try", "1"])
    assert "Nothing to try" in capsys.readouterr().out

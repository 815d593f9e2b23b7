import json

import pytest

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_demo_trains_within_its_seconds_and_names_what_comes_next(empty_folder, run_canter, monkeypatch):
    monkeypatch.setattr("canter.app.experiments.scores.EVAL_EPISODES", 2)
    finished = run_canter("demo", "--seconds", "0.2", "--folder", "first/try")
    assert finished.code == 0, finished.err
    folder = empty_folder / "first" / "try"
    assert f"The report is in {folder.relative_to(empty_folder)}/report.html" in finished.out
    assert (folder / "report.html").is_file()
    assert "Training ended by until.seconds" in finished.out
    for command in ("play first/try", "report first/try --open", "train Pendulum-v1", "envs", "check MODULE:CLASS"):
        assert f"canter {command}" in finished.out
    assert "pip install" not in finished.out, "it can draw here"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_the_demo_names_the_extra_that_draws_where_it_is_missing(run_canter, monkeypatch):
    monkeypatch.setattr("canter.app.cli.training.train_command", lambda arguments: None)
    monkeypatch.setattr("canter.app.cli.training.find_spec", lambda name: None)
    assert 'pip install "canter[video]"' in run_canter("demo").out


def test_the_demo_keeps_a_folder_that_exists(empty_folder, run_canter):
    (empty_folder / "runs" / "demo").mkdir(parents=True)
    finished = run_canter("demo")
    assert finished.code == 2
    assert finished.err.splitlines() == [
        "canter: runs/demo already exists and is kept; to run the demo again: canter demo --folder runs/demo-2"
    ]
    assert not list((empty_folder / "runs" / "demo").iterdir())


def test_the_demo_refuses_a_time_that_is_not_positive(empty_folder, run_canter):
    finished = run_canter("demo", "--seconds", "-1")
    assert finished.code == 2
    assert "until.seconds" in finished.err and "-1" in finished.err
    assert not (empty_folder / "runs").exists()

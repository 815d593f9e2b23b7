import json
import os
import time

import pytest
import yaml

from canter.app.cli import main


def make_run(parent, name, *, record=None, row=None, **settings):
    path = parent / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump({"env": {"id": "CartPole-v1"}, "total_steps": 1000} | settings))
    if record is not None:
        (path / "run.json").write_text(json.dumps(record))
    if row is not None:
        (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return path


@pytest.fixture
def rows(tmp_path, capsys):
    """The table as lists of cells, split where two spaces are."""

    def read(*arguments):
        main(["runs", "--run-dir", str(tmp_path), *arguments])
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]

    return read


def test_runs_are_listed_the_newest_first(tmp_path, rows):
    row = {"env_steps": 500, "return": 12.25, "seconds": 75.0, "wall_time": time.time() - 7300}
    make_run(tmp_path, "older", record={"status": "failed"}, row=row)
    make_run(
        tmp_path, "newer", record={"status": "stopped"}, row=row | {"wall_time": time.time() - 200, "return": None}
    )
    make_run(tmp_path, "silent", record={"status": "finished"})
    os.utime(tmp_path / "silent", (time.time() - 200_000, time.time() - 200_000))
    (tmp_path / "latest").symlink_to("newer")
    (tmp_path / "hall_of_fame").mkdir()
    assert rows() == [
        ["RUN", "ENVIRONMENT", "STATUS", "STEPS", "RETURN", "SCORE", "TIME", "AGE"],
        ["newer", "CartPole-v1", "stopped", "500", "-", "-", "1 min 15 s", "3 min"],
        ["older", "CartPole-v1", "failed", "500", "12.25", "-", "1 min 15 s", "2 h"],
        ["silent", "CartPole-v1", "finished", "-", "-", "-", "-", "2 d"],
    ]


def test_scores_by_long_run_average_are_marked(tmp_path, rows):
    both = {"mean": 250.0, "long_run_average": 2.25}
    make_run(tmp_path, "average", record={"score": both}, algorithm={"objective": "average"})
    make_run(tmp_path, "endless", record={"score": {"long_run_average": 2.25}})
    make_run(tmp_path, "return", record={"score": both})
    assert {cells[0]: cells[5] for cells in rows()[1:]} == {
        "average": "2.25 per time",
        "endless": "2.25 per time",
        "return": "250.0",
    }


def test_a_run_whose_process_died_is_interrupted_and_an_old_one_is_rated_by_its_steps(tmp_path, rows):
    make_run(tmp_path, "died", record={"status": "running"}, row={"env_steps": 5, "wall_time": time.time() - 1})
    make_run(tmp_path, "whole", row={"env_steps": 1000, "wall_time": time.time() - 2})
    make_run(tmp_path, "partial", row={"env_steps": 999, "wall_time": time.time() - 3})
    assert [(cells[0], cells[2]) for cells in rows()[1:]] == [
        ("died", "interrupted"),
        ("whole", "finished"),
        ("partial", "unknown"),
    ]


def test_damaged_folders_are_listed_as_far_as_possible(tmp_path, rows):
    path = make_run(tmp_path, "damaged\x1b[31m", record=[1], env=[1, 2], total_steps="many")
    (path / "metrics.jsonl").write_bytes(b"\xff\x00{")
    (path / "config.yaml").write_bytes(b"env: [")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "config.yaml").mkdir()
    (tmp_path / "file").write_text("")
    assert [cells[:6] for cells in rows()[1:]] == [[r"damaged\x1b[31m", "-", "unknown", "-", "-", "-"]]


def test_json_holds_all_that_is_known(tmp_path, capsys):
    row = {"env_steps": 500, "return": 12.25, "seconds": 75.0, "wall_time": 1000.0}
    path = make_run(tmp_path, "mine", record={"status": "finished"}, row=row, seed=7)
    main(["runs", "--run-dir", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "mine",
            "path": str(path),
            "env": "CartPole-v1",
            "seed": 7,
            "status": "finished",
            "ranks": 1,
            "env_steps": 500,
            "total_steps": 1000,
            "by_average": False,
            "return": 12.25,
            "score": None,
            "seconds": 75.0,
            "updated": 1000.0,
        }
    ]


def test_json_can_be_written_for_any_settings(tmp_path, capsys):
    path = make_run(tmp_path, "dated")
    (path / "config.yaml").write_text("seed: 2001-01-01\ntotal_steps: .nan\nenv: {id: [1]}\n")
    main(["runs", "--run-dir", str(tmp_path), "--json"])
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["seed"], run["env"]) == ("2001-01-01", None)


def test_no_runs_are_no_error_but_a_file_is(tmp_path, capsys):
    main(["runs", "--run-dir", str(tmp_path / "nowhere")])
    assert "No runs under" in capsys.readouterr().out
    main(["runs", "--run-dir", str(tmp_path / "nowhere"), "--json"])
    assert capsys.readouterr().out == "[]\n"
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["runs", "--run-dir", str(tmp_path / "file")])
    assert "is not a folder" in capsys.readouterr().err

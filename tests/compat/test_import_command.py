"""`canter import`, and `canter train` with a parent's file."""

import json

import pytest
import yaml
from theirs import RL_GAMES, RSL_RL, changed, rl_games

from canter.cli import main
from canter.config import TrainConfig
from canter.config_file import read_config


def write(tmp_path, tree, name="theirs.yaml"):
    path = tmp_path / name
    path.write_text(yaml.dump(tree))
    return path


def test_import_writes_settings_that_load_and_a_report(tmp_path, capsys):
    output = tmp_path / "ours.yaml"
    main(["import", str(write(tmp_path, RL_GAMES)), "--output", str(output)])
    assert "Mapped with a difference" in capsys.readouterr().err
    config = read_config(output).over(TrainConfig())
    assert config.algorithm.gamma == 0.98 and config.env.id == "Pendulum-v1"
    report = json.loads((tmp_path / "ours.deviations.json").read_text())
    assert report["dialect"] == "rl_games" and len(report["entries"]) > 30


def test_train_recognises_a_parents_file(tmp_path, capsys):
    file = str(write(tmp_path, RL_GAMES))
    main(["train", "--config", file, "--run-dir", str(tmp_path / "runs"), "--console", "lines", "--seed", "5"])
    printed = capsys.readouterr()
    assert "ended by until.iterations" in printed.out and "rl_games" in printed.err
    assert "imported" in printed.out


def test_rsl_rls_file_needs_an_environment(tmp_path, capsys):
    file = str(write(tmp_path, changed(RSL_RL, {"obs_groups": {}})))
    with pytest.raises(SystemExit):
        main(["train", "--config", file])
    assert f"canter train ENV --config {file}" in capsys.readouterr().err
    main(["train", "Pendulum-v1", "--config", file, "--num-envs", "4", "--dry-run"])
    assert "nothing was trained" in capsys.readouterr().out


def test_refusals_end_with_one_line_and_the_report(tmp_path, capsys):
    file = str(write(tmp_path, rl_games(config__gama=0.9)))
    with pytest.raises(SystemExit) as stopped:
        main(["import", file])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert "Refused (1)" in printed and "did you mean gamma" in printed.splitlines()[-1]
    main(["import", file, "--without", "params.config.gama"])
    with pytest.raises(SystemExit):
        main(["import", file, "--set", "nonsense"])
    assert "expected KEY=VALUE" in capsys.readouterr().err

"""A run remembers which modules its user trusted; nobody else's run does."""

import json
import sys

import gymnasium
import pytest

from canter.app.cli import main
from canter.app.experiments.train import train
from canter.envs import imports
from canter.runs.permissions import IMPORTS, trusted_modules

SOURCE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(gymnasium.wrappers.TimeLimit):
    def __init__(self):
        super().__init__(CartPoleEnv(), 8)
"""
SMALL = ["--total-steps", "64", "--algorithm.horizon", "8", "--algorithm.num-minibatches", "2", "--console", "quiet"]


@pytest.fixture(autouse=True)
def forgotten(tmp_path, monkeypatch):
    """A module of the user's in the current folder, and a function that forgets it as the end of a process does."""

    def forget():
        sys.modules.pop("my_pole", None)
        gymnasium.registry.pop("imported/my_pole.Mine-v0", None)
        imports._allowed.clear()
        imports._factories.clear()

    (tmp_path / "my_pole.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    forget()
    yield forget
    forget()


def test_a_run_of_the_user_needs_permission_once(forgotten, tmp_path, monkeypatch, capsys):
    main(["--allow-import", "my_pole", "train", "my_pole:Mine", *SMALL, "--name", "one"])
    assert "--allow-import" not in capsys.readouterr().out.partition("What next?")[2]
    for command in (["eval", "one", "--episodes", "2"], ["resume", "one", "--total-steps", "128"], ["report", "one"]):
        forgotten()
        main(command)
    monkeypatch.chdir("/")  # the module is found where it was
    forgotten()
    main(["eval", str(tmp_path / "runs" / "one"), "--episodes", "2"])
    assert "return over 2 episodes" in capsys.readouterr().out


def trained(forgotten):
    main(["--allow-import", "my_pole", "train", "my_pole:Mine", *SMALL, "--name", "one"])
    forgotten()


def refused(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "one", "--episodes", "2"])
    assert "my_pole" not in sys.modules
    return "add --allow-import my_pole" in capsys.readouterr().err


def test_a_run_of_somebody_else_is_trusted_with_nothing(forgotten, tmp_path, monkeypatch, capsys):
    trained(forgotten)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    assert refused(capsys)


@pytest.mark.parametrize("key", ["run", "modules"])
def test_a_changed_run_is_not_trusted(forgotten, tmp_path, key, capsys):
    trained(forgotten)
    file = tmp_path / "runs" / "one" / IMPORTS
    content = json.loads(file.read_text())
    assert trusted_modules(file.parent) == {"my_pole": str(tmp_path)}
    content[key] = "another" if key == "run" else {**content["modules"], "os": "/"}
    file.write_text(json.dumps(content))
    assert trusted_modules(file.parent) == {}
    assert refused(capsys)


def test_a_program_that_trains_when_imported_gets_an_error(forgotten, tmp_path):
    (tmp_path / "my_pole.py").write_text(SOURCE + "\nimport canter\ncanter.train(Mine)\n")
    imports.allow_import("my_pole")
    with pytest.raises(RuntimeError, match=r"canter\.train is called while my_pole is imported"):
        train("my_pole:Mine")

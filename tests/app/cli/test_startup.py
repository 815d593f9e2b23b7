"""What is answered at once: help, lists and typos, without torch and from an index that is true."""

import subprocess
import sys

import pytest

from canter.app.cli import COMMANDS
from canter.app.cli.index import FILE
from canter.app.cli.listing import summary_of
from canter.app.cli.make_index import make_index, text_of
from canter.app.experiments.foreign import FOREIGN

LIGHT = [
    ["--help"],
    ["--version"],
    ["envs"],
    ["envs", "cart"],
    ["presets"],
    ["runs"],
    ["trian"],
    ["train", "CartPole-v1", "--algorithm.gama", "0.9"],
    ["train", "CartPol-v1"],
    ["eval", "latest", "--episode", "3"],
]


def test_the_index_is_what_the_code_has():
    assert FILE.read_text() == text_of(make_index()), "run `make index`"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_commands_is_that_of_their_functions(name):
    assert COMMANDS[name].summary == summary_of(COMMANDS[name].load())


@pytest.mark.parametrize("argv", LIGHT, ids=" ".join)
def test_nothing_waits_for_torch(argv, tmp_path):
    code = f"import sys; from canter.app.cli import main\ntry: main({argv})\nfinally: print('torch' in sys.modules)"
    call = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert call.stdout.splitlines()[-1] == "False", call.stderr


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--lr", "--algorithm.optimizer.learning-rate (the same number)"),
        ("--n-steps", "--algorithm.horizon"),
        ("--batch_size", "--algorithm.num-minibatches (minibatches of a rollout: horizon x num_envs / batch size)"),
        ("--ent-coef", "--algorithm.entropy-coef"),
        ("--num-steps-per-env", "--algorithm.horizon"),
    ],
)
def test_names_of_other_libraries_are_answered(flag, answer, tmp_path):
    call = [sys.executable, "-m", "canter", "train", "CartPole-v1", flag, "3"]
    refused = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert refused.returncode == 2
    assert f"here it is {answer}" in refused.stderr


def test_every_answer_about_other_libraries_is_a_flag_here():
    flags = {*make_index()["flags"]["train"]}
    assert {f"--{name}" for name, _ in FOREIGN.values()} <= flags

"""Help, lists and typos are answered without torch, from a cached index that is true and may fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from canter.app.cli import COMMANDS
from canter.app.cli import index as index_module
from canter.app.cli.index import (
    cache_file,
    cache_key,
    cached_index,
    read_index,
    registered_in_source,
    sections,
    summary_of,
)
from canter.app.cli.parser import Parser
from canter.app.experiments.foreign import FOREIGN, PYTHON_ONLY

LIGHT = [
    ["--help"],
    ["--version"],
    ["envs"],
    ["envs", "cart"],
    ["presets"],
    ["runs"],
    ["trian"],
    ["train", "--help"],
    ["eval", "--help"],
    ["train", "CartPole-v1", "--algorithm.gama", "0.9"],
    ["train", "CartPol-v1"],
    ["eval", "latest", "--episode", "3"],
]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """The environment of a process with a cached index."""
    folder = tmp_path_factory.mktemp("cache")
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    canter([["presets"]], environment)
    return environment


PROGRAM = """
import json, sys
from canter.app.cli import main
for argv in json.loads(sys.argv[1]):
    try: main(argv)
    except SystemExit: pass
    if "torch" in sys.modules: sys.exit(f"torch was imported for {argv}")
"""


def canter(commands, environment, **options):
    """Run commands in another process until one of them imports torch."""
    call = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    return subprocess.run(call, capture_output=True, text=True, env=environment, timeout=120, **options)


def test_nothing_waits_for_torch(cached, tmp_path):
    call = canter(LIGHT, cached, cwd=tmp_path)
    assert call.returncode == 0, call.stderr
    assert "did you mean train" in call.stderr and "did you mean --episodes" in call.stderr


def test_help_without_a_cache_does_not_wait_for_torch_either(tmp_path):
    call = canter([["train", "--help"], ["eval", "--help"]], os.environ | {"XDG_CACHE_HOME": str(tmp_path)})
    assert call.returncode == 0, call.stderr
    assert call.stdout.count("--seed") >= 2


def test_the_help_has_the_cached_index_s_words(cached, monkeypatch):
    (file,) = (Path(cached["XDG_CACHE_HOME"]) / "canter").iterdir()
    stored = json.loads(file.read_text())["index"]
    assert stored["algorithms"] == registered_in_source()
    for command in COMMANDS.values():
        short = {} if command.settings is None else command.settings.short
        for key, metavar, _ in short.values():
            assert metavar == stored["settings"][key]


def test_the_cache_holds_what_is_registered(cached):
    (file,) = (Path(cached["XDG_CACHE_HOME"]) / "canter").iterdir()
    stored = json.loads(file.read_text())["index"]
    assert stored == json.loads(json.dumps({section: compute() for section, compute in sections().items()}))


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Reads the index in this process as if Canter were not imported whole; counts how often it is computed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    computed = []
    section = {"presets": lambda: computed.append(1) or [["a", "b", 1]]}
    monkeypatch.setattr(index_module, "sections", lambda: section)

    def read():
        cached_index.cache_clear()
        return cached_index(), len(computed)

    yield read
    cached_index.cache_clear()


def test_the_index_is_computed_once(fresh):
    assert fresh() == ({"presets": [["a", "b", 1]]}, 1)
    assert fresh() == ({"presets": [["a", "b", 1]]}, 1)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"key": "another", "index": {}}', '{"key": KEY, "index": 3}']
)
def test_a_damaged_or_outdated_cache_is_rebuilt(content, fresh):
    fresh()
    cache_file().write_text(content.replace("KEY", json.dumps(cache_key())))
    assert fresh() == ({"presets": [["a", "b", 1]]}, 2)
    assert fresh()[1] == 2


def test_a_cache_that_cannot_be_written_is_ignored(fresh, tmp_path, monkeypatch):
    (tmp_path / "canter").write_text("a file where the folder should be")
    assert fresh()[1] == 1
    assert fresh() == ({"presets": [["a", "b", 1]]}, 2)


def test_the_cache_depends_on_sources_and_plugins(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("a = 1")
    monkeypatch.setattr(index_module, "PACKAGE", package)
    key = cache_key()
    assert cache_key() == key
    (package / "module.py").write_text("a = 12")
    assert cache_key() != key


def test_a_program_that_registers_more_is_not_answered_from_the_cache():
    assert "CartPole" in {name for name, *_ in read_index("presets")}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_function_with_its_summary(name):
    from canter.app.cli import load_function

    assert summary_of(load_function(COMMANDS[name])) == COMMANDS[name].summary


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--lr", "--algorithm.optimizer.learning-rate (the same number)"),
        ("--n-steps", "--algorithm.horizon"),
        ("--batch_size", "--algorithm.num-minibatches (minibatches of a rollout: horizon x num_envs / batch size)"),
        ("--ent-coef", "--algorithm.entropy-coef"),
        ("--num-steps-per-env", "--algorithm.horizon"),
        ("--policy", "--algorithm.model.policy.hidden"),
        ("--policy-kwargs", "--algorithm.model.policy.hidden"),
        ("--callback", "on_iteration (a function, or callbacks=[...] for canter.Callback; in Python only)"),
    ],
)
def test_names_of_other_libraries_are_answered(flag, answer, run_canter, empty_folder):
    refused = run_canter("train", "CartPole-v1", flag, "3")
    assert refused.code == 2
    assert f"here it is {answer}" in refused.err


def test_every_answer_about_other_libraries_is_a_flag_here():
    parser = Parser("train", COMMANDS["train"])
    flags = [name for name, remark in FOREIGN.values() if not remark.endswith(PYTHON_ONLY)]
    assert [name for name in flags if not parser.knows(f"--{name}")] == []

"""Errors on the command line: one line for a mistake of the user, a traceback file for a mistake in Canter."""

import errno
from pathlib import Path

import pytest
import torch

from canter.app import cli
from canter.core.plain import ConfigError
from canter.core.registry import Registry, UserError
from canter.core.storage.lock import RunLocked
from canter.runs.records import TRACEBACK_IN

MISSING = ModuleNotFoundError("No module named 'optuna'", name="optuna")


@pytest.fixture
def fail(monkeypatch, capsys):
    """Returns the exit code and the error line of a command that raises."""

    def run(error):
        def command(argv):
            raise error

        monkeypatch.setattr(cli, "dispatch", command)
        with pytest.raises(SystemExit) as leaving:
            cli.main([])
        return leaving.value.code, capsys.readouterr().err

    return run


def unknown_name():
    try:
        return Registry("thing")["x"]
    except KeyError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        UserError("num_envs=0 must be at least 1"),
        ConfigError("seed: expected an integer", "seed"),
        cli.UsageError("unknown flag --x"),
        RunLocked(Path("runs/one/run.lock"), None, "wait"),
        OSError(errno.ENOSPC, "No space left on device"),
        FileNotFoundError(errno.ENOENT, "No such file", "policy.safetensors"),
        ImportError('videos need further packages: pip install "canter[video]"'),
        MISSING,
        unknown_name(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_mistake_of_the_user_is_one_line(error, fail):
    assert fail(error) == (2, f"canter: {error}\n")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("policy"),
        ValueError("not enough values to unpack (expected 2, got 1)"),
        OSError("could not get source code"),
        ImportError("cannot import name 'play' from 'canter.play'", name="canter.play"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("shared memory manager: connection reset"),
    ],
    ids=str,
)
def test_a_mistake_in_canter_has_its_traceback_in_a_file(error, fail):
    code, line = fail(error)
    assert code == 1
    assert type(error).__name__ in line and line.count("\n") == 1
    file = Path(line.strip().rpartition("The traceback is in ")[2])
    try:
        assert "Traceback (most recent call last)" in file.read_text()
    finally:
        file.unlink()


def test_a_run_that_has_kept_the_traceback_keeps_the_only_one(fail, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = KeyError("mine")
    error.add_note(f"3 iterations are saved. {TRACEBACK_IN} runs/run/traceback.txt")
    code, line = fail(error)
    assert code == 1 and line.count("traceback") == 2 and line.endswith("The traceback is in runs/run/traceback.txt\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_reported_as_such(error, fail):
    code, line = fail(error)
    assert code == 2
    assert line.startswith("canter: there is not enough memory for this: ")

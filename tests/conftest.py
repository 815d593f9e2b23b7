"""Fixtures that all tests share. Its place also lets tests of every folder import the modules next to it.

The process that hands out the tests reads this file too, and runs none: torch is imported in fixtures, not here.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from importlib import import_module
from typing import NamedTuple

import pytest

# Runs that may import something are signed with a secret of the user's, which tests have no business with.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="canter-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# Commands in other processes share one index of the sources as they are now.
os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"]

# No test cuts the power, and files outlive processes that are killed: nothing waits for the disk. A descriptor is
# looked at, so that a wrong one still is an error.
os.fsync = os.fstat

LEFT_OUT = pytest.StashKey[int]()
"""Number of tests that the selection by marks leaves out."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Let torch use one thread: networks this small only lose by sharing the work, most of all beside other tests."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restored_process(monkeypatch):
    """Restore what commands and runs change of the process: permissions, threads, signals and search path."""
    import torch

    from canter.envs import imports

    monkeypatch.setattr(imports, "_allowed", imports.allowed_imports())
    monkeypatch.setattr(imports, "_factories", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    torch.set_num_threads(1)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Make an empty folder the current one; runs leave folders behind."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def restored_registries(monkeypatch):
    """Undo the registrations of a test that imports its module `my_parts`."""
    import gymnasium

    from canter.core.registry import registries

    import_module("canter.app.api")  # makes all registries
    before = dict(gymnasium.registry)
    for registry in registries.values():
        monkeypatch.setattr(registry, "_items", registry.items())
    yield
    sys.modules.pop("my_parts", None)
    for name in gymnasium.registry.keys() - before.keys():
        del gymnasium.registry[name]


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_canter(capsys):
    """Return a function that runs a command in this process, where torch is loaded already."""

    def run(*arguments):
        from canter.app.cli import main

        capsys.readouterr()
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return Finished(code, *capsys.readouterr())

    return run


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Leave imported modules and listed tests out of garbage collections, now and later: these objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_deselected(items):
    """Count what the selection leaves out; each worker sees all tests."""
    if items:
        config = items[0].config
        config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session):
    """Tell the process that started this worker."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the number from a worker; it is the same for all."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Say what was left out and how to run it."""
    left_out = config.stash.get(LEFT_OUT, 0)
    if left_out and "not long" in config.option.markexpr:
        terminalreporter.write_line(f"{left_out} long tests were left out; to run everything: make test-all")

"""A user in an empty folder, who types commands and runs programs."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class User:
    """Whoever walks the path."""

    folder: Path
    run_canter: Callable[..., Any]

    def types(self, *argv):
        """Run a command that works; return its output."""
        code, text = self.tries(*argv)
        assert code == 0, text
        return text

    def tries(self, *argv):
        """A command that may be refused: exit code and all that it said. In this process, for torch is here already."""
        code, out, err = self.run_canter(*argv)
        return int(code), out + err

    def writes(self, name, text):
        (self.folder / name).write_text(text)

    def runs(self, *argv):
        """Run a program or module in a separate process; return its output."""
        command = [sys.executable, *map(str, argv)]
        ran = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.fixture
def user(tmp_path, monkeypatch, run_canter):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    yield User(tmp_path, run_canter)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]

"""A user in an empty folder, who types commands and runs programs."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from canter.app.cli import main


@dataclass
class User:
    """Whoever walks the path."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def types(self, *argv):
        """A command that works; gives what it said."""
        code, text = self.tries(*argv)
        assert code == 0, text
        return text

    def tries(self, *argv):
        """A command that may be refused: exit code and all that it said. In this process, for torch is here already."""
        self.capsys.readouterr()
        try:
            main([str(part) for part in argv])
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = self.capsys.readouterr()
        return code, out + err

    def writes(self, name, text):
        (self.folder / name).write_text(text)

    def runs(self, *argv):
        """A program or module in a process of its own; gives what it printed."""
        command = [sys.executable, *map(str, argv)]
        ran = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.fixture
def user(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules, threads = set(sys.modules), torch.get_num_threads()
    yield User(tmp_path, capsys)
    torch.set_num_threads(threads)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]

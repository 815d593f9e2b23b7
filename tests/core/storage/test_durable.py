import errno
import os
import subprocess
import sys

import pytest

from canter.core.storage.files import replace_file

DRIVER = """
import os, signal, sys
from pathlib import Path
from canter.core.storage.files import replace_file

os.fsync = os.fstat  # what is written outlives a killed process

def hook(name, kill_at, after):
    original = getattr(os, name)
    def counted(*args, **kwargs):
        global calls
        calls += 1
        mine = calls == kill_at
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return original(*args, **kwargs)
        finally:
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, counted)

for after in (False, True):
    kill_at = 0
    while True:
        kill_at += 1
        best = Path(sys.argv[1]) / f"{after}-{kill_at}" / "best"
        best.parent.mkdir()
        replace_file(best, b"old")
        pid = os.fork()
        if pid == 0:
            calls = 0
            for name in ("open", "fsync", "rename", "unlink"):
                hook(name, kill_at, after)
            replace_file(best, b"new")
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
"""


def test_killed_anywhere_a_file_is_the_old_one_or_the_new_one(tmp_path):
    subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)], check=True, timeout=300)
    found = []
    for folder in sorted(tmp_path.iterdir()):
        found.append((folder / "best").read_bytes())
        replace_file(folder / "best", b"next")
        assert os.listdir(folder) == ["best"]
        assert (folder / "best").read_bytes() == b"next"
    assert len(found) > 10
    assert set(found) == {b"old", b"new"}


@pytest.mark.parametrize("call", ["open", "fsync", "rename"])
def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(call, tmp_path, monkeypatch):
    replace_file(tmp_path / "best", b"old")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "best", b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["best"]
    assert (tmp_path / "best").read_bytes() == b"old"


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_the_umask_says_who_may_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        replace_file(tmp_path / "best", b"x")
        replace_file(tmp_path / "secret", b"x", 0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "best").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600

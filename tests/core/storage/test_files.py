"""Limits, exclusive creation and durability of files."""

import errno
import os

import pytest

from canter.core.storage.files import Unreadable, append, read_untrusted, write_synced


def test_a_file_of_exactly_the_allowed_size_is_read_and_a_larger_one_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_untrusted(path, limit=5) == b"12345"
    with pytest.raises(Unreadable, match="has 5 bytes, more than the 4 allowed"):
        read_untrusted(path, limit=4)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    (folder / "link").symlink_to(outside)
    with pytest.raises(Unreadable, match="link out of"):
        read_untrusted(folder / "link", limit=100, within=folder)


def test_a_new_file_does_not_overwrite_another(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_synced(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_new_file_is_complete_when_it_is_synced(tmp_path, monkeypatch):
    path = tmp_path / "file"
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, path.read_bytes())))
    write_synced(path, [b"one", b"two"])
    assert synced == [(path.stat().st_ino, b"onetwo")]


def test_what_a_failed_append_wrote_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_bytes(b"first\n")
    write = os.write

    def half_then_full(fd, data):
        if len(data) < len(b"second\n"):
            raise OSError(errno.ENOSPC, "no space left")
        return write(fd, bytes(data[:3]))

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(OSError, match="no space left"):
        append(path, b"second\n")
    assert path.read_bytes() == b"first\n"

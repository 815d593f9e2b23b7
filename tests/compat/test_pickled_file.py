"""Checkpoints of the source libraries are pickles; no code in them is run."""

import os
import shutil
from collections import deque
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import numpy as np
import pytest
import torch
from malicious import files, raw_files

from canter.compat import pickled_file
from canter.compat.pickled_file import CheckpointRefused, read_pickled


def test_fifty_kinds_of_pickles_are_refused_and_none_is_run(tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "files").mkdir()
    kinds = [*files(tmp_path / "files", trace), *raw_files(tmp_path / "files", trace)]
    assert len(kinds) >= 50
    before = set(os.listdir(tmp_path))
    for path in kinds:
        with pytest.raises(CheckpointRefused, match="cannot be imported"):
            read_pickled(path)
    assert set(os.listdir(tmp_path)) == before, "something left a trace"


def test_the_refusal_names_what_would_have_been_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save({"model_state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointRefused, match=r"posix\.system.*nothing was run"):
        read_pickled(tmp_path / "evil.pt")


def test_tensors_numbers_and_numpys_numbers_are_read(tmp_path):
    tree = {"a": torch.ones(2), "b": [1, 2.5, None, "x", True], "c": np.float32(3.0), "d": np.float64(4.0)}
    torch.save(tree, tmp_path / "fine.pt")
    read = read_pickled(tmp_path / "fine.pt")
    assert read["b"] == [1, 2.5, None, "x", True] and (read["c"], read["d"]) == (3.0, 4.0)
    assert type(read["d"]) is float and torch.equal(read["a"], torch.ones(2))


def test_what_environments_keep_is_read(tmp_path):
    tree = {"model": {"w": torch.ones(2)}, "env_state": {
        "levels": np.arange(4), "last": deque([1.0, 2.0], maxlen=5), "log": tmp_path / "log",
        "begun": datetime(2026, 1, 2, tzinfo=UTC), "time": timedelta(seconds=3), "flags": np.array([True, False]),
    }}  # fmt: skip
    torch.save(tree, tmp_path / "file.pt")
    state = read_pickled(tmp_path / "file.pt")["env_state"]
    assert np.array_equal(state["levels"], np.arange(4)) and state["flags"].tolist() == [True, False]
    assert state["last"] == [1.0, 2.0] and state["log"] == str(tmp_path / "log")
    assert (state["begun"], state["time"]) == ("2026-01-02 00:00:00+00:00", "0:00:03")


class Curriculum:
    def __init__(self):
        self.level = 3


def test_unknown_objects_of_the_environment_are_skipped_and_named(tmp_path, caplog):
    state = {"level": 3, "own": Curriculum(), "list": [1, Fraction(1, 2)], "class": Curriculum, "z": 1j}
    torch.save({"model": torch.ones(2), "env_state": state, "infos": Curriculum()}, tmp_path / "file.pt")
    tree = read_pickled(tmp_path / "file.pt")
    assert tree["env_state"] == {"level": 3, "list": [1, None]} and "infos" not in tree
    assert torch.equal(tree["model"], torch.ones(2))
    assert (
        "skipped env_state.own (a test_pickled_file.Curriculum), env_state.list[1] (a fractions.Fraction)"
        in caplog.text
    )
    assert "env_state.z (a builtins.complex)" in caplog.text


def test_what_would_run_below_env_state_is_not_run(tmp_path, caplog):
    (tmp_path / "folder").mkdir()

    class Evil:
        def __reduce__(self):
            return shutil.rmtree, (str(tmp_path / "folder"),)

    torch.save({"a": 1, "env_state": Evil()}, tmp_path / "evil.pt")
    assert read_pickled(tmp_path / "evil.pt") == {"a": 1}
    assert "env_state (a shutil.rmtree)" in caplog.text and (tmp_path / "folder").exists()


@pytest.mark.parametrize("key", ["model", "infos_of_mine"])
def test_unknown_objects_elsewhere_refuse_the_file(tmp_path, key):
    torch.save({key: [Curriculum()]}, tmp_path / "file.pt")
    with pytest.raises(CheckpointRefused, match=r"build test_pickled_file\.Curriculum.*nothing was run"):
        read_pickled(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": torch.tensor([1.0, float("nan")])}, r"\.a holds NaN"),
        ({"a": {"b": torch.complex(torch.tensor(1.0), torch.tensor(2.0)).to(torch.complex64)}}, "real numbers"),
        ([1, 2], "expected a mapping, found a list"),
        ({"a": np.ones(3, complex)}, "wants to run or build|is not a file"),
        ({"a": {"b": Fraction(1, 2)}}, r"fractions\.Fraction.*nothing was run"),
    ],
)
def test_other_contents_are_refused(tmp_path, tree, words):
    torch.save(tree, tmp_path / "file.pt")
    with pytest.raises(CheckpointRefused, match=words):
        read_pickled(tmp_path / "file.pt")


def test_places_and_sizes(tmp_path, monkeypatch):
    with pytest.raises(CheckpointRefused, match="no such file"):
        read_pickled(tmp_path / "absent.pt")
    with pytest.raises(CheckpointRefused, match="regular file"):
        read_pickled(tmp_path)
    torch.save({"a": torch.zeros(10_000)}, tmp_path / "large.pt")
    monkeypatch.setattr(pickled_file, "MAX_BYTES", 10_000)
    with pytest.raises(CheckpointRefused, match="more than 10,000 bytes"):
        read_pickled(tmp_path / "large.pt")

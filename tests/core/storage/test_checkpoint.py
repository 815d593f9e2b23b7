import errno
import logging
import math
import os
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.storage import checkpoint
from canter.core.storage.checkpoint import (
    FILES,
    CheckpointCorrupt,
    CheckpointStore,
    NoCheckpoint,
    load_checkpoint,
    save_checkpoint,
)

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.uint64, torch.bfloat16]
DTYPES += [torch.float16, torch.float32, torch.float64, torch.complex64]
TREE = {
    "model": {"a.weight": torch.arange(12.0).reshape(3, 4), "a/b": torch.tensor(7)},
    "rng": np.random.PCG64(3).state,
    "counts": [1, 2.5, None, True, "text"],
}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(left, right):
    if type(left) is not type(right):
        return False
    match left:
        case torch.Tensor():
            return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
        case dict():
            return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        case list() | tuple():
            return len(left) == len(right) and all(map(same, left, right))
        case float():
            return struct.pack("d", left) == struct.pack("d", right)
    return left == right


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = torch.empty(shape, dtype=dtype).nbytes
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


KEYS = st.text(max_size=6) | st.sampled_from(["a/b", "a~1b", "a", "b", "__metadata__", "\ud800", "\\ud800", "..", ""])
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.text() | tensors()
)
NODES = st.recursive(
    LEAVES,
    lambda node: st.lists(node, max_size=3) | st.lists(node, max_size=3).map(tuple) | st.dictionaries(KEYS, node),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(tree=st.dictionaries(KEYS, NODES, max_size=4))
def test_any_tree_comes_back_to_the_bit(tree):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        save_checkpoint(path, tree)
        assert same(load_checkpoint(path), tree)
        assert {file.name for file in path.iterdir()} == FILES
        assert [file.name for file in Path(folder).iterdir()] == ["saved"]


def test_a_key_with_a_slash_is_not_a_nested_one(tmp_path):
    tree = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a~1b": torch.full((1,), 2.0)}
    save_checkpoint(tmp_path / "saved", tree)
    assert same(load_checkpoint(tmp_path / "saved"), tree)


def test_views_and_shared_memory_load_as_separate_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    save_checkpoint(
        tmp_path / "saved", {"whole": base, "same": base, "row": base[1], "turned": base.T, "one": base[2, 3]}
    )
    loaded = load_checkpoint(tmp_path / "saved")
    assert torch.equal(loaded["turned"], base.T)
    assert float(loaded["one"]) == 11
    loaded["row"].zero_()
    assert torch.equal(loaded["whole"], base)


@pytest.mark.parametrize("tree", [{"a": object()}, {"a": np.zeros(2)}, {1: 2}, [1], {"a": {1, 2}}, {"a": b"bytes"}])
def test_values_that_could_not_be_loaded_are_refused(tree, tmp_path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "saved", tree)
    assert not list(tmp_path.iterdir())


def test_a_tree_nested_without_end_is_refused(tmp_path):
    tree = {}
    tree["a"] = tree
    with pytest.raises(ValueError, match="nested deeper"):
        save_checkpoint(tmp_path / "saved", tree)


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_the_umask_says_who_may_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "saved", TREE)
    finally:
        os.umask(before)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o777 & ~umask
    assert all(file.stat().st_mode & 0o777 == 0o666 & ~umask for file in (tmp_path / "saved").iterdir())


def test_an_existing_checkpoint_is_replaced_only_on_demand(tmp_path):
    path = tmp_path / "saved"
    save_checkpoint(path, {"a": 1})
    with pytest.raises(FileExistsError):
        save_checkpoint(path, {"a": 2})
    assert load_checkpoint(path) == {"a": 1}
    save_checkpoint(path, {"a": 2}, replace=True)
    assert load_checkpoint(path) == {"a": 2}
    assert os.listdir(tmp_path) == ["saved"]


def test_a_replacement_that_fails_puts_the_old_checkpoint_back(tmp_path, monkeypatch):
    path, rename = tmp_path / "saved", os.rename
    save_checkpoint(path, {"a": 1})

    def failing(source, target):
        if "partial" in Path(source).name:
            raise OSError(errno.EIO, "injected")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="injected"):
        save_checkpoint(path, {"a": 2}, replace=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["saved"]
    assert load_checkpoint(path) == {"a": 1}


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not a checkpoint"):
        save_checkpoint(tmp_path / "thesis", TREE, replace=True)
    assert (tmp_path / "thesis" / "chapter").exists()


def flip(path):
    file = path / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def test_the_last_few_and_the_marked_ones_are_kept(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    for step in range(1, 8):
        store.save(step, {"step": step}, keep=step in (2, 3))
    assert store.steps() == [2, 3, 6, 7]
    assert store.load_latest() == (7, {"step": 7})
    assert (store.folder / "step-000000000007").is_dir()
    CheckpointStore(store.folder, keep_last=1).save(8, {"step": 8})
    assert store.steps() == [2, 3, 8]
    kept = [f"step-{step:012d}{end}" for step in (2, 3) for end in ("", ".keep")]
    assert sorted(os.listdir(store.folder)) == [*kept, "step-000000000008"]


def test_later_steps_of_an_abandoned_run_do_not_push_out_new_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        store.save(step, {})
    resumed = [4, 5, 6]  # from a checkpoint of another folder
    kept = [(store.save(step, {}), store.steps())[1] for step in resumed]
    assert kept == [[4, 20, 30], [4, 5, 20, 30], [5, 6, 20, 30]]


def test_bytes_that_change_on_their_way_to_the_disk_are_found_at_once(tmp_path, monkeypatch):
    write = checkpoint.write_synced

    def damaging(path, data):
        write(path, data.replace(b"\x00\x00\x80\x3f", b"\x00\x00\x80\x40"))  # 1.0 becomes 4.0

    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, {"t": torch.ones(2)})
    monkeypatch.setattr(checkpoint, "write_synced", damaging)
    with pytest.raises(CheckpointCorrupt, match=r"tensors.safetensors has another sha256"):
        store.save(2, {"t": torch.ones(2)})
    assert 1 in store.steps()


def test_the_same_step_may_be_saved_again(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(5, {"a": 1})
    store.save(5, {"a": 2})
    assert store.load_latest() == (5, {"a": 2})


def test_a_corrupt_checkpoint_is_skipped_and_named(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"step": step, "t": torch.zeros(9)})
    flip(store.path(3))
    (store.path(2) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert store.load_latest()[0] == 1
    assert str(store.path(3)) in caplog.text
    assert str(store.path(2)) in caplog.text
    # What comes after does not push out the only good one in favour of corrupt ones.
    store.save(2, {"step": 2})
    assert store.load_latest()[0] == 2


def test_without_a_usable_checkpoint_the_error_says_so(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    with pytest.raises(NoCheckpoint, match="there is none"):
        store.load_latest()
    store.save(1, {"t": torch.zeros(9)})
    flip(store.path(1))
    with pytest.raises(NoCheckpoint, match=r"step-000000000001: tensors.safetensors has another sha256"):
        store.load_latest()


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_leaves_the_older_ones(call, code, tmp_path, monkeypatch):
    store, original, calls = CheckpointStore(tmp_path, keep_last=1), getattr(os, call), []
    store.save(1, {"a": 1})
    for fail_at in range(1, 8):

        def failing(*args, fail_at=fail_at, **kwargs):
            calls.append(args)
            if len(calls) == fail_at:
                raise OSError(code, "injected")
            return original(*args, **kwargs)

        calls.clear()
        step, before = fail_at + 1, store.steps()[-1]
        monkeypatch.setattr(os, call, failing)
        try:
            store.save(step, {"a": step})
            allowed = (step,)
        except OSError as error:
            assert error.errno == code
            allowed = (before, step)  # the latter if only making the rename last was refused
        monkeypatch.undo()
        latest, tree = store.load_latest()
        assert tree == {"a": latest}
        assert latest in allowed
        assert not list(tmp_path.glob(".*partial*"))


def test_a_file_that_cannot_be_written_whole_leaves_the_older_ones(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.save(2, {"a": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["step-000000000001"]
    assert store.load_latest() == (1, {"a": 1})


WRITER = """
import os, signal, sys
from pathlib import Path
import torch
from canter.core.storage.checkpoint import CheckpointStore

os.fsync = os.fstat  # what is written outlives a killed process
store, calls, kill_at, steps = CheckpointStore(Path(sys.argv[1]), keep_last=1), 0, int(sys.argv[2]), [int(sys.argv[3])]

def hook(name, after):
    original = getattr(os, name)
    def counted(*args, **kwargs):
        global calls
        calls += 1
        if calls == kill_at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == kill_at and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(os, name, counted)

store.save(1, {"step": 1, "t": torch.full((100,), 1.0)})
for name in ("fsync", "rename", "unlink", "rmdir", "open"):
    hook(name, after=sys.argv[4] == "after")
for step in steps:
    store.save(step, {"step": step, "t": torch.full((100,), float(step))})
print(calls)
"""


@pytest.mark.parametrize(
    "steps", ["2", pytest.param("1", marks=pytest.mark.long)], ids=["another step", "the same step"]
)
def test_killed_anywhere_in_a_save_the_store_can_be_used(steps, tmp_path):
    """A fork of one prepared process for each moment; starting Python each time would take a hundred times as long."""
    driver = f"""
import os, sys
import canter.core.storage.checkpoint
writer = compile({WRITER!r}, "writer", "exec")
for when in ("before", "after"):
    kill_at = 0
    while True:
        kill_at += 1
        pid = os.fork()
        if pid == 0:
            sys.argv = ["writer", f"{{sys.argv[1]}}/{{when}}-{{kill_at}}", str(kill_at), {steps!r}, when]
            exec(writer, {{}})
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
"""
    subprocess.run([sys.executable, "-c", driver, str(tmp_path)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    killed = sorted(tmp_path.iterdir())
    assert len(killed) > 20
    for folder in killed:
        store = CheckpointStore(folder, keep_last=1)
        step, tree = store.load_latest()
        assert tree["step"] == step
        assert torch.equal(tree["t"], torch.full((100,), float(step)))
        store.save(3, {"step": 3})
        assert store.load_latest()[0] == 3
        assert os.listdir(folder) == ["step-000000000003"]


def test_scratch_of_running_processes_and_other_machines_is_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    living = tmp_path / f".step-000000000009.partial-{checkpoint._HOST}-{os.getppid()}-0123abcd-0"
    foreign = tmp_path / ".step-000000000009.partial-elsewhere-1-0123abcd-0"
    earlier = tmp_path / f".step-000000000009.partial-{checkpoint._HOST}-{os.getpid()}-0123abcd-0"
    for path in (living, foreign, earlier):
        path.mkdir()
    store.save(2, {})
    assert living.is_dir()
    assert foreign.is_dir()
    assert not earlier.exists()  # of a process that had this number before


def test_floats_keep_their_sign_and_kind(tmp_path):
    numbers = [-0.0, math.nan, -math.nan, -math.inf, 5e-324, 1.0]
    save_checkpoint(tmp_path / "saved", {"a": numbers})
    assert same(load_checkpoint(tmp_path / "saved"), {"a": numbers})

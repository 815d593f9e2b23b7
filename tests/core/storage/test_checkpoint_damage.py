"""Reading a damaged checkpoint returns the saved state or raises one error that names the damage."""

import hashlib
import json
import os
import pickle
import random
import shutil
import struct

import numpy as np
import pytest
import torch

from canter.core.storage.checkpoint import FILES, CheckpointCorrupt, load_checkpoint, save_checkpoint

TREE = {
    "model": {"a.weight": torch.arange(12.0).reshape(3, 4), "a/b": torch.tensor(7)},
    "rng": np.random.PCG64(3).state,
    "counts": [1, 2.5, None, True, "text"],
}


def truncate(path):
    file = path / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = path / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def swap(path):
    save_checkpoint(path.with_name("other"), {**TREE, "counts": [2, 2.5, None, True, "text"]})
    shutil.copy(path.with_name("other") / "state.json", path / "state.json")


def link_file(path):
    shutil.move(path / "state.json", path.with_name("elsewhere"))
    (path / "state.json").symlink_to(path.with_name("elsewhere"))


def link_folder(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path):
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")


def manifest(change):
    def damage(path):
        content = json.loads((path / "manifest.json").read_text())
        change(content)
        (path / "manifest.json").write_text(json.dumps(content))

    return damage


def forge(path, name, data):
    """Other content under a right manifest: a file made to harm rather than damaged."""
    (path / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest(lambda content: content["files"].update({name: entry}))(path)


def state(text):
    return lambda path: forge(path, "state.json", text.encode())


DAMAGES = {
    "truncated": truncate,
    "bit flipped": flip,
    "file missing": lambda path: (path / "state.json").unlink(),
    "manifest missing": lambda path: (path / "manifest.json").unlink(),
    "all missing": lambda path: [file.unlink() for file in path.iterdir()],
    "folder missing": shutil.rmtree,
    "extra file": lambda path: (path / "more.bin").write_text("x"),
    "swapped file": swap,
    "linked file": link_file,
    "linked folder": link_folder,
    "pipe": pipe,
    "empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "huge manifest": lambda path: (path / "manifest.json").write_text(" " * 100_000),
    "nested manifest": lambda path: (path / "manifest.json").write_text("[" * 2000 + "]" * 2000),
    "newer schema": manifest(lambda content: content.update(schema=2)),
    "boolean schema": manifest(lambda content: content.update(schema=True)),
    "leads out of the folder": manifest(lambda c: c["files"].update({"../x": c["files"].pop("state.json")})),
    "huge size": manifest(lambda content: content["files"]["state.json"].update(size=1 << 60)),
    "state nested": state("[" * 100_000),
    "state nested a little less": state('{"schema":1,"tree":' + '["list",[' * 90 + "]]" * 90 + "}"),
    "state of unknown kind": state('{"schema":1,"tree":["call",["os","abort"]]}'),
    "state without tensors": state('{"schema":1,"tree":["dict",{}]}'),
    "state with long number": state('{"schema":1,"tree":' + "9" * 10_000 + "}"),
    "state with NaN": state('{"schema":1,"tree":["dict",{"a":NaN}]}'),
    "state of other tensors": state('{"schema":1,"tree":["dict",{"a":["tensor","/b"]}]}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_and_named(damage, tmp_path):
    path = tmp_path / "saved"
    save_checkpoint(path, TREE)
    damage(path)
    with pytest.raises(CheckpointCorrupt) as caught:
        load_checkpoint(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    assert caught.value.reason


def test_200_corruptions_are_all_found(tmp_path):
    path, rng = tmp_path / "saved", random.Random(0)
    save_checkpoint(path, TREE)
    originals = {name: (path / name).read_bytes() for name in sorted(FILES)}
    for _ in range(200):
        name = rng.choice(sorted(FILES))
        data = bytearray(originals[name])
        kind = rng.randrange(4)
        at = rng.randrange(len(data))
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(64))
        elif kind == 2:
            del data[at:]
        else:
            data[at:at] = bytes(rng.randrange(1, 64))
        if data == originals[name]:
            continue
        (path / name).write_bytes(data)
        with pytest.raises(CheckpointCorrupt):
            load_checkpoint(path)
        (path / name).write_bytes(originals[name])
    loaded = load_checkpoint(path)
    assert loaded["rng"] == TREE["rng"]
    assert torch.equal(loaded["model"]["a.weight"], TREE["model"]["a.weight"])


def test_a_forged_header_of_tensors_is_refused(tmp_path):
    for header in [b"{}", b"[]", b'{"/a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}', b"{" * 5000]:
        for claimed in (len(header), 1 << 62, 0):
            path = tmp_path / "saved"
            save_checkpoint(path, {"a": torch.zeros(1)})
            forge(path, "tensors.safetensors", struct.pack("<Q", claimed) + header + bytes(4))
            with pytest.raises(CheckpointCorrupt):
                load_checkpoint(path)
            shutil.rmtree(path)


class Harm:
    """Unpickled, it creates the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("protocol", range(6))
def test_a_disguised_pickle_is_refused_and_not_run(name, protocol, tmp_path):
    path = tmp_path / "saved"
    save_checkpoint(path, TREE)
    data = pickle.dumps(Harm(tmp_path / "harm"), protocol)
    if name == "manifest.json":
        (path / name).write_bytes(data)
    else:
        forge(path, name, data)
    with pytest.raises(CheckpointCorrupt):
        load_checkpoint(path)
    assert not (tmp_path / "harm").exists()

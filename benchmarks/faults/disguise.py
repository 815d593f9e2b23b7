"""Code in the disguise of every file that is read here; readers of Python objects or of YAML tags would run it."""

from __future__ import annotations

import io
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz import Fuzz, judge, refused_settings, sign
from kills import NAME

from canter.core.storage.checkpoint import MANIFEST, CheckpointStore, load_checkpoint
from canter.nn.policy_file import BEST, POLICIES
from canter.nn.policy_loading import load_critic, load_policy
from canter.runs.hall_of_fame import INDEX, HallOfFame
from canter.runs.records import RECORD, run_status

CALLS = {"builtins.open": ("{}", "w"), "posix.mkdir": ("{}",), "shutil.copyfile": ("/dev/null", "{}")}
"""What the code does: each makes a file or folder at the place that stands for {}."""


def payload(call: str, protocol: int, mark: Path) -> bytes:
    """Opcodes that call a function when the object is read; they leave `mark` behind."""
    module, _, function = call.rpartition(".")
    texts = [text.format(mark) for text in CALLS[call]]
    if protocol == 0:
        arguments = "".join(f"V{text}\n" for text in texts)
        return f"c{module}\n{function}\n({arguments}tR.".encode()
    size = len(texts)
    arguments = b"".join(b"X" + struct.pack("<I", len(text)) + text.encode() for text in texts)
    arguments += {1: b"\x85", 2: b"\x86"}[size]
    if protocol == 2:
        return b"\x80\x02" + f"c{module}\n{function}\n".encode() + arguments + b"R."
    names = b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in (module, function))
    return b"\x80\x04" + names + b"\x93" + arguments + b"R."


def wrapped(data: bytes, wrapping: str) -> bytes:
    """As it is, as the archive in which torch saves, or behind the length of a header as in safetensors."""
    if wrapping == "archive":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3")
        return buffer.getvalue()
    return struct.pack("<Q", len(data)) + data if wrapping == "header" else data


def disguises(runs: Path) -> dict[str, Callable[[bytes], Any]]:
    """For every kind of file: put these bytes in its place and read it; tells whether that came to nothing."""
    folder, policy = runs / NAME, runs / "disguised.safetensors"
    store = CheckpointStore(folder / "checkpoints")
    index = next((runs / "hall_of_fame").glob(f"*/{INDEX}"))
    hall = HallOfFame(index.parent.parent, {"id": "x"})
    hall.folder = index.parent

    def checkpoint(file: str, data: bytes) -> bool:
        copy = runs / "disguised"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store.path(store.steps()[-1]), copy)
        (copy / MANIFEST).write_bytes(data) if file == MANIFEST else sign(copy, file, data)
        return not load_checkpoint(copy)

    def reads(path: Path, reader: Callable[[], Any], data: bytes) -> Any:
        path.write_bytes(data)
        return reader()

    def settings(data: bytes) -> Any:
        return reads(runs / "disguised.yaml", lambda: refused_settings(runs / "disguised.yaml"), data)

    return {
        **{file: lambda data, file=file: checkpoint(file, data) for file in (MANIFEST, "state.json")},
        "tensors.safetensors": lambda data: checkpoint("tensors.safetensors", data),
        BEST: lambda data: not reads(policy, lambda: load_policy(policy), data),
        "final_critic.safetensors": lambda data: not reads(policy, lambda: load_critic(policy), data),
        "a run folder's best": lambda data: not reads(folder / POLICIES / BEST, lambda: load_policy(folder), data),
        RECORD: lambda data: reads(folder / RECORD, lambda: run_status(folder) == "unknown", data),
        "run.lock": lambda data: reads(folder / "run.lock", lambda: run_status(folder) == "unknown", data),
        INDEX: lambda data: not reads(index, hall.entries, data),
        "config.yaml": settings,
    }


def disguise(runs: Path, count: int, rng: random.Random) -> Fuzz:
    """So many files with code in them, read in every way; `wrong` says which of them ran, or ended in a raw error."""
    result, targets = Fuzz(), disguises(runs)
    for case in range(count):
        mark = runs / f"executed-{case}"
        call, protocol = rng.choice(list(CALLS)), rng.choice([0, 2, 4])
        name = list(targets)[case % len(targets)]
        data = wrapped(payload(call, protocol, mark), rng.choice(["", "", "archive", "header"]))
        if name == "config.yaml" and rng.random() < 0.7:
            texts = [text.format(mark) for text in CALLS[call]]
            data = f"seed: !!python/object/apply:{call} {texts}\n".encode()
        what = f"{call} by protocol {protocol} as {name}"
        judge(result, what, lambda name=name, data=data: bool(targets[name](data)))
        if mark.exists():
            result.wrong.append(f"executed: {what}")
    return result

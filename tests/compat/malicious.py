"""Pickles that would do something when they are loaded, of about fifty kinds."""

import builtins
import collections
import functools
import importlib
import io
import operator
import os
import pickle
import platform
import posixpath
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import types
import webbrowser
import zipfile
from pathlib import Path

import torch


class Call:
    """Becomes the call of a function when it is loaded."""

    def __init__(self, function, *arguments, state=None):
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self):
        parts = (self.function, self.arguments)
        return parts if self.state is None else (*parts, self.state)


def calls(trace):
    """Calls that leave a file at `trace`, or would read, send or change something."""
    touch = f"touch {trace}"
    write = f"open({str(trace)!r}, 'w').close()"
    return [
        Call(os.system, touch),
        Call(os.popen, touch),
        Call(os.mkdir, str(trace)),
        Call(os.open, str(trace), os.O_CREAT),
        Call(os.remove, str(trace)),
        Call(os.rename, str(trace), str(trace)),
        Call(os.symlink, "/etc/passwd", str(trace)),
        Call(os.putenv, "A", "B"),
        Call(os.execv, "/bin/true", ["true"]),
        Call(os._exit, 3),
        Call(os.kill, 1, 0),
        Call(os.listdir, "/"),
        Call(subprocess.Popen, touch, -1, None, None, None, None, None, True, True),
        Call(subprocess.check_output, ["touch", str(trace)]),
        Call(subprocess.run, ["touch", str(trace)]),
        Call(builtins.eval, f"__import__('os').system({touch!r})"),
        Call(builtins.exec, write),
        Call(builtins.open, str(trace), "w"),
        Call(builtins.compile, write, "x", "exec"),
        Call(builtins.__import__, "antigravity"),
        Call(builtins.getattr, "x", "upper"),
        Call(builtins.setattr, types.SimpleNamespace, "x", 1),
        Call(builtins.input, "?"),
        Call(builtins.breakpoint),
        Call(builtins.print, "loaded"),
        Call(importlib.import_module, "antigravity"),
        Call(runpy.run_path, str(trace)),
        Call(runpy.run_module, "this"),
        Call(pickle.loads, pickle.dumps(1)),
        Call(shutil.rmtree, str(trace)),
        Call(shutil.copy, "/etc/passwd", str(trace)),
        Call(socket.create_connection, ("127.0.0.1", 1)),
        Call(sys.exit, 3),
        Call(sys.setrecursionlimit, 10),
        Call(tempfile.mkdtemp),
        Call(webbrowser.open, "http://127.0.0.1/"),
        Call(platform.platform),
        Call(posixpath.exists, "/etc/passwd"),
        Call(io.open_code, "/etc/passwd"),
        Call(Path, "/etc/passwd"),
        Call(zipfile.ZipFile, str(trace), "w"),
        Call(functools.partial, os.system, touch),
        Call(functools.reduce, operator.add, [1, 2]),
        Call(operator.attrgetter("system").__class__, "system"),
        Call(operator.methodcaller("upper").__class__, "upper"),
        Call(map, os.system, [touch]),
        Call(types.SimpleNamespace),
        Call(collections.namedtuple, "A", "b"),
        Call(torch.load, str(trace)),
        Call(torch.jit.load, str(trace)),
        Call(torch.hub.load, "a/b", "c"),
        Call(torch.utils.data.DataLoader, [1]),
        Call(torch.nn.Linear, 2, 2),
    ]


def files(folder, trace):
    """One file for each kind, some wrapped as a checkpoint, with the number of kinds."""
    for i, call in enumerate(calls(trace)):
        path = folder / f"{i}.pt"
        wrapped = {"model_state_dict": {"std": call}, "iter": 0} if i % 2 else call
        try:
            torch.save(wrapped, path)
        except (TypeError, AttributeError, pickle.PicklingError, RecursionError):
            continue
        yield path


def raw_files(folder, trace):
    """Pickles written by hand, and files that are no checkpoint at all."""
    system = f"cos\nsystem\n(S'touch {trace}'\ntR.".encode()
    contents = {
        "bare.pt": system,
        "instance.pt": b"(S'touch x'\nios\nsystem\n.",
        "object.pt": b"(cos\nsystem\nS'x'\no.",
        "dotted.pt": b"\x80\x04\x8c\x08builtins\x8c\x0cprint.__call__\x93)R.",
        "ext.pt": b"\x80\x02\x82\x01.",
        "persistent.pt": b"Pos.system\n.",
        "empty.pt": b"",
        "noise.pt": bytes(range(256)) * 10,
        "text.pt": b"hello",
        "list.pt": pickle.dumps([1, 2]),
        "truncated.pt": pickle.dumps({"model": 1})[:-3],
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name

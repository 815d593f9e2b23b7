"""Compile a policy's C header, to compare it with the policy and to measure a step."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.struct import tree_leaves
from canter.play.c_header import action_size
from canter.play.program import Exported, ExportError, Inputs, shape_action

FLAGS = ("-std=c99", "-O3", "-Wall", "-Wextra", "-Werror")
"""Flags that every header is compiled with, before it is kept."""

HARNESS = Path(__file__).with_name("policy_harness.c")


def compile_header(header: Path) -> ctypes.CDLL:
    """Return a library of the functions of `HARNESS`; raise ExportError without a compiler."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise ExportError("a C header is compiled before it is kept, and there is no cc, gcc or clang: install one")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(header, folder / "policy.h")
        shutil.copy(HARNESS, folder / "policy.c")
        command = [compiler, *FLAGS, "-shared", "-fPIC", "policy.c", "-o", "policy.so", "-lm"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise ExportError(f"{' '.join(command)} failed:\n{done.stderr[:2000]}")
        return ctypes.CDLL(str(folder / "policy.so"))


def load_header(header: Path, contract: dict[str, Any]) -> Exported:
    """Compile a header; return its function from observations and states to actions and states."""
    library = compile_header(header)
    if wrong := library.selftest():
        raise ExportError(f"{header.name}: policy_selftest fails at test vector {wrong}")
    dtype = np.float32 if contract["action"]["kind"] == "continuous" else np.int32
    sizes = [math.prod(part["shape"]) for part in contract["state"]]

    def run(inputs: Inputs) -> list[Tensor]:
        obs, state = inputs
        count = len(next(iter(obs.values())))
        groups = [obs[group["group"]].reshape(count, -1).float() for group in contract["observations"]]
        joined = torch.cat(groups, 1).contiguous()
        before = torch.cat([part.float() for part in tree_leaves(state)] or [torch.zeros(count, 0)], 1).contiguous()
        after = torch.zeros_like(before)
        action = np.zeros((count, action_size(contract)), dtype)
        addresses = (joined.data_ptr(), before.data_ptr(), action.ctypes.data, after.data_ptr())
        library.run(count, *map(ctypes.c_void_p, addresses))
        return [shape_action(torch.as_tensor(action), contract), *after.split(sizes, 1)]

    return run

"""Latency of one step of an exported policy, for one robot on one core of this machine."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.core.struct import Obs, tree_leaves, tree_map
from canter.play.c_header import action_size
from canter.play.c_library import compile_header
from canter.play.contract import contract_file, read_contract
from canter.play.export import call_arguments
from canter.play.program import Inputs
from canter.runtime import Policy as NumpyPolicy

STEPS = 5000
"""Measured steps, after a tenth as many."""


def measure_latency(path: Path, inputs: Inputs) -> tuple[float, float]:
    """Return p50 and p99 of the seconds of one step of an exported file: batch 1, one thread.

    `inputs` are observations and states `[M, ...]` to act on, repeated as often as needed.
    """
    rows = [tree_map(lambda leaf, k=k: leaf[k % len(leaf)][None], inputs) for k in range(STEPS)]
    seconds = MEASURES[path.suffix](path, rows)[STEPS // 10 :]
    p50, p99 = np.percentile(seconds, [50, 99])
    return float(p50), float(p99)


def _measure_c(path: Path, rows: list[Inputs]) -> list[float]:
    library = compile_header(path)
    action = np.zeros(action_size(read_contract(contract_file(path))), np.float32)
    observations = np.stack([_flat(obs) for obs, _ in rows])
    seconds = np.zeros(STEPS)
    addresses = (observations.ctypes.data, action.ctypes.data, seconds.ctypes.data)
    library.measure(STEPS, *map(ctypes.c_void_p, addresses))
    return seconds.tolist()


def _flat(obs: Obs) -> np.ndarray:
    return torch.cat([group.flatten().float() for group in obs.values()]).numpy()


def _measure_numpy(path: Path, rows: list[Inputs]) -> list[float]:
    policy = NumpyPolicy(path)
    observations = [_flat(obs) for obs, _ in rows]
    return _measure_calls(lambda index: policy.step(observations[index]))


def _measure_calls(call: Callable[[int], Any]) -> list[float]:
    seconds: list[float] = []
    for index in range(STEPS):
        start = time.perf_counter()
        call(index)
        seconds.append(time.perf_counter() - start)
    return seconds


def _measure_onnx(path: Path, rows: list[Inputs]) -> list[float]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    feeds = [dict(zip(names, (leaf.numpy() for leaf in tree_leaves(row)), strict=True)) for row in rows]
    return _measure_calls(lambda index: session.run(None, feeds[index]))


def _measure_torch(path: Path, rows: list[Inputs]) -> list[float]:
    module = torch.export.load(path).module()
    arguments = [call_arguments(row) for row in rows]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _measure_calls(lambda index: module(*arguments[index]))
    finally:
        torch.set_num_threads(threads)


MEASURES: dict[str, Callable[[Path, list[Inputs]], list[float]]] = {
    ".h": _measure_c,
    ".npz": _measure_numpy,
    ".onnx": _measure_onnx,
    ".pt2": _measure_torch,
}
"""Functions that measure a file, by its suffix."""

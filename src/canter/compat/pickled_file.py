"""Checkpoints of a source library as plain data.

They are pickles, so no code in them is run: only a closed list of types is read.
"""

from __future__ import annotations

import datetime
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError

MAX_BYTES = 16 << 30
"""Size limit of a file, packed and unpacked; larger ones are refused unread."""
MAX_DEPTH = 50

_SCALAR: Any = np.float64(0.0).__reduce__()[0]
_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]


def _list(items: Any = (), length: Any = None) -> list[Any]:
    """Return a deque as a list."""
    return list(items)


def _path(*parts: Any) -> str:
    """Return a path as text."""
    return "/".join(map(str, parts)).replace("//", "/")


PATHS = ("Posix", "Windows", "PurePosix", "PureWindows")
NUMBERS = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float16", "Float32")
SAFE: list[Any] = [
    np.ndarray,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    *(getattr(np.dtypes, f"{name}DType") for name in NUMBERS),
    (_list, "collections.deque"),
    *((_path, f"{module}.{kind}Path") for module in ("pathlib", "pathlib._local") for kind in PATHS),
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    datetime.timezone,
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    np.dtypes.Float64DType,
]
"""Types that a file may hold besides tensors, containers and plain values: NumPy's numbers, which
rl_games saves, and what environments keep: NumPy's arrays of numbers, deques (read as lists), paths
and times (read as text)."""
TIMES = (datetime.date, datetime.timedelta, datetime.timezone)


class CheckpointRefused(UserError):
    """The file is no checkpoint of a source library, or is not safe to read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} cannot be imported: {reason}")


def read_pickled(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a file of `torch.save`.

    Tensors on the CPU, numbers, strings, None, and containers of them.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointRefused(path, "there is no such file" if not path.exists() else "it is not a regular file")
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = max(size, sum(entry.file_size for entry in archive.infolist()))
    if size > MAX_BYTES:
        raise CheckpointRefused(path, f"it holds more than {MAX_BYTES:,} bytes")
    try:
        with torch.serialization.safe_globals(SAFE):
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a malicious file may raise any error
        raise CheckpointRefused(path, _reason(error)) from error
    if not isinstance(tree, Mapping):
        raise CheckpointRefused(path, f"expected a mapping, found a {type(tree).__name__}")
    return _plain(tree, path, "", 0)


def _reason(error: Exception) -> str:
    """Return why `torch.load` failed, with the name of the object that it did not run."""
    text = " ".join(str(error).split())
    named = re.search(r"(?:GLOBAL|[Uu]nsupported (?:class|operand)|for) ([\w]+\.[\w.]+)", text)
    if isinstance(error, pickle.UnpicklingError) and named:
        return f"it wants to run or build {named[1]}, which is on no list of harmless things; nothing was run"
    return f"it is not a file of tensors and numbers ({type(error).__name__}: {text[:200]})"


def _plain(value: Any, path: Path, key: str, depth: int) -> Any:
    """Return a value with Python numbers for NumPy's; refuse other types."""
    if depth > MAX_DEPTH:
        raise CheckpointRefused(path, f"{key} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {name: _plain(item, path, f"{key}.{name}", depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, path, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    if isinstance(value, TIMES):
        return str(value)
    if isinstance(value, Tensor):
        return check_tensor(value.detach(), path, key)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointRefused(path, f"{key or 'it'} holds a {type(value).__module__}.{type(value).__qualname__}")


def check_tensor(value: Tensor, path: Path, key: str) -> Tensor:
    """Return a dense tensor of finite numbers; refuse others."""
    if value.layout is not torch.strided or value.is_quantized or value.is_complex():
        raise CheckpointRefused(path, f"{key} is no dense tensor of real numbers")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise CheckpointRefused(path, f"{key} holds NaN or infinity")
    return value.contiguous()


def number(tree: Mapping[str, Any], key: str, default: float) -> float:
    """Return a finite number of a file, or the default."""
    value = tree.get(key, default)
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else default

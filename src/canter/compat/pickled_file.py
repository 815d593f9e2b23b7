"""Checkpoints of a source library as plain data.

They are pickles, so no code in them is run: only a closed list of types is read.
"""

from __future__ import annotations

import datetime
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError

_log = logging.getLogger(__name__)

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
INTEGERS = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
FLOATS = ("Float16", "Float32", "Float64")
TIMES = (datetime.date, datetime.timedelta, datetime.timezone)
NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
"""Module of NumPy's functions, by the version that wrote the file."""
SAFE: list[Any] = [
    *(np.ndarray, np.dtype),
    *(getattr(np.dtypes, f"{name}DType") for name in (*INTEGERS, *FLOATS)),
    *((_RECONSTRUCT, f"{module}._reconstruct") for module in NUMPY),
    *((_SCALAR, f"{module}.scalar") for module in NUMPY),
    (_list, "collections.deque"),
    *((_path, f"{module}.{kind}Path") for module in ("pathlib", "pathlib._local") for kind in PATHS),
    *(datetime.datetime, *TIMES),
]
"""Types that a file may hold besides tensors, containers and plain values: NumPy's numbers, which
rl_games saves, and what environments keep: NumPy's arrays of numbers, deques (read as lists), paths
and times (read as text)."""
OPTIONAL = ("infos", "env_state")
"""Keys of a file, for the user's or the environment's own data, below which unknown objects are
skipped."""


class Unknown:
    """Stand-in for an object of a type that is on no list; holds nothing, runs nothing."""

    kind = ""
    """Name of the type in the file."""

    def __new__(cls, *_: Any, **__: Any) -> Unknown:
        """Return a stand-in, whatever the object was made of."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drop the object's state."""


class CheckpointRefused(UserError):
    """The file is no checkpoint of a source library, or is not safe to read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} cannot be imported: {reason}")


def read_pickled(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a file of `torch.save`.

    Tensors on the CPU, numbers, strings, None, and containers of them. Other objects below `infos`
    and `env_state` are skipped and named in the log; anywhere else they refuse the file.
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
        with torch.serialization.safe_globals([*SAFE, *_stand_ins(path)]):
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a malicious file may raise any error
        raise CheckpointRefused(path, _reason(error)) from error
    if not isinstance(tree, Mapping):
        raise CheckpointRefused(path, f"expected a mapping, found a {type(tree).__name__}")
    contents = Contents(path)
    plain = contents.plain(tree, (), 0)
    if contents.skipped:
        _log.warning("%s: skipped %s", path, ", ".join(contents.skipped))
    return plain


def _stand_ins(path: Path) -> list[Any]:
    """Return a stand-in for each type that the file names and that is on no list."""
    if not zipfile.is_zipfile(path):
        return []
    with torch.serialization.safe_globals(SAFE):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [(type("Unknown", (Unknown,), {"kind": name}), name) for name in names]


def _not_run(kind: str) -> str:
    return f"it wants to run or build {kind}, which is on no list of harmless things; nothing was run"


def _reason(error: Exception) -> str:
    """Return why `torch.load` failed, with the name of the object that it did not run."""
    text = " ".join(str(error).split())
    named = re.search(r"(?:GLOBAL|[Uu]nsupported (?:class|operand)|for) ([\w]+\.[\w.]+)", text)
    if isinstance(error, pickle.UnpicklingError) and named:
        return _not_run(named[1])
    return f"it is not a file of tensors and numbers ({type(error).__name__}: {text[:200]})"


SKIPPED = object()


@dataclass
class Contents:
    """Reader of a file's contents as plain data."""

    path: Path
    skipped: list[str] = field(default_factory=list)
    """Key and type of each object that was skipped."""

    def plain(self, value: Any, keys: tuple[str, ...], depth: int) -> Any:
        """Return a value with Python numbers for NumPy's; skip or refuse other types.

        A skipped object is left out of a mapping, and is None in a list.
        """
        key = "".join(keys)
        if depth > MAX_DEPTH:
            raise CheckpointRefused(self.path, f"{key} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            named = {name: self.plain(item, (*keys, f".{name}"), depth + 1) for name, item in value.items()}
            return {name: item for name, item in named.items() if item is not SKIPPED}
        if isinstance(value, list | tuple):
            items = [self.plain(item, (*keys, f"[{i}]"), depth + 1) for i, item in enumerate(value)]
            return [None if item is SKIPPED else item for item in items]
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return value
        if isinstance(value, TIMES):
            return str(value)
        if isinstance(value, Tensor):
            return check_tensor(value.detach(), self.path, key)
        if value is None or type(value) in (bool, int, float, str):
            return value
        cls = value if isinstance(value, type) else type(value)
        unknown = issubclass(cls, Unknown)
        kind = cls.kind if unknown else f"{cls.__module__}.{cls.__qualname__}"
        if keys and keys[0].removeprefix(".") in OPTIONAL:
            self.skipped.append(f"{key.removeprefix('.')} (a {kind})")
            return SKIPPED
        raise CheckpointRefused(self.path, _not_run(kind) if unknown else f"{key or 'it'} holds a {kind}")


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

"""Observations as arrays, one or a batch of N, to the groups that a network reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from canter.specs import ACTION_MASK, TensorSpec


def read_arrays(obs: Any, specs: Mapping[str, TensorSpec], reads: Iterable[str]) -> tuple[dict[str, np.ndarray], bool]:
    """Groups `[N, ...]` of the dtypes that their specs have, and whether `obs` was a single one, so that N is 1."""
    given = dict(_flat(obs, ""))
    if "" in given:  # an array: the only group there is, besides a mask
        names = [name for name in specs if name != ACTION_MASK]
        if len(names) > 1:
            raise ValueError(
                f"an array was given, and the policy knows the observations {', '.join(names)}: give a dict"
            )
        given = {names[0]: given[""]}
    wanted = dict.fromkeys(reads)
    missing = [name for name in wanted if name not in given and name != ACTION_MASK]
    if missing:
        raise ValueError(f"observation {missing[0]!r} is missing; given: {', '.join(given)}")
    read = {name: _group(name, given[name], specs[name]) for name in wanted if name in given}
    if len({single for _, single in read.values()}) > 1:  # n choices among n look like one observation of n numbers
        read = {name: _group(name, given[name], specs[name], choices=name != ACTION_MASK) for name in read}
    counts = {name: len(array) for name, (array, _) in read.items()}
    if len({*counts.values()}) > 1 or len({single for _, single in read.values()}) > 1:
        raise ValueError(f"observations of different numbers of environments: {counts}")
    count, single = next(iter(counts.values())), next(iter(read.values()))[1]
    arrays = {name: array for name, (array, _) in read.items()}
    if ACTION_MASK in wanted and ACTION_MASK not in arrays:  # whoever gives none allows everything
        arrays[ACTION_MASK] = np.ones((count, *specs[ACTION_MASK].shape), bool)
    return arrays, single


def _flat(obs: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(obs, Mapping):
        yield key, obs
        return
    for name, part in obs.items():
        yield from _flat(part, f"{key}/{name}" if key else str(name))


def _group(name: str, raw: Any, spec: TensorSpec, *, choices: bool = False) -> tuple[np.ndarray, bool]:
    """One group, and whether it was a single observation; with `choices`, integers `[N]` are N of them in any case."""
    array = raw.numpy(force=True) if isinstance(raw, torch.Tensor) else np.asarray(raw)
    shape = tuple(spec.shape)
    integers = array.dtype.kind in "iu" and len(shape) == 1 and shape != (1,)
    if integers and array.ndim == 2 and array.shape[1] == 1:
        array, choices = array[:, 0], True
    if integers and array.ndim < 2 and (choices or array.shape != shape):  # a choice becomes one-hot
        if np.any((array < 0) | (array >= shape[0])):
            raise ValueError(f"observation {name!r} is {array}; expected a choice from 0 to {shape[0] - 1}")
        array = np.eye(shape[0], dtype=np.float32)[array]
    if shape == (1,) and array.ndim <= 1 and array.shape != (1,):
        array = array[..., None]  # a number becomes a vector of length 1
    if array.shape != shape and array.shape[1:] != shape:
        raise ValueError(
            f"observation {name!r} has shape {array.shape}; expected {shape}, or (N, *{shape}) for a batch"
        )
    single = array.shape == shape
    dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
    return np.ascontiguousarray(array[None] if single else array, dtype=dtype), single

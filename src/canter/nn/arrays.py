"""Observations as arrays, one or a batch of N, to the groups that a network reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from canter.core.registry import UserError
from canter.core.space_arrays import OneHotGroup
from canter.core.specs import ACTION_MASK, EnvSpec, TensorSpec


def read_arrays(obs: Any, spec: EnvSpec, reads: Iterable[str]) -> tuple[dict[str, np.ndarray], bool]:
    """Groups `[N, ...]` of the dtypes that their specs have, and whether `obs` was a single one, so that N is 1."""
    given, specs = dict(_flat(obs, "")), spec.obs
    known = {choices.group: choices for choices in spec.own_arrays.choices}
    if "" in given:  # an array: the only group there is, besides a mask
        names = [name for name in specs if name != ACTION_MASK]
        if len(names) > 1:
            raise UserError(
                f"an array was given, and the policy knows the observations {', '.join(names)}: give a dict"
            )
        given = {names[0]: given[""]}
    wanted = dict.fromkeys(reads)
    missing = [name for name in wanted if name not in given and name != ACTION_MASK]
    if missing:
        raise UserError(f"observation {missing[0]!r} is missing; given: {', '.join(given)}")
    given = {name: _encoded(_array(given[name]), known.get(name)) for name in wanted if name in given}
    read = {name: _group(name, array, specs[name]) for name, array in given.items()}
    if len({single for _, single in read.values()}) > 1:  # n choices among n look like one observation of n numbers
        read = {name: _group(name, given[name], specs[name], choices=name != ACTION_MASK) for name in read}
    counts = {name: len(array) for name, (array, _) in read.items()}
    if len({*counts.values()}) > 1 or len({single for _, single in read.values()}) > 1:
        raise UserError(f"observations of different numbers of environments: {counts}")
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


def _array(raw: Any) -> np.ndarray:
    return raw.numpy(force=True) if isinstance(raw, torch.Tensor) else np.asarray(raw)


def _encoded(array: np.ndarray, choices: OneHotGroup | None) -> np.ndarray:
    """One-hot vectors of choices in the environment's own numbers; anything else as it is."""
    if choices is None or array.dtype.kind not in "iu":
        return array
    if array.ndim == 2 and array.shape[1] == 1 and choices.shape == ():
        array = array[:, 0]
    single = array.shape == choices.shape
    if not single and array.shape[1:] != choices.shape:
        return array
    first, last = np.array(choices.start), np.array(choices.start) + choices.options - 1
    rows = array.reshape(1 if single else len(array), -1)
    if np.any((rows < first) | (rows > last)):
        raise UserError(f"observation {choices.group!r} is {array}; expected choices from {first} to {last}")
    return choices(rows)[0] if single else choices(rows)


def _group(name: str, array: np.ndarray, spec: TensorSpec, *, choices: bool = False) -> tuple[np.ndarray, bool]:
    """One group, and whether it was a single observation; with `choices`, integers `[N]` are N of them in any case."""
    shape = tuple(spec.shape)
    integers = array.dtype.kind in "iu" and len(shape) == 1 and shape != (1,)
    if integers and array.ndim == 2 and array.shape[1] == 1:
        array, choices = array[:, 0], True
    if integers and array.ndim < 2 and (choices or array.shape != shape):  # a choice becomes one-hot
        if np.any((array < 0) | (array >= shape[0])):
            raise UserError(f"observation {name!r} is {array}; expected a choice from 0 to {shape[0] - 1}")
        array = np.eye(shape[0], dtype=np.float32)[array]
    if shape == (1,) and array.ndim <= 1 and array.shape != (1,):
        array = array[..., None]  # a number becomes a vector of length 1
    if array.shape != shape and array.shape[1:] != shape:
        raise UserError(f"observation {name!r} has shape {array.shape}; expected {shape}, or (N, *{shape}) for a batch")
    single = array.shape == shape
    dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
    return np.ascontiguousarray(array[None] if single else array, dtype=dtype), single

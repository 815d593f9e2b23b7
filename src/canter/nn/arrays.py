"""Conversion of observations as arrays, one or a batch of N, to the groups of a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from canter.core.declarations import OneHotGroup
from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK, EnvSpec, TensorSpec


def obs_to_arrays(obs: Any, spec: EnvSpec, reads: Iterable[str]) -> tuple[dict[str, np.ndarray], bool]:
    """Return the groups `[N, ...]` in the dtypes of `spec`, and True if `obs` was a single one.

    `reads` names the groups of the network. A single observation becomes a batch of one.
    """
    specs = spec.obs
    one_hot = {group.group: group for group in spec.own_arrays.choices}
    given = dict(_flatten(obs, ""))
    if "" in given:  # an array: the only group except a mask
        given = {_only_group(specs): given[""]}
    needed = dict.fromkeys(reads)
    missing = [name for name in needed if name not in given and name != ACTION_MASK]
    if missing:
        raise UserError(f"observation {missing[0]!r} is missing; given: {', '.join(given)}")
    given = {name: _encode_one_hot(_to_numpy(given[name]), one_hot.get(name)) for name in needed if name in given}
    parsed = {name: _parse_group(name, array, specs[name]) for name, array in given.items()}
    counts = {name: len(array) for name, (array, _) in parsed.items()}
    if len({*counts.values()}) > 1 or len({single for _, single in parsed.values()}) > 1:
        raise UserError(f"observations of different numbers of environments: {counts}")
    count = next(iter(counts.values()))
    single = next(iter(parsed.values()))[1]
    arrays = {name: array for name, (array, _) in parsed.items()}
    if ACTION_MASK in needed and ACTION_MASK not in arrays:  # without a mask every action is allowed
        arrays[ACTION_MASK] = np.ones((count, *specs[ACTION_MASK].shape), bool)
    return arrays, single


def _only_group(specs: Mapping[str, TensorSpec]) -> str:
    """Return the only observation group except a mask; raise UserError if there are several."""
    names = [name for name in specs if name != ACTION_MASK]
    if len(names) > 1:
        raise UserError(
            f"the observation is an array, but the policy has the observations {', '.join(names)}: pass a dict"
        )
    return names[0]


def _flatten(obs: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a nested dict, with their keys joined by "/"."""
    if not isinstance(obs, Mapping):
        yield key, obs
        return
    for name, part in obs.items():
        yield from _flatten(part, f"{key}/{name}" if key else str(name))


def _to_numpy(raw: Any) -> np.ndarray:
    return raw.numpy(force=True) if isinstance(raw, torch.Tensor) else np.asarray(raw)


def _encode_one_hot(array: np.ndarray, group: OneHotGroup | None) -> np.ndarray:
    """Return one-hot vectors of integers in the environment's numbering; other arrays unchanged."""
    if group is None or array.dtype.kind not in "iu":
        return array
    if array.ndim == 2 and array.shape[1] == 1 and group.shape == ():
        array = array[:, 0]
    single = array.shape == group.shape
    if not single and array.shape[1:] != group.shape:
        return array
    first = np.array(group.start)
    last = np.array(group.start) + group.options - 1
    samples = array.reshape(1 if single else len(array), -1)
    if np.any((samples < first) | (samples > last)):
        raise UserError(f"observation {group.group!r} is {array}; expected integers from {first} to {last}")
    return group(samples)[0] if single else group(samples)


def _parse_group(name: str, array: np.ndarray, spec: TensorSpec) -> tuple[np.ndarray, bool]:
    """Return one group as a batch, and True if it was a single observation."""
    shape = tuple(spec.shape)
    if shape == (1,) and array.ndim <= 1 and array.shape != (1,):
        array = array[..., None]  # a number becomes a vector of length 1
    if array.shape != shape and array.shape[1:] != shape:
        raise UserError(f"observation {name!r} has shape {array.shape}; expected {shape}, or (N, *{shape}) for a batch")
    single = array.shape == shape
    dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
    if array.dtype.kind in "cOSU":
        raise UserError(f"observation {name!r} has the dtype {array.dtype}; expected real numbers")
    with np.errstate(over="ignore"):  # too large for float32: infinity, refused below
        converted = np.ascontiguousarray(array, dtype=dtype)
    finite = np.isfinite(array) & np.isfinite(converted) if array.dtype.kind == "f" else np.ones(array.shape, bool)
    if not finite.all():
        place = ", ".join(map(str, np.argwhere(~finite)[0]))
        raise UserError(f"observation {name!r} is {array[~finite][0]} at [{place}]; expected finite numbers")
    return converted[None] if single else converted, single

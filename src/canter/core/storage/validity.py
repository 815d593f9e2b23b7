"""Checks before saving (finite values) and before loading (same kind of run, same shapes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.specs import ActionSpec, Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_INTEGERS, *_FLOATS)}


class Mismatch(UserError):
    """Saved data does not fit the object that loads it: `field` differs, `saved` against `here`."""

    def __init__(self, what: str, field: str, saved: Any, here: Any) -> None:
        super().__init__(f"{what} does not fit: {field} is {_show(saved)} in what was saved and {_show(here)} here")
        self.field = field
        self.saved = saved
        self.here = here


class NonFiniteParameters(UserError):
    """A tensor of the training state holds NaN or infinity, so the state is not saved."""


def check_finite(tree: Any, what: str) -> None:
    """Raise NonFiniteParameters, naming the tensor, if one holds NaN or infinity."""
    leaves = {name: leaf for name, leaf in flatten(tree).items() if isinstance(leaf, Tensor)}
    numbers = {name: leaf for name, leaf in leaves.items() if leaf.is_floating_point() or leaf.is_complex()}
    if not numbers or torch.stack([torch.isfinite(leaf).all() for leaf in numbers.values()]).all():
        return
    name = next(name for name, leaf in numbers.items() if not torch.isfinite(leaf).all())
    count = int((~torch.isfinite(numbers[name])).sum())
    raise NonFiniteParameters(
        f"{what} was not saved: {count} of {numbers[name].numel()} numbers in {name} are NaN or infinite; "
        "what was saved before is intact"
    )


def check_same(what: str, saved: Any, here: Any) -> None:
    """Raise Mismatch at the first field in which two trees of plain data differ."""
    saved = flatten(saved)
    here = flatten(here)
    for field in {**here, **saved}:
        if saved.get(field, "missing") != here.get(field, "missing"):
            raise Mismatch(what, field, saved.get(field, "missing"), here.get(field, "missing"))


def check_same_shape(what: str, saved: Any, here: Any) -> None:
    """Raise Mismatch at the first leaf with another type or, for tensors, dtype or shape."""

    def outline(tree: Any) -> dict[str, str]:
        return {name: _outline(leaf) for name, leaf in flatten(tree).items()}

    check_same(what, outline(saved), outline(here))


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings and lists by dotted path; plain lists are leaves."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple) and any(isinstance(item, Mapping | list | tuple | Tensor) for item in tree):
        items = list(enumerate(tree))
    else:
        return {path: list(tree) if isinstance(tree, tuple) else tree}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= flatten(item, f"{path}.{key}" if path else str(key))
    return leaves


def spec_to_plain(spec: EnvSpec) -> dict[str, Any]:
    """Return observations and action of a spec as plain data, without `num_envs` and device."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    obs = {name: {"shape": list(group.shape), "dtype": names[group.dtype]} for name, group in spec.obs.items()}
    match spec.action:
        case Continuous(low, high):
            # JSON has no infinity.
            action = {"kind": "continuous", "low": [*map(_bound, low)], "high": [*map(_bound, high)]}
        case Discrete(n):
            action = {"kind": "discrete", "n": n}
        case MultiDiscrete(nvec):
            action = {"kind": "multi_discrete", "nvec": list(nvec)}
    # The groups also as a list, because networks read them in this order.
    return {"env_id": spec.env_id, "groups": list(spec.obs), "obs": obs, "action": action}


def spec_from_plain(plain: Any, device: torch.device) -> EnvSpec:
    """Return the spec, for one environment; raise ValueError for data of another form."""
    try:
        groups = plain["obs"]
        env_id = plain["env_id"]
        if plain["groups"] != list(groups) or not isinstance(env_id, str):
            raise ValueError("groups or env_id are malformed")
        obs = {
            name: TensorSpec(tuple(_size(n) for n in group["shape"]), _DTYPES[group["dtype"]])
            for name, group in groups.items()
        }
        return EnvSpec(obs, _action_from_plain(plain["action"]), num_envs=1, device=device, env_id=env_id)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the environment is malformed ({type(error).__name__}: {error})") from error


def _action_from_plain(plain: Any) -> ActionSpec:
    match plain:
        case {"kind": "continuous", "low": list(low), "high": list(high)} if len(low) == len(high) > 0:
            return Continuous(tuple(map(float, low)), tuple(map(float, high)))
        case {"kind": "discrete", "n": n}:
            return Discrete(_size(n))
        case {"kind": "multi_discrete", "nvec": list(nvec)} if nvec:
            return MultiDiscrete(tuple(map(_size, nvec)))
    raise ValueError(f"the action is malformed: {str(plain)[:100]}")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} is not a size")
    return value


def _bound(value: float) -> float | str:
    return value if abs(value) != float("inf") else str(value)


def _outline(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

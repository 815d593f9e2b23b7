"""Conversion of Gymnasium spaces to specs, and of arrays to tensors and back.

N is the number of environments, A of continuous action components, K of simultaneous discrete
actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from canter.core.declarations import ActionArray, OneHotGroup
from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK, ActionSpec, Continuous, Discrete, MultiDiscrete, TensorSpec, UnsupportedSpace
from canter.core.struct import Obs, fused_writer, tree_copy_, tree_leaves, tree_map

POLICY = "policy"
"""The observation group that holds an observation which is a single array."""


@dataclass(frozen=True)
class ActionCodec:
    """The action spec of a space, and the conversion of actions to the environments' arrays."""

    spec: ActionSpec
    array: ActionArray
    buffers: dict[tuple[torch.Size, torch.dtype], tuple[Any, Tensor, np.ndarray]] = field(default_factory=dict)
    """Quick writer, tensor and array over the numbers that it writes, by shape and dtype of
    actions."""

    def encode(self, action: Tensor) -> np.ndarray:
        """Return the action `[N, A]`, `[N]` or `[N, K]` as a new, unclipped array of the space."""
        key = action.shape, action.dtype
        if key not in self.buffers:
            buffer = torch.empty((1, *action.shape), dtype=action.dtype)
            self.buffers[key] = fused_writer([buffer]), buffer[0], buffer[0].numpy()
        write, buffer, array = self.buffers[key]
        if not write(0, [action]):  # quicker than making an array of the tensor
            buffer.copy_(action.detach())
        return self.array.encode(array)


def action_codec(space: Space) -> ActionCodec:
    """Return the codec of a space: Box of numbers, Discrete, MultiDiscrete or MultiBinary."""
    match space:
        case spaces.Box() if space.dtype.kind in "fiu":
            spec = Continuous(*(tuple(bound.tolist()) for bound in _float32_bounds(space)))
            return ActionCodec(spec, ActionArray(space.shape, str(space.dtype)))
        case spaces.Discrete():
            return ActionCodec(Discrete(int(space.n)), ActionArray((), str(space.dtype), (int(space.start),)))
        case spaces.MultiDiscrete():
            spec = MultiDiscrete(tuple(int(n) for n in space.nvec.flat))
            start = tuple(np.asarray(space.start).reshape(-1).tolist())
            return ActionCodec(spec, ActionArray(space.nvec.shape, str(space.dtype), start))
        case spaces.MultiBinary():
            size = int(np.prod(space.shape))
            return ActionCodec(MultiDiscrete((2,) * size), ActionArray(space.shape, str(space.dtype)))
    raise UnsupportedSpace(
        f"action space {space} is not supported: policies act in Box (numbers), Discrete, MultiDiscrete or "
        "MultiBinary; wrap the environment with gymnasium.wrappers.TransformAction to offer one of these"
    )


class TupleActions(gymnasium.ActionWrapper):
    """Turns an action space that is a Tuple of Discrete into MultiDiscrete."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        parts = cast(tuple[spaces.Discrete, ...], cast(spaces.Tuple, env.action_space).spaces)
        starts = [int(part.start) for part in parts]
        self.action_space = spaces.MultiDiscrete([int(part.n) for part in parts], start=starts)

    @staticmethod
    def if_needed(env: gymnasium.Env) -> gymnasium.Env:
        """Wrap the environment if its action space is such a Tuple."""
        space = env.action_space
        fits = isinstance(space, spaces.Tuple) and all(isinstance(part, spaces.Discrete) for part in space.spaces)
        return TupleActions(env) if fits else env

    def action(self, action: np.ndarray) -> tuple[int, ...]:
        """Return one number for each part of the Tuple."""
        return tuple(int(choice) for choice in action)


def _float32_bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds `[A]` as float32, rounded inwards so that actions never leave the space."""
    low = space.low.reshape(-1).astype(np.float64)
    high = space.high.reshape(-1).astype(np.float64)
    with np.errstate(over="ignore"):
        low32 = low.astype(np.float32)
        high32 = high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return low32, high32


Convert = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Group:
    """One observation group: its path in a raw observation, and the conversion to a tensor."""

    name: str
    path: tuple[str, ...]
    spec: TensorSpec
    convert: Convert
    """From raw rows `[M, ...]` to `[M, *spec.shape]`; the assignment to the tensor casts."""


class ObsBuffer:
    """Buffer for one observation of N environments, as tensors and arrays over one memory."""

    def __init__(self, specs: dict[str, TensorSpec], num_envs: int) -> None:
        self.tensors: Obs = {name: torch.zeros(num_envs, *s.shape, dtype=s.dtype) for name, s in specs.items()}
        self.arrays: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in self.tensors.items()}


class ObsReader:
    """Copies raw observations into tensors: one group per key of a Dict, or the one group `policy`.

    Numbers become float32, images (uint8 with three axes) stay uint8, Discrete and MultiDiscrete
    become one-hot, MultiBinary 0 and 1; keys of nested Dicts are joined with "/". A scalar becomes
    a vector of length 1. The key `action_mask` becomes bool `[N, n]` or `[N, sum(nvec)]`. Every
    number is copied exactly once, so the environment may overwrite its arrays afterwards.
    """

    def __init__(self, space: Space, num_envs: int, action: ActionSpec) -> None:
        self.num_envs = num_envs
        self.mask_rule = _MaskRule(action)
        self._groups = list(_groups(space, (), self.mask_rule))
        self.specs = {group.name: group.spec for group in self._groups}
        converts = [group.convert for group in self._groups]
        self.choices = tuple(convert for convert in converts if isinstance(convert, OneHotGroup))
        if not self.specs or len(self.specs) < len(self._groups):
            raise UnsupportedSpace(f"observation space {space} needs at least one key and no two that join to one name")

    def add_mask(self, infos: Callable[[], Iterable[dict[str, Any]]]) -> bool:
        """Add the group `action_mask` if one of `infos()` has a mask; return True if so.

        `infos` is called only if actions are discrete and the observations have no mask.
        """
        if not self.mask_rule.applies or ACTION_MASK in self.specs:
            return False
        found = any(ACTION_MASK in info for info in infos())
        self.specs |= {ACTION_MASK: self.mask_rule.spec} if found else {}
        return found

    def buffer(self) -> ObsBuffer:
        """Allocate memory for one observation."""
        return ObsBuffer(self.specs, self.num_envs)

    def write(self, target: ObsBuffer, raw: Any, rows: np.ndarray | None = None) -> None:
        """Copy a batched raw observation into `rows` (bool `[N]`) of `target`, or into all."""
        for group in self._groups:
            into = target.arrays[group.name]
            value = group.convert(np.asarray(_at(raw, group.path)))
            if value.shape != into.shape:
                raise UserError(
                    f"observation {group.name!r} has shape {value.shape}, its space promises {into.shape}; "
                    "correct the observation space or the observation"
                )
            if rows is None:
                into[...] = value
            else:
                into[rows] = value[rows]

    def write_final(self, target: ObsBuffer, final: Any, rows: np.ndarray) -> None:
        """Copy last observations, batched or an object array, into `rows` (bool `[N]`)."""
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return self.write(target, final, rows)
        for index in np.flatnonzero(rows):
            if final[index] is None:
                raise UserError(f"environment {index} ended, but its last observation is missing in info['final_obs']")
            for group in self._groups:
                raw = np.asarray(_at(final[index], group.path))
                target.arrays[group.name][index] = group.convert(raw[None])[0]
        return None


class _MaskRule:
    """The shape of a valid action mask for an action spec, and its check."""

    def __init__(self, action: ActionSpec) -> None:
        nvec = () if isinstance(action, Continuous) else action.nvec
        self.spec = TensorSpec((sum(nvec),), torch.bool)
        self.applies = bool(nvec)
        self._starts = np.cumsum((0, *nvec[:-1])) if nvec else np.zeros(0, np.int64)

    def check_(self, mask: np.ndarray, ended: np.ndarray) -> None:
        """Raise UserError if a row of `mask` `[N, n]` allows no option of some discrete action.

        A finished game may well have no legal move: rows that ended allow everything instead, as
        nobody acts on them.
        """
        blocked = ~np.logical_or.reduceat(mask, self._starts, axis=1).all(axis=1)
        if not blocked.any():
            return
        mask[blocked & ended] = True
        stuck = np.flatnonzero(blocked & ~ended)
        if stuck.size:
            raise UserError(
                f"the action mask of environment {', '.join(map(str, stuck))} allows no action; an environment in "
                "which nothing can be done must report terminated or truncated"
            )


def copy_info_(target: np.ndarray, info: dict[str, Any], key: str, rows: np.ndarray) -> np.ndarray:
    """Copy `info[key]` into those `rows` (bool `[N]`) of `target` `[N, ...]` that have an entry; return these rows."""
    value = info.get(key)
    if value is None:
        return np.zeros_like(rows)
    value = np.asarray(value)
    rows = rows & np.asarray(info.get(f"_{key}", True), dtype=bool)
    try:
        if value.dtype == object:
            rows = rows & np.array([entry is not None for entry in value])
            for index in np.flatnonzero(rows):
                target[index] = np.asarray(value[index]).reshape(target.shape[1:])
        else:
            target[rows] = value.reshape(target.shape)[rows]
        return rows
    except (TypeError, ValueError) as error:
        raise UserError(
            f"info[{key!r}] of shape {value.shape}, dtype {value.dtype} is not {target.shape} numbers: {error}"
        ) from error


def _at(raw: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        raw = raw[key]
    return raw


def _as_column(raw: np.ndarray) -> np.ndarray:
    return raw.reshape(len(raw), 1)


def _groups(space: Space, path: tuple[str, ...], mask: _MaskRule) -> Iterator[_Group]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _groups(part, (*path, str(key)), mask)
        return
    name = "/".join(path) or POLICY
    if name == ACTION_MASK:
        if not mask.applies or int(np.prod(space.shape or (1,))) != mask.spec.shape[0]:
            raise UnsupportedSpace(
                f"observation key {ACTION_MASK!r} with space {space} does not fit the action space: it needs one entry "
                f"per discrete action, {mask.spec.shape[0]} in all; rename the key if it is something else"
            )
        yield _Group(name, path, mask.spec, lambda raw: raw.reshape(len(raw), -1) != 0)
    else:
        yield _Group(name, path, *_leaf(space, name))


def _leaf(space: Space, name: str) -> tuple[TensorSpec, Convert]:
    match space:
        case spaces.Box() if space.dtype == np.uint8 and len(space.shape) == 3:
            return TensorSpec(space.shape, torch.uint8), np.asarray
        case spaces.Box() if space.dtype.kind in "fiub":
            return TensorSpec(space.shape or (1,)), np.asarray if space.shape else _as_column
        case spaces.Discrete():
            return TensorSpec((int(space.n),)), OneHotGroup(name, (), (int(space.n),), (int(space.start),))
        case spaces.MultiDiscrete():
            options, start = (tuple(np.asarray(part).reshape(-1).tolist()) for part in (space.nvec, space.start))
            return TensorSpec((sum(options),)), OneHotGroup(name, space.nvec.shape, options, start)
        case spaces.MultiBinary():
            return TensorSpec(space.shape), np.asarray
    remedy = "a wrapper that turns it into numbers, --env.wrappers.my_module:MyWrapper null"
    if isinstance(space, spaces.Tuple | spaces.Sequence | spaces.Graph | spaces.OneOf):
        remedy = "FlattenObservation if its parts have fixed sizes, --env.wrappers.FlattenObservation null"
    raise UnsupportedSpace(
        f"observation {name!r} has space {space}, which is not supported: networks here read Box (numbers), Discrete, "
        f"MultiDiscrete, MultiBinary and Dict of these. Wrap the environment with {remedy}"
    )


ALIGNMENT = 16
"""Alignment in bytes of every tensor in a buffer, for any dtype."""


class PinnedBuffers:
    """The same tensors side by side in a buffer of the host and in one of the device."""

    def __init__(self, tree: Any, device: torch.device) -> None:
        starts = [0, *accumulate(-(-leaf.nbytes // ALIGNMENT) * ALIGNMENT for leaf in tree_leaves(tree))]
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        self.device = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self.host_tree = _views(self.host, tree, starts)
        self.device_tree = _views(self.device, tree, starts)
        self.sent = torch.cuda.Event() if on_gpu else None
        """Recorded after a copy: the host may write to its buffer again."""


class PinnedCopier:
    """Copies a tree of host tensors to a device, all of them in one transfer and without waiting.

    The host can only go on during a copy from pinned memory. There are two pairs of buffers, so
    that the host fills one while the other is being copied. The tree that a call returns is
    overwritten by the next but one.
    """

    def __init__(self, tree: Any, device: torch.device) -> None:
        self.tree = tree
        self.buffers = [PinnedBuffers(tree, device) for _ in range(2)]
        self.turn = 0

    def __call__(self) -> Any:
        """Return the tree as it is now, on the device."""
        buffers = self.buffers[self.turn]
        self.turn = 1 - self.turn
        if buffers.sent is not None:
            buffers.sent.synchronize()
        tree_copy_(buffers.host_tree, self.tree)
        buffers.device.copy_(buffers.host, non_blocking=True)
        if buffers.sent is not None:
            buffers.sent.record()
        return buffers.device_tree


def _views(buffer: Tensor, tree: Any, starts: list[int]) -> Any:
    """Return the tree's tensors as parts of a buffer."""
    remaining = iter(starts)

    def view(leaf: Tensor) -> Tensor:
        start = next(remaining)
        return buffer[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)

    return tree_map(view, tree)

"""What a simulator's managers hold in Python: where tensors are kept, and the numbers and flags beside them.

A CUDA graph replays work on the device and nothing of what Python did meanwhile. So a part of a step may be captured
only if what it does in Python is known: tensors put in another's place, caches filled, flags set.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

SCALARS = (int, float, bool, str, type(None))
LEAVES = (Tensor, *SCALARS)
SKIPPED = {"torch", "warp", "mujoco", "mujoco_warp", "numpy", "builtins", "functools", "types", "re", "enum", "random"}
"""Packages whose objects hold nothing that a manager's step would change."""

Path = tuple[Any, ...]


@contextmanager
def not_collecting() -> Iterator[None]:
    """Leave garbage for later: looking for it takes as long as a walk, and memory freed by chance ends a recording."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass(slots=True)
class Slot:
    """One place: an attribute of an object, a key of a mapping or a number in a list."""

    holder: Any
    """The mapping or list itself; None where it cannot be changed."""
    key: Any
    value: Any

    def set(self, value: Any) -> None:
        """Put another thing there."""
        if self.holder is not None:
            self.holder[self.key] = value

    def now(self) -> Any:
        """What is there now; None if the key is gone."""
        if isinstance(self.holder, dict):
            return _plain(self.holder.get(self.key))
        if self.holder is None or self.key >= len(self.holder):
            return self.value if self.holder is None else None
        return _plain(self.holder[self.key])

    def moved(self) -> bool:
        """Whether another thing is there than when this was noted."""
        now, was = self.now(), self.value
        if isinstance(now, Tensor) and isinstance(was, Tensor):
            return place_of(now) != place_of(was)
        return now is not was and not (isinstance(now, SCALARS) and now == was)

    def rehome(self, shared: bool = False) -> bool:
        """Copy a tensor of the same form that took another's place to where that is; False if it is not like that.

        Where that one is `shared` with another place, which must keep it, a copy of the new one stays instead.
        """
        now, home = self.now(), self.value
        if not isinstance(now, Tensor) or not isinstance(home, Tensor) or not _has_own_memory(home):
            return False
        if (now.shape, now.dtype, now.device) != (home.shape, home.dtype, home.device):
            return False
        if shared:
            self.value = home = now.clone()
        elif now.data_ptr() != home.data_ptr():
            home.copy_(now)
        self.set(home)
        return True


@dataclass
class Roots:
    """Where to look, and what to leave out."""

    objects: dict[str, Any]
    skipped_ids: set[int] = field(default_factory=set)
    skipped_keys: frozenset[str] = frozenset()

    def slots(self) -> dict[Path, Slot]:
        """All places by their path, each object once."""
        found: dict[Path, Slot] = {}
        with not_collecting():
            self._walk((), self.objects, set(), found)
        return found

    def _walk(self, path: Path, thing: Any, seen: set[int], found: dict[Path, Slot]) -> None:
        """Two thousand places, in every recording: hence no more than a look at the type of each."""
        seen.add(id(thing))
        holder, items = _items(thing, _kind(type(thing)))
        for key, value in items:
            if key in self.skipped_keys:
                continue
            kind, here = _kind(type(value)), (*path, key)
            if kind == "array":
                kind, value = "leaf", value._tensor
            found[here] = Slot(holder, key, value)
            if kind != "leaf" and id(value) not in seen and id(value) not in self.skipped_ids:
                self._walk(here, value, seen, found)


def _plain(value: Any) -> Any:
    """The tensor behind mjlab's view of a Warp array."""
    return value._tensor if _kind(type(value)) == "array" else value


@cache
def _kind(cls: type) -> str:
    """What is to be found in things of a type: `leaf` is nothing further, `object` what its attributes hold."""
    if cls.__name__ == "TorchArray":
        return "array"
    for kind in (dict, list, tuple):
        if issubclass(cls, kind):
            return kind.__name__
    if cls.__name__ == "WarpBridge":
        return "bridge"
    closed = issubclass(cls, (*LEAVES, type)) or cls.__module__.partition(".")[0] in SKIPPED
    return "leaf" if closed or not cls.__dictoffset__ else "object"


def _items(thing: Any, kind: str) -> tuple[Any, Any]:
    """What holds the things in it, if they can be changed there, and pairs of key and thing."""
    if kind == "dict":
        return thing, thing.items()
    if kind == "bridge":
        return None, vars(thing)["_wrapped_cache"].items()
    if kind == "object":
        return vars(thing), vars(thing).items()
    return (thing if kind == "list" else None), enumerate(thing)


class Moment:
    """Everything at one time: what lies where and, with `contents`, copies of the tensors and the random stream."""

    def __init__(self, roots: Roots, device: torch.device, *, contents: bool = True) -> None:
        self.slots, self.device, self.contents = roots.slots(), device, contents
        self.tensors = {p: s.value for p, s in self.slots.items() if contents and isinstance(s.value, Tensor)}
        self.copies = {path: tensor.clone() for path, tensor in self.tensors.items()}
        self.random = self.generator().get_state()

    def restore(self) -> None:
        """Put everything back."""
        for slot in self.slots.values():
            if slot.now() is not slot.value:
                slot.set(slot.value)
        for path, tensor in self.tensors.items():
            if _has_own_memory(tensor):
                tensor.copy_(self.copies[path])
        if self.contents:
            self.generator().set_state(self.random)

    def generator(self) -> torch.Generator:
        """The random stream that simulators draw from."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def differences(self, other: Moment) -> list[str]:
        """Paths of tensors whose contents are not equal, with how far apart they are."""
        found = []
        for path, mine in self.copies.items():
            theirs = other.copies.get(path)
            if theirs is None or theirs.shape != mine.shape:
                found.append(f"{name_of(path)} has another shape")
            elif not torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
                apart = (mine.double() - theirs.double()).abs().nan_to_num().max().item()
                found.append(f"{name_of(path)} by {apart:.3g}")
        if not torch.equal(self.random, other.random):
            found.append("the random stream")
        return found


def name_of(path: Path) -> str:
    """A path as people read it."""
    return ".".join(map(str, path))


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Two views of the same memory are one tensor to a graph."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _has_own_memory(tensor: Tensor) -> bool:
    """False for rows that are one and the same in memory, which cannot be written."""
    return all(stride != 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@dataclass
class Effects:
    """What a part of a step did in Python, to be done again with every replay."""

    values: list[tuple[Slot, Any]] = field(default_factory=list)

    homes: list[Slot] = field(default_factory=list)
    """Places where a tensor took another's place."""

    @staticmethod
    def between(before: dict[Path, Slot], after: dict[Path, Slot]) -> Effects:
        """All places whose content is another one; a tensor of the same form is copied back to where it was.

        The copies are work on the device and so a part of what is being captured.
        """
        effects = Effects()
        for slot in before.values():
            if slot.holder is None or not slot.moved():
                continue
            if slot.rehome():
                effects.homes.append(slot)
            else:
                effects.values.append((slot, slot.now()))
        new = [slot for path, slot in after.items() if path not in before and slot.holder is not None]
        effects.values += [(slot, slot.value) for slot in new]
        return effects

    def apply(self) -> None:
        """Do it again."""
        for slot, value in self.values:
            slot.set(value)

"""What a simulator's managers hold in Python: where tensors are kept, and the numbers and flags beside them.

A CUDA graph replays work on the device and nothing of what Python did meanwhile. So a part of a step may be captured
only if what it does in Python is known: tensors put in another's place, caches filled, flags set.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.core.struct import copy_all_

SCALARS = (int, float, bool, str, type(None))
LEAVES = (Tensor, *SCALARS)
SKIPPED = {"torch", "warp", "mujoco", "mujoco_warp", "numpy", "builtins", "functools", "types", "re", "enum", "random"}
"""Packages whose objects hold nothing that a manager's step would change."""
CACHE = "_cached_data"
"""Where a sensor of mjlab keeps what it has worked out."""

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


class Held(NamedTuple):
    """What one object has in it at one time."""

    holder: Any
    """The mapping or list itself; None where it cannot be changed."""
    keys: Sequence[Any]
    values: list[Any]

    def is_as_it_was(self) -> bool:
        """Whether the same things are there now."""
        if self.holder is None:
            return True
        now = list(map(self.holder.get, self.keys)) if isinstance(self.holder, dict) else self.holder
        return len(now) == len(self.values) and not any(map(is_not, now, self.values))


@dataclass
class Places:
    """What lies where at one time."""

    values: dict[Path, Any] = field(default_factory=dict)
    held: list[tuple[Path, Held]] = field(default_factory=list)
    """The same by the object that has it."""

    @cached_property
    def holders(self) -> dict[Path, Any]:
        """Mappings and lists by the path of the object."""
        return {path: held.holder for path, held in self.held}

    def slot(self, path: Path) -> Slot:
        """A place."""
        return Slot(self.holders[path[:-1]], path[-1], self.values[path])

    def suspects(self) -> Iterator[tuple[Path, Slot]]:
        """Places of objects in which something is not what it was."""
        for path, held in self.held:
            if not held.is_as_it_was():
                own = ((*path, key) for key in held.keys)
                yield from [(place, self.slot(place)) for place in own if place in self.values]

    def have_other_keys(self) -> bool:
        """Whether an object has something at another place now."""
        mappings = [held for _, held in self.held if isinstance(held.holder, dict)]
        lists = [held for _, held in self.held if isinstance(held.holder, list)]
        return any(list(m.holder) != m.keys for m in mappings) or any(len(x.holder) != len(x.keys) for x in lists)

    def is_stale(self, path: Path) -> bool:
        """Whether something lies in a sensor's cache that is no longer valid: it is worked out before it is read."""
        return CACHE in path and self.values.get((*path[: path.index(CACHE)], "_cache_valid")) is False

    def moved(self) -> Iterator[tuple[Path, Slot]]:
        """Places where another thing is than was."""
        return ((path, slot) for path, slot in self.suspects() if slot.moved())


class Form:
    """What follows from the keys of an object and the types of what it has in it."""

    def __init__(self, path: Path, keys: Sequence[Any], types: list[type], skipped: frozenset[str]) -> None:
        self.keys, self.types = keys, types
        kept = [index for index, key in enumerate(keys) if key not in skipped]
        self.paths = [(*path, keys[index]) for index in kept]
        kinds = [_kind(types[index]) for index in kept]
        self.is_plain = len(kept) == len(keys) and "array" not in kinds
        self.kept = kept
        inner = [index for index, kind in zip(kept, kinds, strict=True) if kind not in ("leaf", "array")]
        self.inner = {index: Inner((*path, keys[index]), _kind(types[index])) for index in inner}
        """What has further things in it."""


@dataclass
class Inner:
    """An object within another."""

    path: Path
    kind: str
    form: Form | None = None
    """As it was found before: hundreds of objects are looked at in every recording."""


@dataclass
class Roots:
    """Where to look, and what to leave out."""

    objects: dict[str, Any]
    skipped_ids: set[int] = field(default_factory=set)
    skipped_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Nothing was looked at yet."""
        self._first = Inner((), "dict")

    def places(self) -> Places:
        """Everything there is, each object once."""
        found = Places()
        with not_collecting():
            self._walk(self._first, self.objects, set(self.skipped_ids), found)
        return found

    def _walk(self, inner: Inner, thing: Any, seen: set[int], found: Places) -> None:
        seen.add(id(thing))
        holder, keys, values = _contents(thing, inner.kind)
        form, types = inner.form, list(map(type, values))
        if form is None or form.keys != keys or form.types != types:
            form = inner.form = Form(inner.path, keys, types, self.skipped_keys)
        found.held.append((inner.path, Held(holder, keys, values)))
        plain = values if form.is_plain else [_plain(values[index]) for index in form.kept]
        found.values.update(zip(form.paths, plain, strict=True))
        for index, further in form.inner.items():
            value = values[index]
            if id(value) not in seen:
                self._walk(further, value, seen, found)


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


def _contents(thing: Any, kind: str) -> tuple[Any, Sequence[Any], list[Any]]:
    """What holds the things in it, if they can be changed there, with keys and things."""
    if kind == "object":
        thing = vars(thing)
    elif kind == "list" or kind == "tuple":
        return (thing if kind == "list" else None), range(len(thing)), list(thing)
    elif kind == "bridge":
        thing = vars(thing)["_wrapped_cache"]
        return None, list(thing), list(thing.values())
    return thing, list(thing), list(thing.values())


class Moment:
    """Everything at one time: what lies where and, with `contents`, copies of the tensors and the random stream."""

    def __init__(self, roots: Roots, device: torch.device, *, contents: bool = True) -> None:
        self.places, self.device, self.contents = roots.places(), device, contents
        self.tensors = {p: v for p, v in self.places.values.items() if contents and isinstance(v, Tensor)}
        self.copies = {path: tensor.clone() for path, tensor in self.tensors.items()}
        self.own = [path for path, tensor in self.tensors.items() if _has_own_memory(tensor)]
        self.random = self.generator().get_state()

    def restore(self) -> None:
        """Put everything back."""
        for _, slot in self.places.suspects():
            if slot.now() is not slot.value:
                slot.set(slot.value)
        copy_all_([self.tensors[path] for path in self.own], [self.copies[path] for path in self.own])
        if self.contents:
            self.generator().set_state(self.random)

    def generator(self) -> torch.Generator:
        """The random stream that simulators draw from."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def differences(self, other: Moment) -> list[str]:
        """Paths of tensors whose contents are not equal, with how far apart they are."""
        own = {path: mine for path, mine in self.copies.items() if not self.places.is_stale(path)}
        pairs = {path: (mine, other.copies.get(path)) for path, mine in own.items()}
        alike = [(mine, theirs) for mine, theirs in pairs.values() if theirs is not None and theirs.shape == mine.shape]
        all_mine, all_theirs = (_bits([pair[which] for pair in alike], self.device) for which in (0, 1))
        if len(alike) == len(pairs) and torch.equal(all_mine, all_theirs):
            pairs.clear()  # none is looked at by itself, which would wait for the device each time
        found = []
        for path, (mine, theirs) in pairs.items():
            if theirs is None or theirs.shape != mine.shape:
                found.append(f"{name_of(path)} has another shape")
            elif not torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
                apart = (mine.double() - theirs.double()).abs().nan_to_num().max().item()
                found.append(f"{name_of(path)} by {apart:.3g}")
        if not torch.equal(self.random, other.random):
            found.append("the random stream")
        return found


def _bits(tensors: list[Tensor], device: torch.device) -> Tensor:
    """All that is in them, one after another."""
    none = torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([none, *(tensor.reshape(-1).view(torch.uint8).to(device) for tensor in tensors)])


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

    homes: dict[Path, Slot] = field(default_factory=dict)
    """Places where a tensor took another's place."""

    @staticmethod
    def between(before: Places, roots: Roots) -> Effects:
        """All places whose content is another one; a tensor of the same form is copied back to where it was.

        The copies are work on the device and so a part of what is being captured.
        """
        effects = Effects()
        for path, slot in before.moved():
            if slot.rehome():
                effects.homes[path] = slot
            else:
                effects.values.append((slot, slot.now()))
        if before.have_other_keys() or any(_kind(type(value)) not in ("leaf", "array") for _, value in effects.values):
            after = roots.places()
            new = [after.slot(path) for path in after.values if path not in before.values]
            effects.values += [(slot, slot.value) for slot in new if slot.holder is not None]
        return effects

    def apply(self) -> None:
        """Do it again."""
        for slot, value in self.values:
            slot.set(value)

"""A simulator's state in Python: which tensor is stored where, and plain numbers and flags.

A CUDA graph replays work on the device and nothing that Python did meanwhile. A segment of a step
may therefore be captured only if its effects in Python are known: tensors that replace other
tensors, caches, flags. A `HeapView` lists everything that is reachable from some roots at one time,
a `Snapshot` can restore it, and `Effects` are the difference between two views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.core.machine import gc_paused
from canter.core.struct import copy_all_

SCALARS = (int, float, bool, str, type(None))
LEAVES = (Tensor, *SCALARS)
SKIPPED = {"torch", "warp", "mujoco", "mujoco_warp", "numpy", "builtins", "functools", "types", "re", "enum", "random"}
"""Packages whose objects contain nothing that a manager's step changes."""
SENSOR_CACHE = "_cached_data"
"""Attribute in which a sensor of mjlab caches its result; `_cache_valid` is its flag."""

Path = tuple[Any, ...]


@dataclass(slots=True)
class Slot:
    """An attribute of an object, key of a mapping or index of a list, and its viewed value."""

    container: Any
    """The mapping or list itself; None if it is immutable."""
    key: Any
    value: Any

    def set(self, value: Any) -> None:
        """Assign a value, unless the container is immutable."""
        if self.container is not None:
            self.container[self.key] = value

    def current(self) -> Any:
        """Return the present value; None if the key is gone."""
        if self.container is None:
            return self.value
        if isinstance(self.container, dict):
            return _unwrap(self.container.get(self.key))
        if self.key >= len(self.container):
            return None
        return _unwrap(self.container[self.key])

    def is_replaced(self) -> bool:
        """Return whether the slot holds another number or object, or a tensor elsewhere."""
        current = self.current()
        if isinstance(current, Tensor) and isinstance(self.value, Tensor):
            return memory_key(current) != memory_key(self.value)
        if isinstance(current, SCALARS) and current == self.value:
            return False
        return current is not self.value

    def copy_back(self, shared: bool = False) -> bool:
        """Copy the present tensor into the viewed one; return False if layouts differ.

        If the viewed tensor is `shared` with another slot, which must keep its contents, a clone of
        the new tensor becomes the viewed one instead.
        """
        current = self.current()
        original = self.value
        if not isinstance(current, Tensor) or not isinstance(original, Tensor) or not _is_writable(original):
            return False
        if (current.shape, current.dtype, current.device) != (original.shape, original.dtype, original.device):
            return False
        if shared:
            original = current.clone()
            self.value = original
        elif current.data_ptr() != original.data_ptr():
            original.copy_(current)
        self.set(original)
        return True


class ContainerView(NamedTuple):
    """The contents of one object, mapping or list at one time."""

    container: Any
    """The mapping or list itself; None if it is immutable."""
    keys: Sequence[Any]
    values: list[Any]

    def is_unchanged(self) -> bool:
        """Return whether the container still holds the same objects."""
        if self.container is None:
            return True
        current = self.container
        if isinstance(current, dict):
            current = list(map(current.get, self.keys))
        return len(current) == len(self.values) and not any(map(is_not, current, self.values))

    def has_same_keys(self) -> bool:
        """Return whether no key was added, removed or reordered."""
        if isinstance(self.container, dict):
            return list(self.container) == self.keys
        return not isinstance(self.container, list) or len(self.container) == len(self.keys)


@dataclass
class HeapView:
    """The values that are reachable from some roots at one time, by their paths."""

    values: dict[Path, Any] = field(default_factory=dict)
    containers: list[tuple[Path, ContainerView]] = field(default_factory=list)

    @cached_property
    def _container_at(self) -> dict[Path, Any]:
        return {path: view.container for path, view in self.containers}

    def slot(self, path: Path) -> Slot:
        """Return the slot of a path."""
        return Slot(self._container_at[path[:-1]], path[-1], self.values[path])

    def slots_of_changed_containers(self) -> Iterator[tuple[Path, Slot]]:
        """Yield all slots of the containers in which something changed since the view."""
        for path, view in self.containers:
            if view.is_unchanged():
                continue
            slots = ((*path, key) for key in view.keys)
            # A list, as callers assign to slots while they iterate.
            yield from [(slot, self.slot(slot)) for slot in slots if slot in self.values]

    def replaced_slots(self) -> Iterator[tuple[Path, Slot]]:
        """Yield the slots whose value was replaced since the view."""
        return ((path, slot) for path, slot in self.slots_of_changed_containers() if slot.is_replaced())

    def keys_changed(self) -> bool:
        """Return whether a container has other keys than at the time of the view."""
        return not all(view.has_same_keys() for _, view in self.containers)

    def is_stale(self, path: Path) -> bool:
        """Return whether a path lies in an invalid cache, which is recomputed before reading."""
        if SENSOR_CACHE not in path:
            return False
        valid = (*path[: path.index(SENSOR_CACHE)], "_cache_valid")
        return self.values.get(valid) is False

    def valid_caches(self) -> list[tuple[Path, Slot]]:
        """Return the slots of valid caches of sensors, which a segment may read."""
        slots = [(path, self.slot(path)) for path in self.values if path[-1] == SENSOR_CACHE]
        return [(path, slot) for path, slot in slots if slot.container.get("_cache_valid")]


class ContainerLayout:
    """Paths and kinds of a container's values, which depend on its keys and their types."""

    def __init__(self, path: Path, keys: Sequence[Any], types: list[type], skipped: frozenset[str]) -> None:
        self.keys = keys
        self.types = types
        self.kept = [index for index, key in enumerate(keys) if key not in skipped]
        """Indices of the keys that are viewed."""
        self.paths = [(*path, keys[index]) for index in self.kept]
        kinds = {index: _kind(types[index]) for index in self.kept}
        self.is_plain = len(self.kept) == len(keys) and "array" not in kinds.values()
        """All values are viewed as they are."""
        self.children = {
            index: Node((*path, keys[index]), kind) for index, kind in kinds.items() if kind not in ("leaf", "array")
        }
        """Containers among the values, by index."""


@dataclass
class Node:
    """A container that a walk has visited."""

    path: Path
    kind: str
    layout: ContainerLayout | None = None
    """Kept between walks, as every recording walks over hundreds of containers."""


@dataclass
class Roots:
    """The objects at which a view starts, and what it leaves out."""

    objects: dict[str, Any]
    skipped_ids: set[int] = field(default_factory=set)
    skipped_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Begin with an empty layout."""
        self._root = Node((), "dict")

    def view(self) -> HeapView:
        """Return everything that is reachable, each container once."""
        found = HeapView()
        with gc_paused():
            self._walk(self._root, self.objects, set(self.skipped_ids), found)
        return found

    def _walk(self, node: Node, thing: Any, visited: set[int], found: HeapView) -> None:
        visited.add(id(thing))
        container, keys, values = _contents(thing, node.kind)
        types = list(map(type, values))
        layout = node.layout
        if layout is None or layout.keys != keys or layout.types != types:
            layout = ContainerLayout(node.path, keys, types, self.skipped_keys)
            node.layout = layout
        found.containers.append((node.path, ContainerView(container, keys, values)))
        plain = values if layout.is_plain else [_unwrap(values[index]) for index in layout.kept]
        found.values.update(zip(layout.paths, plain, strict=True))
        for index, child in layout.children.items():
            value = values[index]
            if id(value) not in visited:
                self._walk(child, value, visited, found)


def _unwrap(value: Any) -> Any:
    """Return the tensor inside mjlab's view of a Warp array, and any other value itself."""
    return value._tensor if _kind(type(value)) == "array" else value


@cache
def _kind(cls: type) -> str:
    """Return how to walk into values of a type; a `leaf` contains nothing further."""
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
    """Return the mutable container (None if there is none), the keys and the values."""
    if kind in ("list", "tuple"):
        return (thing if kind == "list" else None), range(len(thing)), list(thing)
    if kind == "bridge":
        arrays = vars(thing)["_wrapped_cache"]
        return None, list(arrays), list(arrays.values())
    mapping = vars(thing) if kind == "object" else thing
    return mapping, list(mapping), list(mapping.values())


class Snapshot:
    """A view and, with `contents`, copies of all tensors and of the generator's state."""

    def __init__(self, roots: Roots, device: torch.device, *, contents: bool = True) -> None:
        self.view = roots.view()
        self.device = device
        self.contents = contents
        self.tensors: dict[Path, Tensor] = {}
        if contents:
            self.tensors = {path: value for path, value in self.view.values.items() if isinstance(value, Tensor)}
        self.copies = {path: tensor.clone() for path, tensor in self.tensors.items()}
        self.generator_state = self.generator().get_state()

    def restore(self) -> None:
        """Restore slots, contents of tensors and the random generator."""
        for _, slot in self.view.slots_of_changed_containers():
            if slot.current() is not slot.value:
                slot.set(slot.value)
        writable = [path for path, tensor in self.tensors.items() if _is_writable(tensor)]
        copy_all_([self.tensors[path] for path in writable], [self.copies[path] for path in writable])
        if self.contents:
            self.generator().set_state(self.generator_state)

    def generator(self) -> torch.Generator:
        """Return the default generator of the device, from which simulators draw."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def differences(self, other: Snapshot) -> list[str]:
        """Return the paths of tensors that differ, each with the greatest difference."""
        own = {path: mine for path, mine in self.copies.items() if not self.view.is_stale(path)}
        pairs = {path: (mine, other.copies.get(path)) for path, mine in own.items()}
        if self._all_equal(list(pairs.values())):
            pairs.clear()  # comparing one by one would wait for the device each time
        found = []
        for path, (mine, theirs) in pairs.items():
            if theirs is None or theirs.shape != mine.shape:
                found.append(f"{format_path(path)} has another shape")
            elif not torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
                difference = (mine.double() - theirs.double()).abs().nan_to_num().max().item()
                found.append(f"{format_path(path)} by {difference:.3g}")
        if not torch.equal(self.generator_state, other.generator_state):
            found.append("the random stream")
        return found

    def _all_equal(self, pairs: list[tuple[Tensor, Tensor | None]]) -> bool:
        """Compare the bits of all tensors at once."""
        mine = [one for one, _ in pairs]
        theirs = [other for one, other in pairs if other is not None and other.shape == one.shape]
        return len(theirs) == len(mine) and torch.equal(_bits(mine, self.device), _bits(theirs, self.device))


def _bits(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of all tensors, concatenated."""
    none = torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([none, *(tensor.reshape(-1).view(torch.uint8).to(device) for tensor in tensors)])


def format_path(path: Path) -> str:
    """Return a path as `action.term.offset`."""
    return ".".join(map(str, path))


def memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that a CUDA graph cannot distinguish."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_writable(tensor: Tensor) -> bool:
    """Return False for an expanded tensor, in which several elements share one place in memory."""
    return all(stride != 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@dataclass
class Effects:
    """The changes that a segment of a step made in Python, to be repeated after every replay."""

    assignments: list[tuple[Slot, Any]] = field(default_factory=list)
    copied_back: dict[Path, Slot] = field(default_factory=dict)
    """Slots in which a new tensor replaced the original, and was copied into its memory."""

    @staticmethod
    def since(before: HeapView, roots: Roots) -> Effects:
        """Return all changes since a view; copy new tensors to the addresses of the old.

        These copies run on the device, and so they become a part of the graph that is being
        captured.
        """
        effects = Effects()
        for path, slot in before.replaced_slots():
            if slot.copy_back():
                effects.copied_back[path] = slot
            else:
                effects.assignments.append((slot, slot.current()))
        new_containers = any(_kind(type(value)) not in ("leaf", "array") for _, value in effects.assignments)
        if new_containers or before.keys_changed():
            after = roots.view()
            new = [after.slot(path) for path in after.values if path not in before.values]
            effects.assignments += [(slot, slot.value) for slot in new if slot.container is not None]
        return effects

    def apply(self) -> None:
        """Repeat the assignments."""
        for slot, value in self.assignments:
            slot.set(value)

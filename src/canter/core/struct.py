"""Trees of tensors: dataclasses, dicts and tuples whose leaves are tensors or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from canter.core.dispatch import has_kernels

Obs = dict[str, Tensor]
"""Observation groups by name; every tensor shares the same leading axes."""

Metrics = dict[str, Tensor]
"""0-d tensors on the training device, named by path: `loss/policy`, `policy/kl`."""

State = Any
"""Recurrent state: a tree of tensors, `()` for feed-forward networks."""


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `fn` to every tensor of `tree` and the matching tensors of `others`."""
    # isinstance rather than match, and the most frequent type first: this runs many times per step.
    if isinstance(tree, Tensor):
        return fn(tree, *others)
    if isinstance(tree, dict):
        return {key: tree_map(fn, leaf, *[other[key] for other in others]) for key, leaf in tree.items()}
    if isinstance(tree, TensorStruct):
        names = tree.__dataclass_fields__
        return type(tree)(**{n: tree_map(fn, getattr(tree, n), *[getattr(o, n) for o in others]) for n in names})
    if isinstance(tree, tuple):
        return tuple([tree_map(fn, *leaves) for leaves in zip(tree, *others, strict=True)])
    if tree is None:
        return None
    raise TypeError(f"a tensor tree holds tensors, dicts, tuples, TensorStructs and None, not {type(tree).__name__}")


def tree_leaves(tree: Any) -> list[Tensor]:
    """Return every tensor of `tree`, in the order of `tree_map`."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, TensorStruct):
        tree = tree.__dict__
    parts = tree.values() if isinstance(tree, dict) else tree or ()
    leaves: list[Tensor] = []
    for part in parts:  # mostly tensors: a recursive call would cost more than this test
        leaves += [part] if isinstance(part, Tensor) else tree_leaves(part)
    return leaves


def to_dicts(tree: Any) -> Any:
    """Return copies of all tensors on the CPU, with dataclasses as dicts, ready to be saved."""
    if isinstance(tree, TensorStruct):
        return {name: to_dicts(getattr(tree, name)) for name in tree.__dataclass_fields__}
    if isinstance(tree, dict):
        return {key: to_dicts(leaf) for key, leaf in tree.items()}
    if isinstance(tree, tuple):
        return tuple(to_dicts(leaf) for leaf in tree)
    return None if tree is None else tree.detach().to("cpu", copy=True)


@has_kernels
def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` into the memory of the matching target, with one call per dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        same_dtype = by_dtype.setdefault(target.dtype, ([], []))
        same_dtype[0].append(target)
        same_dtype[1].append(source)
    for into, values in by_dtype.values():
        torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage]


@has_kernels
def fused_writer(buffers: list[Tensor]) -> Callable[[int, list[Tensor | None]], bool]:
    """Return a function `write(t, values)` that copies values to index t of the buffers `[T, ...]`.

    A None among the values, and buffers beyond the last value, leave the buffer unchanged. `write`
    returns False if it did nothing because the values are not supported: then use `copy_all_`.
    """
    return lambda t, values: False


@has_kernels
def maybe_any(flags: Tensor) -> bool:
    """Return False only if no flag is set and that is known without waiting for the device."""
    return True


def tree_copy_(target: Any, source: Any) -> None:
    """Copy every tensor of `source` into the memory of the matching tensor of `target`."""
    tree_map(lambda into, value: into.copy_(value, non_blocking=True), target, source)


@dataclass
class TensorStruct:
    """Base of `@dataclass` containers of tensors: map, index and copy all fields at once."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the same struct with `fn` applied to every tensor."""
        return tree_map(fn, self)

    def __getitem__(self, index: Any) -> Self:
        """Return the same struct with every tensor indexed."""
        return tree_map(lambda leaf: leaf[index], self)

    def copy_(self, source: Self) -> None:
        """Copy `source` into the memory of this struct; addresses stay."""
        tree_copy_(self, source)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros of leading `shape` and the trailing shape, dtype and device of `like[0]`."""
    return torch.zeros((*shape, *like.shape[1:]), dtype=like.dtype, device=like.device)

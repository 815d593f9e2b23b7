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
"""Recurrent state: a tree of tensors, `()` for networks without memory."""


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `fn` to every tensor of `tree` (and the matching tensors of `others`), keeping the structure."""
    # Plain tests rather than patterns, and the most frequent one first: this runs many times in every step.
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
    """Every tensor of `tree`, in the order of `tree_map`."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, TensorStruct):
        tree = tree.__dict__
    parts, leaves = tree.values() if isinstance(tree, dict) else tree or (), []
    for part in parts:  # mostly tensors, for which a call would take longer than the rest
        leaves += [part] if isinstance(part, Tensor) else tree_leaves(part)
    return leaves


def to_dicts(tree: Any) -> Any:
    """Copies of all tensors on the CPU, with dataclasses as dicts: plain data that can be saved."""
    if isinstance(tree, TensorStruct):
        return {name: to_dicts(getattr(tree, name)) for name in tree.__dataclass_fields__}
    if isinstance(tree, dict):
        return {key: to_dicts(leaf) for key, leaf in tree.items()}
    if isinstance(tree, tuple):
        return tuple(to_dicts(leaf) for leaf in tree)
    return None if tree is None else tree.detach().to("cpu", copy=True)


@has_kernels
def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` into the memory of the matching one of `targets`, those of one dtype at once."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, of = by_dtype.setdefault(target.dtype, ([], []))
        into.append(target)
        of.append(source)
    for into, of in by_dtype.values():
        torch._foreach_copy_(into, of)  # pyright: ignore[reportPrivateImportUsage]


@has_kernels
def row_writer(buffers: list[Tensor]) -> Callable[[int, list[Tensor | None]], bool]:
    """A quick `write(t, values)` to row t of each buffer `[T, ...]`, where there is one.

    None, and buffers beyond the last value, stay as they are. It gives False where it did nothing, for it does not
    know such values: then it is up to `copy_all_`.
    """
    return lambda t, values: False


@has_kernels
def may_hold(flags: Tensor) -> bool:
    """False only where it is known at once that no flag holds; what would then be without effect can be left out."""
    return True


def tree_copy_(target: Any, source: Any) -> None:
    """Copy every tensor of `source` into the memory of the matching tensor of `target`."""
    tree_map(lambda into, of: into.copy_(of, non_blocking=True), target, source)


@dataclass
class TensorStruct:
    """Base for `@dataclass` containers of tensors; adds mapping, indexing and in-place copying over all fields."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same struct with `fn` applied to every tensor."""
        return tree_map(fn, self)

    def __getitem__(self, index: Any) -> Self:
        """The same struct with every tensor indexed alike."""
        return tree_map(lambda leaf: leaf[index], self)

    def copy_(self, source: Self) -> None:
        """Copy `source` into this struct's memory; addresses stay."""
        tree_copy_(self, source)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of leading `shape` and the trailing shape, dtype and device of one row of `like`."""
    return torch.zeros((*shape, *like.shape[1:]), dtype=like.dtype, device=like.device)

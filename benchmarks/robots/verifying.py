"""Runs every captured part twice from the same state, eagerly and as a graph, and counts what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canter.envs.robots.host_state import name_of
from canter.envs.robots.segments import Segment, Segments


class Contents:
    """Copies of all tensors that a simulator's managers hold, in a few operations."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        self.names, self.tensors = list(found), list(found.values())
        self.copies = [tensor.clone() for tensor in self.tensors]

    def save(self) -> None:
        """Copy what is there now."""
        torch._foreach_copy_(self.copies, self.tensors)

    def restore(self) -> None:
        """Put it back."""
        torch._foreach_copy_(self.tensors, self.copies)


class Verifying(Segments):
    """`Segments` whose replays are held against the eager part each time; takes over those of a captured step."""

    @staticmethod
    def over(step: Any) -> Verifying:
        """Put it in the place of a step's segments."""
        own = Verifying.__new__(Verifying)
        vars(own).update(vars(step.segments))
        own.checked, own.wrong, own.worst, own.contents = {}, {}, {}, None
        step.segments = own
        return own

    checked: dict[str, int]
    wrong: dict[str, int]
    worst: dict[str, str]
    contents: tuple[Contents, Contents] | None

    def _replayed(self, name: str, part: Callable[[], Any], segment: Segment) -> Any:
        start, after = self._contents()
        generator = torch.cuda.default_generators[self.device.index or 0]
        random, log = generator.get_state(), dict(self.log())
        start.save()
        output = [t.clone() for t in _tensors(self._plainly(part))]
        after.save()
        random_after = generator.get_state()
        start.restore()
        generator.set_state(random)
        self._log_is(log)
        result = super()._replayed(name, part, segment)
        self.checked[name] = self.checked.get(name, 0) + 1
        pairs = [*zip(after.names, after.copies, after.tensors, strict=True)]
        pairs += [("its result", a, b) for a, b in zip(output, _tensors(result), strict=True)]
        same = torch.stack([_equal(a, b) for _, a, b in pairs])
        if not bool(same.all()) or not torch.equal(random_after, generator.get_state()):
            self.wrong[name] = self.wrong.get(name, 0) + 1
            i = int(same.logical_not().nonzero()[0]) if not bool(same.all()) else -1
            if i < 0:
                self.worst[name] = "the random stream"
            else:
                apart = (pairs[i][1].double() - pairs[i][2].double()).abs().nan_to_num().max().item()
                self.worst[name] = f"{pairs[i][0]} by {apart:.3g}"
        return result

    def _contents(self) -> tuple[Contents, Contents]:
        if self.contents is None:
            seen: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
            for path, slot in self.roots.slots().items():
                tensor = slot.value
                if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.numel() and 0 not in tensor.stride():
                    seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), (name_of(path), tensor))
            found = dict(seen.values())
            self.contents = Contents(found), Contents(found)
        return self.contents

    def summary(self) -> dict[str, Any]:
        """By part: replays checked, how many differed, and where."""
        return {
            name: {"checked": count, "differed": self.wrong.get(name, 0), "where": self.worst.get(name, "")}
            for name, count in self.checked.items()
        }


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """0-d bool: the same numbers; NaN equals NaN."""
    return ((a == b) | ((a != a) & (b != b))).all()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for part in tree for t in _tensors(part)] if isinstance(tree, list | tuple) else []

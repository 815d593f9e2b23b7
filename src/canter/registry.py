"""Names to things, with an error that offers the nearest name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: which known names look like `name`, or what there is when none does."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(known[:20]) if known else "nothing"
    return f"known: {shown}" + (f" and {len(known) - 20} more" if len(known) > 20 else "")


T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named things of one kind; a name is given once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}
        self._places: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters what it decorates under `name`."""
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def enter(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered twice: at {self._places[name]} and at {place}")
            self._items[name], self._places[name] = item, place
            return item

        return enter

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise KeyError(f"unknown {self.kind} {name!r}: {nearest(name, self._items)}")
        return self._items[name]

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))

"""Names to things: Canter's own, and those that users add to them."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

PLUGINS = "canter.plugins"
"""Entry-point group of installed packages whose modules register things when they are imported."""


class UserError(ValueError):
    """A mistake in what the user gave: settings, a command, a file or an environment.

    The message is complete: the command line shows it in one line, without a traceback.
    """


class UnknownName(UserError, KeyError):
    """A name that a registry does not have; the message advises similar ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: which known names look like `name`, or what there is when none does."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(known[:20]) if known else "nothing"
    return f"known: {shown}" + (f" and {len(known) - 20} more" if len(known) > 20 else "")


registries: dict[str, Registry[Any]] = {}
"""All of them, by the kind of thing that they hold."""

T = TypeVar("T")
Item = TypeVar("Item")


class Registry(Generic[T]):
    """A table of named things of one kind; a name is given once.

    `check` raises TypeError or ValueError for what cannot be entered; `default` is the name that is meant where none is
    given. Looking something up loads the plugins first.
    """

    def __init__(
        self, kind: str, check: Callable[[T], None] = lambda item: None, *, default: str | None = None
    ) -> None:
        self.kind, self.default, self._check = kind, default, check
        self._items: dict[str, T] = {}
        self._places: dict[str, str] = {}
        registries[kind] = self

    def register(self, name: str, *, depth: int = 1) -> Callable[[Item], Item]:
        """Decorator that enters what it decorates under `name`; errors tell the place `depth` callers up."""
        caller = sys._getframe(depth)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def enter(entered: Item) -> Item:
            item = cast(T, entered)  # a decorator that told more would hide the type of what it decorates
            if not name.isprintable():
                raise UserError(f"{self.kind} {name!r}, registered at {place}: a name must be printable")
            if name in self._items:
                raise UserError(f"{self.kind} {name!r} is registered twice: at {self._places[name]} and at {place}")
            try:
                self._check(item)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.kind} {name!r}, registered at {place}: {error}") from error
            self._items[name], self._places[name] = item, place
            return entered

        return enter

    def name_of(self, item: T) -> str | None:
        """The name under which a thing was entered."""
        return next((name for name, entered in self._items.items() if entered is item), None)

    def items(self) -> dict[str, T]:
        """All names and things, in the order in which they were entered."""
        load_plugins()
        return dict(self._items)

    def __getitem__(self, name: str) -> T:
        load_plugins()
        if name not in self._items:
            raise UnknownName(f"unknown {self.kind} {name!r}: {nearest(name, self._items)}")
        return self._items[name]

    def __contains__(self, name: str) -> bool:
        load_plugins()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(sorted(self._items))


def register(kind: str, name: str) -> Callable[[Item], Item]:
    """Decorator that adds an algorithm, network, distribution, environment, scheme, schedule, extension or player.

    From then on `name` means it in Python, in settings files and on the command line. Algorithms, networks, schedules
    and extensions are registered by their settings, a frozen dataclass that builds them.
    """
    if kind not in registries:
        raise UserError(f"register({kind!r}, {name!r}): unknown kind of thing, {nearest(kind, registries)}")
    return registries[kind].register(name, depth=2)


_loaded = False


def load_plugins() -> None:
    """Import, once, what installed packages offer in the entry-point group `canter.plugins`.

    A plugin that fails is a warning: it must not keep a run from starting that does not need it.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # first, because a plugin may look things up while it is imported
    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()
        except Exception as error:
            package = f" of {plugin.dist.name}" if plugin.dist is not None else ""
            text = f"the plugin {plugin.name!r}{package} cannot be used: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

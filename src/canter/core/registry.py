"""Registries: named algorithms, networks, environments, ... of Canter, of plugins and of users."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

PLUGINS = "canter.plugins"
"""Entry-point group of packages whose modules register things when they are imported."""


class UserError(ValueError):
    """A mistake in what the user gave: settings, a command, a file or an environment.

    The message is complete: the command line shows it in one line, without a traceback.
    """


class UnknownName(UserError, KeyError):
    """A name that a registry does not have; the message advises similar ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr


def nearest(name: str, known: Iterable[str]) -> str:
    """Return advice for an error message: known names similar to `name`, or the first 20 of all."""
    known = sorted(known)
    folded: dict[str, list[str]] = {}
    for candidate in known:
        folded.setdefault(_without_version(candidate), []).append(candidate)
    matches = difflib.get_close_matches(_without_version(name), folded, n=3, cutoff=0.5)
    close = [candidate for match in matches for candidate in reversed(folded[match])][:3]
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(known[:20]) if known else "nothing"
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"known: {shown}{more}"


def _without_version(name: str) -> str:
    """Return a name in lower case without a version such as `-v0` and the word `env`, which make any two alike."""
    return re.sub(r"(env(ironment)?)?-v\d+$", "", name.lower())


registries: dict[str, Registry[Any]] = {}
"""All registries by kind, such as `network`."""

T = TypeVar("T")
Item = TypeVar("Item")


class Registry(Generic[T]):
    """A table of named things of one kind; every name is unique.

    `check` raises TypeError or ValueError for items that are not accepted; `default` is the name
    that is used if a setting does not name one. Every lookup loads the plugins first. `fill`
    registers Canter's own items before the first use, if reading them would make the import slow.
    """

    def __init__(
        self,
        kind: str,
        check: Callable[[T], None] = lambda item: None,
        *,
        default: str | None = None,
        fill: Callable[[Registry[T]], None] = lambda registry: None,
    ) -> None:
        self.kind = kind
        self.default = default
        self._check = check
        self._fill = fill
        self._items: dict[str, T] = {}
        self._places: dict[str, str] = {}
        """File and line that registered each name."""
        registries[kind] = self

    def register(self, name: str, *, depth: int = 1) -> Callable[[Item], Item]:
        """Return a decorator that registers what it decorates under `name`.

        Errors name the file and line `depth` callers up.
        """
        self._fill_once()
        caller = sys._getframe(depth)  # to name both places of a name that is registered twice
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def decorate(decorated: Item) -> Item:
            item = cast(T, decorated)  # typed as Item, so that type checkers keep the type of what is decorated
            if not name.isprintable():
                raise UserError(f"{self.kind} {name!r}, registered at {place}: a name must be printable")
            if name in self._items:
                raise UserError(f"{self.kind} {name!r} is registered twice: at {self._places[name]} and at {place}")
            try:
                self._check(item)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.kind} {name!r}, registered at {place}: {error}") from error
            self._items[name] = item
            self._places[name] = place
            return decorated

        return decorate

    def name_of(self, item: T) -> str | None:
        """Return the name under which an item is registered, or None."""
        return next((name for name, registered in self._items.items() if registered is item), None)

    def items(self) -> dict[str, T]:
        """Return all items by name, in the order of registration."""
        return dict(self._known())

    def __getitem__(self, name: str) -> T:
        known = self._known()
        if name not in known:
            raise UnknownName(f"unknown {self.kind} {name!r}: {nearest(name, known)}")
        return known[name]

    def __contains__(self, name: str) -> bool:
        return name in self._known()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def _known(self) -> dict[str, T]:
        load_plugins()
        self._fill_once()
        return self._items

    def _fill_once(self) -> None:
        fill = self._fill
        self._fill = lambda registry: None
        fill(self)


def register(kind: str, name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers something under a name.

    The kinds are algorithm, network, distribution, environment, scheme, schedule, extension and
    player. The name is then known in Python, in settings files and on the command line. For
    algorithms, networks, schedules and extensions register the settings, a frozen dataclass that
    builds them.
    """
    if kind not in registries:
        raise UserError(f"register({kind!r}, {name!r}): unknown kind of thing, {nearest(kind, registries)}")
    return registries[kind].register(name, depth=2)


_loaded = False


def load_plugins() -> None:
    """Import the entry points `canter.plugins` of installed packages, once per process.

    A plugin that fails is only a warning, because the run may not need it.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # before the loop, because a plugin may look up names while it is imported
    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()
        except Exception as error:
            package = "" if plugin.dist is None else f" of {plugin.dist.name}"
            text = f"the plugin {plugin.name!r}{package} cannot be used: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

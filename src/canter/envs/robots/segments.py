"""Parts of a simulator's step as CUDA graphs: captured, checked against the eager ones, replayed, or dropped.

A part is any function over tensors that stay where they are. One that cannot be recorded runs eagerly.
"""

from __future__ import annotations

import logging
import pathlib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from canter.envs.robots.host_state import CACHE, SCALARS, Effects, Moment, Path, Places, Roots, Slot, place_of
from canter.envs.robots.recording import Capturing, Declined, refusing_to_wait

_log = logging.getLogger(__name__)

OWN = (str(pathlib.Path(__file__).parent), str(pathlib.Path(torch.__file__).parent))
"""Folders whose code is not to blame."""

WARM_UP = 3
"""Eager runs of a part before it is captured: they fill caches and show which flags move."""
PATIENCE = 500
"""Eager runs after which a part whose flags never come back is given up."""
CHECKED = 2
"""Graphs of one part that are held against the eager one; others are the same function for another number of rows."""
VARIANTS = 4
"""Graphs of one part for one number of rows: what it reads of other parts lies where their graphs put it."""
MOST = 256
"""Graphs of one part in all; for further numbers of rows one that is not used any more is given up, or it runs
eagerly."""
UNUSED = 500
"""Looks, two in a step, after which a graph is not used any more: as a policy learns, fewer episodes end in a step."""


@dataclass
class Segment:
    """A graph of one part of a step."""

    replay: Callable[[], None]
    output: Any
    log: dict[str, Any]
    effects: Effects
    guards: list[Slot]
    """Caches that it reads, which must be those of its capture."""


@dataclass
class Wanted:
    """What an eager run of a part gave: its result, what it reported, and everything as it was then."""

    output: Any
    log: dict[str, Any]
    moment: Moment

    def unlike(self, segments: Segments, output: Any) -> list[str]:
        """What is not so after a replay."""
        found = self.moment.differences(Moment(segments.roots, segments.device))
        return found + _unlike(self.output, output) + _unlike(self.log, dict(segments.log()))


class Segments:
    """The parts of one environment's step.

    `log` gives the mapping that the simulator reports in, which parts write to; `watched` is a context in which reading
    a counter of the environment is noticed. `record` makes a replay of a function.
    """

    def __init__(
        self,
        roots: Roots,
        device: torch.device,
        log: Callable[[], dict[str, Any]],
        watched: Callable[[], Any],
        record: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]],
    ) -> None:
        self.roots, self.device, self.log, self.watched, self.record = roots, device, log, watched, record
        self.known: dict[tuple[Any, ...], list[Segment]] = {}
        """Graphs by name, numbers of rows and state of the flags."""
        self.dropped: dict[str, str] = {}
        """Parts that run eagerly, and why."""
        self.rows: tuple[Tensor, ...] = ()
        """The rows that the part at hand is run for."""
        self.replayed = self.restored = False
        """Whether the last part was replayed, or everything put back to make a graph of it."""
        self._turn, self._used = 0, dict[Any, int]()
        """How often it was looked, and at which of these a graph was last used."""
        self._seen: Counter[Any] = Counter()
        self._graphs: Counter[str] = Counter()
        self._constants: dict[Any, Tensor] = {}
        self._caches: dict[str, set[Path]] = {}
        """Caches of sensors that a part reads, by its name."""
        self._moving: dict[Path, Slot] = {}
        """Places whose number or flag was seen to change: a part has a graph for each state of them."""
        self._still: dict[Path, Slot] | None = None
        """All other numbers and flags, as graphs have them in them."""
        self._asked: list[tuple[Callable[[Any], Any], Any, Any, list[Path]]] | None = None
        """The same as `look` wants them: how to ask a holder for all of its own, what they were, and where they are."""
        self._homes: dict[Path, Slot] = {}
        """Places where a tensor is put in another's place, with the one that is to stay there."""

    def run(self, name: str, part: Callable[[], Any], rows: tuple[Tensor, ...] = (), *, asks: bool = False) -> Any:
        """The part's result, from its graph where there is one.

        `rows` are the indices that it works on, at addresses that stay; a part that `asks` finds them itself, in this
        order, by `nonzero`.
        """
        self.rows, self.replayed, self.restored = rows, False, False
        if name in self.dropped:
            return self._plainly(part)
        key = (name, *map(len, rows), tuple(map(_state, self._moving.values())))
        for segment in self.known.get(key, ()):
            if not any(slot.moved() for slot in segment.guards):
                self._used[key] = self._turn
                return self._replayed(name, part, segment)
        return self._without_graph(key, part, asks)

    def _without_graph(self, key: tuple[Any, ...], part: Callable[[], Any], asks: bool) -> Any:
        """Run a part eagerly, or make a graph of it once its like has been seen a few times; twice, if others hold."""
        name, graphs, variants = key[0], self._graphs[key[0]], len(self.known.get(key, ()))
        self._seen[name], self._seen[key] = self._seen[name] + 1, self._seen[key] + 1
        if self._seen[name] <= WARM_UP:
            return self._eagerly(part)
        if variants == VARIANTS:
            self.drop(name, "it reads what other parts give, each time at another place")
        elif self._seen[name] >= PATIENCE and not graphs:
            self.drop(name, f"a number of it is another one in every step, one of {self._moving_names()}")
        elif self._seen[key] > self._eager_runs(key) and (graphs < MOST or self._make_room(name)):
            return self._capture(key, part, asks)
        return self._plainly(part)

    def _eager_runs(self, key: tuple[Any, ...]) -> int:
        """How often a part runs eagerly before it gets a graph.

        Not at all for one more number of rows, which mostly comes again; once where numbers that move are others than
        before, as they may be in every step.
        """
        if self._graphs[key[0]] < CHECKED:
            return WARM_UP
        return 0 if any((key[0], key[-1]) == (other[0], other[-1]) for other in self.known) else 1

    def _make_room(self, name: str) -> bool:
        """Give up the graphs of a part for what was longest not there, if that is long ago."""
        key = min((key for key in self.known if key[0] == name), key=lambda key: self._used[key])
        if self._turn - self._used[key] < UNUSED:
            return False
        self._graphs[name] -= len(self.known.pop(key))
        return True

    def _replayed(self, name: str, part: Callable[[], Any], segment: Segment) -> Any:
        """The result by a graph; `benchmarks/robots/mjlab_captured.py` holds it against the part here."""
        return self._again(segment)

    def _again(self, segment: Segment) -> Any:
        self.replayed = True
        segment.replay()
        segment.effects.apply()
        self.log().update(segment.log)
        return segment.output

    def drop(self, name: str, why: str) -> None:
        """Run a part eagerly from now on; one line says so."""
        self.dropped[name] = why
        self.known = {key: segments for key, segments in self.known.items() if key[0] != name}
        _log.warning("%s of the simulator's step runs eagerly, not as a CUDA graph: %s", name, why)

    def look(self) -> None:
        """Capture everything anew if something outside of the parts, such as a curriculum, has changed a number."""
        still, self._turn = self._still or {}, self._turn + 1
        if self._asked is None:
            self._asked = _by_holder(still)
        try:  # a thousand places, twice in every step, once of it while the device waits
            suspects = [paths for ask, holder, was, paths in self._asked if ask(holder) != was]
        except (LookupError, RuntimeError, ValueError):  # a place is gone, or holds a tensor or an array now
            suspects = [list(still)]
        changed = {path: still[path] for paths in suspects for path in paths if _changed(still[path])}
        if changed or self._still is None:
            self._moving |= {path: Slot(slot.holder, slot.key, slot.now()) for path, slot in changed.items()}
            places = self.roots.places()
            still = [p for p, value in places.values.items() if _is_setting(value) and p not in self._moving]
            self._still = {p: slot for p in still if (slot := places.slot(p)).holder is not None}
            self._asked = None
            self.forget()

    def forget(self) -> None:
        """Capture everything anew."""
        self.known.clear()
        self._graphs.clear()

    def captured(self) -> list[str]:
        """Names of the parts that have graphs."""
        return sorted({str(key[0]) for key in self.known})

    def _eagerly(self, part: Callable[[], Any]) -> Any:
        """Run a part and see what moves."""
        before = self.roots.places()
        output = part()
        holders = Counter(place_of(value) for value in before.values.values() if isinstance(value, Tensor))
        for path, slot in before.moved():
            if isinstance(slot.value, SCALARS) and isinstance(slot.now(), SCALARS):
                self._moving.setdefault(path, slot)
                (self._still or {}).pop(path, None)
                self._asked = None
            elif slot.rehome(isinstance(slot.value, Tensor) and holders[place_of(slot.value)] > 1):
                self._homes.setdefault(path, slot)
        return output

    def _plainly(self, part: Callable[[], Any]) -> Any:
        """Run a part; tensors stay where graphs of other parts look for them."""
        output = part()
        for slot in self._homes.values():
            if slot.moved():
                slot.rehome()
        return output

    def _capture(self, key: tuple[Any, ...], part: Callable[[], Any], asks: bool) -> Any:
        """The part's result, by a graph that is kept if it gives what the eager part gives from the same state."""
        name, check, self.restored = key[0], self._graphs[key[0]] < CHECKED, True
        start, kept = Moment(self.roots, self.device, contents=check), dict(self.log())
        asked = self.rows if asks else ()
        try:
            wanted = self._rehearsed(name, part, start, asked) if check else None
            replay, (output, told, effects) = self.record(lambda: self._recorded(part, start, asked))
            read = self._caches.get(name, set())
            guards = [slot for path, slot in _in_use(start.places) if path in read]
            segment = Segment(replay, output, told, effects, guards)
            self._again(segment)
            wrong = [] if wanted is None else wanted.unlike(self, segment.output)
            if wrong:
                raise Declined(f"it differs from the eager one in {'; '.join(wrong[:3])} ({len(wrong)} in all)")
        except (Declined, RuntimeError, TypeError) as error:
            start.restore()
            self.log_is(kept)
            self.drop(name, f"{str(error).strip().partition(chr(10))[0]}{_place(error)}")
            return self._plainly(part)
        self._homes |= segment.effects.homes
        self._graphs[name], self._used[key] = self._graphs[name] + 1, self._turn
        self.known.setdefault(key, []).append(segment)
        return segment.output

    def _rehearsed(self, name: str, part: Callable[[], Any], start: Moment, asked: tuple[Tensor, ...]) -> Wanted:
        """What the eager part gives; then, from the same state, it is run as it will be recorded."""
        kept = dict(self.log())
        wanted = Wanted(_copied(part()), dict(self.log()), Moment(self.roots, self.device))
        start.restore()
        with self._capturing(asked):
            part()  # makes the constants
        start.restore()
        with self.watched(), refusing_to_wait(self.device), self._capturing(asked):
            part()  # fails where a recording would, and harms nothing
        start.restore()
        self._caches.setdefault(name, set()).update(self._caches_read(part, start, asked))
        self.log_is(kept)
        return wanted

    def _caches_read(self, part: Callable[[], Any], start: Moment, asked: tuple[Tensor, ...]) -> list[Path]:
        """Caches that the part reads as they are; found by running it without them."""
        in_use = dict(_in_use(start.places))
        for slot in in_use.values():
            slot.set(None)
        try:
            with self._capturing(asked):
                part()
        except Exception:  # whatever a part does without its cache
            return list(in_use)
        finally:
            start.restore()
        return []

    def _moving_names(self) -> str:
        return ", ".join(str(path[-1]) for path in list(self._moving)[:5])

    def _recorded(self, part: Callable[[], Any], start: Moment, asked: tuple[Tensor, ...]) -> tuple[Any, dict, Effects]:
        """The part's result, what it reports and what it does in Python, with tensors back in their places."""
        kept = dict(self.log())
        self.log_is({})
        with self.watched(), self._capturing(asked):
            output = part()
        effects, told = Effects.between(start.places, self.roots), dict(self.log())
        self.log_is(kept)
        return output, told, effects

    def _capturing(self, asked: tuple[Tensor, ...]) -> Capturing:
        return Capturing(self._constants, list(asked), self.device)

    def log_is(self, content: dict[str, Any]) -> None:
        """Make this what the simulator has reported so far."""
        log = self.log()
        log.clear()
        log.update(content)


def _is_setting(value: Any) -> bool:
    """Whether something is a number, a flag, a name or a range of numbers."""
    return isinstance(value, SCALARS) or (isinstance(value, tuple) and all(isinstance(part, SCALARS) for part in value))


def _state(slot: Slot) -> Any:
    """What a graph depends on of a place that moves: the number or flag, or that something else is there."""
    now = slot.now()
    return now if isinstance(now, SCALARS) else type(now)


def _by_holder(slots: dict[Path, Slot]) -> list[tuple[Callable[[Any], Any], Any, Any, list[Path]]]:
    """Places of one holder together: how to ask it for all of them, the holder, what it says, and the places."""
    together: dict[int, list[Path]] = {}
    for path, slot in slots.items():
        together.setdefault(id(slot.holder), []).append(path)
    groups = []
    for paths in together.values():
        own = [slots[path] for path in paths]
        own = own if len(own) > 1 else own * 2  # one that is asked for alone comes without a tuple
        ask, was = itemgetter(*(slot.key for slot in own)), tuple(slot.value for slot in own)
        groups.append((ask, own[0].holder, was, paths))
    return groups


def _changed(slot: Slot) -> bool:
    """Whether something else is there than was noted."""
    now, was = slot.now(), slot.value
    return now is not was and (not _is_setting(now) or now != was)


def _place(error: BaseException) -> str:
    """Where in the simulator or the task an error came up."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OWN)]
    return f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _in_use(places: Places) -> list[tuple[Path, Slot]]:
    """Caches of sensors that are valid now: a part may read one instead of working it out."""
    caches = [(path, places.slot(path)) for path in places.values if path[-1] == CACHE]
    return [(path, slot) for path, slot in caches if slot.holder.get("_cache_valid")]


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tuple(map(_copied, tree)) if isinstance(tree, tuple | list) else tree


def _unlike(wanted: Any, found: Any, name: str = "its result") -> list[str]:
    """What is not equal in two trees; a number and a tensor with one number may be."""
    if isinstance(wanted, dict):
        pairs = [(wanted[key], found.get(key), str(key)) for key in wanted]
    elif isinstance(wanted, tuple):
        pairs = [(a, b, f"{name} {i}") for i, (a, b) in enumerate(zip(wanted, found, strict=True))]
    else:
        if wanted is None or found is None:
            return [] if wanted is found else [name]
        one, other = (torch.as_tensor(x, device="cpu").double().nan_to_num() for x in (wanted, found))
        return [] if torch.equal(one.float(), other.float()) else [f"{name} by {(one - other).abs().max():.3g}"]
    return [line for a, b, label in pairs for line in _unlike(a, b, label)]

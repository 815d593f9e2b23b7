"""Parts of a simulator's step as CUDA graphs: captured, checked against the eager ones, replayed, or dropped.

A part is any function over tensors that stay where they are. What keeps one from being captured as it stands is often
small and harmless: constants copied from the host, lists as indices, numbers read for a log. `Capturing` does these on
the device while a part is recorded. What it cannot replace ends the attempt, and the part runs eagerly.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from canter.envs.robots.host_state import SCALARS, Effects, Moment, Path, Roots, Slot, place_of

_log = logging.getLogger(__name__)

WARM_UP = 3
"""Eager runs of a part before it is captured: they fill caches and show which flags move."""
PATIENCE = 500
"""Eager runs after which a part whose flags never come back is given up."""
MOST = 24
"""Graphs of one part, one for each number of rows that it is run for; other numbers run eagerly."""


class Declined(RuntimeError):
    """A part of a step cannot be captured; the message says why."""


class Capturing(TorchFunctionMode):
    """Replaces, while a part is recorded, what would wait for the device or copy from the host."""

    def __init__(self, constants: dict[Any, Tensor], rows: list[Tensor]) -> None:
        super().__init__()
        self.constants, self.rows = constants, rows

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operation of torch."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], list | tuple | int | float):
            return self._constant(function, args, kwargs).clone()
        if name == "item" and args[0].device.type != "cpu":
            return args[0].reshape(())
        if name == "nonzero":
            if not self.rows:
                raise Declined("it asks which rows hold something a second time")
            rows = self.rows.pop(0)
            return (rows,) if kwargs.get("as_tuple") else rows.unsqueeze(1)
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Tensor):
            args = (args[0], self._index(args[1], args[0].device), *args[2:])
        return function(*args, **kwargs)

    def _constant(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        key = (repr(args), repr(kwargs))
        if key not in self.constants:
            if _is_capturing():
                raise Declined(f"it makes a constant that was not there before: {key[0][:60]}")
            self.constants[key] = function(*args, **kwargs)
        return self.constants[key]

    def _index(self, index: Any, device: torch.device) -> Any:
        if isinstance(index, tuple):
            return tuple(self._index(part, device) for part in index)
        if isinstance(index, list):
            return self._constant(torch.tensor, (index,), {"device": device})
        return index


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class CudaRecorder:
    """Records functions as CUDA graphs, all with one pool of memory."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays the function, and its output, the same tensors every time."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        torch.cuda.synchronize()
        gc.disable()  # memory that is freed by chance would end the recording
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    output = function()
                except BaseException:
                    self._abandon(graph)
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed, and record nothing once more: torch's random stream believes to be recorded."""
        with suppress(RuntimeError):
            graph.capture_end()
        self.pool, empty = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            empty.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            empty.capture_end()


@contextmanager
def _refusing_to_wait(device: torch.device) -> Iterator[None]:
    """An error where something waits for the device, which would spoil a recording."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass
class Segment:
    """One part of a step, for given numbers of rows."""

    calls: int = 0
    replay: Callable[[], None] | None = None
    output: Any = None
    log: dict[str, Any] = field(default_factory=dict)
    effects: Effects = field(default_factory=Effects)
    guards: list[Slot] = field(default_factory=list)
    """Caches that it reads, which must be those of its capture."""
    missed: int = 0


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
        self.known: dict[tuple[Any, ...], Segment] = {}
        self.dropped: dict[str, str] = {}
        """Parts that run eagerly, and why."""
        self.rows: tuple[Tensor, ...] = ()
        """The rows that the part at hand is run for."""
        self._seen: dict[str, int] = {}
        self._graphs: dict[str, int] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._constants: dict[Any, Tensor] = {}
        self._moving: dict[Path, Slot] = {}
        """Places whose number or flag was seen to change: a part has a graph for each state of them."""
        self._homes: dict[Path, Slot] = {}
        """Places where a tensor is put in another's place, with the one that is to stay there."""

    def run(self, name: str, part: Callable[[], Any], rows: tuple[Tensor, ...] = (), *, asks: bool = False) -> Any:
        """The part's result, from its graph where there is one.

        `rows` are the indices that it works on; a part that `asks` finds them itself, in this order, by `nonzero`.
        """
        self.rows = rows
        if name in self.dropped:
            return self._plainly(part)
        flags = tuple(slot.now() for slot in self._moving.values())
        segment = self.known.setdefault((name, *map(len, rows), flags), Segment())
        segment.calls += 1
        if segment.replay is None:
            seen = self._seen[name] = self._seen.get(name, 0) + 1
            if seen <= WARM_UP:
                return self._eagerly(part)
            if seen >= PATIENCE and not self._graphs.get(name):
                self.drop(name, f"a number of it is another one in every step, one of {self._moving_names()}")
            if segment.calls <= WARM_UP or self._graphs.get(name, 0) >= MOST:
                return self._plainly(part)
            return self._capture(name, part, segment, asks)
        moved = [str(slot.key) for slot in segment.guards if slot.moved()]
        if moved:
            segment.missed += 1
            if segment.missed == 10 * WARM_UP:
                self.drop(name, f"it reads what runs eagerly: {', '.join(moved[:5])}")
            return self._plainly(part)
        for i, found in enumerate(rows):
            self._buffers[name, i][: len(found)].copy_(found)
        return self._replayed(name, part, segment)

    def _replayed(self, name: str, part: Callable[[], Any], segment: Segment) -> Any:
        return self._again(segment)

    def _again(self, segment: Segment) -> Any:
        assert segment.replay is not None
        segment.replay()
        segment.effects.apply()
        self.log().update(segment.log)
        return segment.output

    def drop(self, name: str, why: str) -> None:
        """Run a part eagerly from now on; one line says so."""
        self.dropped[name] = why
        self.known = {key: segment for key, segment in self.known.items() if key[0] != name}
        _log.warning("%s of the simulator's step runs eagerly, not as a CUDA graph: %s", name, why)

    def forget(self) -> None:
        """Capture everything anew, as a setting has changed."""
        self.known = {key: Segment(calls=WARM_UP) for key in self.known}
        self._graphs.clear()

    def captured(self) -> list[str]:
        """Names of the parts that have graphs."""
        return sorted({str(key[0]) for key, segment in self.known.items() if segment.replay is not None})

    def _eagerly(self, part: Callable[[], Any]) -> Any:
        """Run a part and see what moves."""
        before = self.roots.slots()
        output = part()
        holders = Counter(place_of(slot.value) for slot in before.values() if isinstance(slot.value, Tensor))
        for path, slot in before.items():
            if slot.holder is None or not slot.moved():
                continue
            if isinstance(slot.value, SCALARS) and isinstance(slot.now(), SCALARS):
                self._moving.setdefault(path, slot)
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

    def _static(self, name: str) -> tuple[Tensor, ...]:
        """The rows at addresses that stay."""
        static = []
        for i, found in enumerate(self.rows):
            buffer = self._buffers.setdefault((name, i), torch.zeros(65536, dtype=torch.int64, device=self.device))
            buffer[: len(found)].copy_(found)
            static.append(buffer[: len(found)])
        return tuple(static)

    def _capture(self, name: str, part: Callable[[], Any], segment: Segment, asks: bool) -> Any:
        """Run the part eagerly, then from the same state as a graph; keep the graph only if all is equal."""
        rows, start, log = self.rows, Moment(self.roots, self.device), self.log()
        kept = dict(log)
        output = part()
        wanted, told = Moment(self.roots, self.device), dict(log)
        wanted_output = _copied(output)
        try:
            start.restore()
            self._log_is(kept)
            self.rows = self._static(name)
            asked = list(self.rows) if asks else []
            with Capturing(self._constants, asked.copy()):
                part()  # makes the constants
            start.restore()
            with self.watched(), _refusing_to_wait(self.device), Capturing(self._constants, asked.copy()):
                part()  # fails where a recording would, and harms nothing
            start.restore()
            segment.guards = self._caches_read(part, start, asked)
            self._log_is(kept)
            segment.replay, results = self.record(lambda: self._recorded(part, start, segment, asked))
            segment.output, segment.log = results
            self._again(segment)
            wrong = wanted.differences(Moment(self.roots, self.device))
            wrong += _unlike(wanted_output, segment.output) + _unlike(told, dict(self.log()))
            if wrong:
                raise Declined(f"it differs from the eager one in {'; '.join(wrong[:3])} ({len(wrong)} in all)")
        except (Declined, RuntimeError, TypeError) as error:
            segment.replay, self.rows = None, rows
            start.restore()
            self._log_is(kept)
            self.drop(name, str(error).strip().partition("\n")[0])
            return self._plainly(part)
        homes = {id(slot) for slot in segment.effects.homes}
        self._homes |= {path: slot for path, slot in start.slots.items() if id(slot) in homes}
        self._graphs[name] = self._graphs.get(name, 0) + 1
        return segment.output

    def _caches_read(self, part: Callable[[], Any], start: Moment, asked: list[Tensor]) -> list[Slot]:
        """Caches that the part reads as they are; found by running it without them."""
        in_use = [slot for slot in start.slots.values() if _in_use(slot)]
        for slot in in_use:
            slot.set(None)
        try:
            with Capturing(self._constants, asked.copy()):
                part()
        except Exception:  # whatever a part does without its cache
            return in_use
        finally:
            start.restore()
        return []

    def _moving_names(self) -> str:
        return ", ".join(str(path[-1]) for path in list(self._moving)[:5])

    def _recorded(self, part: Callable[[], Any], start: Moment, segment: Segment, asked: list[Tensor]) -> Any:
        """The part's result and what it reports, with tensors back in their places."""
        kept = dict(self.log())
        self._log_is({})
        with self.watched(), Capturing(self._constants, asked.copy()):
            output = part()
        segment.effects, told = Effects.between(start.slots, self.roots.slots()), dict(self.log())
        self._log_is(kept)
        return output, told

    def _log_is(self, content: dict[str, Any]) -> None:
        log = self.log()
        log.clear()
        log.update(content)


def _in_use(slot: Slot) -> bool:
    """Whether a place holds a sensor's cache that is valid now: a part may read it instead of working it out."""
    return slot.key == "_cached_data" and bool(slot.holder.get("_cache_valid"))


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

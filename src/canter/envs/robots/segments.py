"""CUDA graphs of the segments of a step: when to capture, which to replay, what invalidates.

A segment is a function over tensors at fixed addresses, such as the computation of rewards.
`Segments.run` replays its graph, or runs it eagerly and captures a graph once the segment has
become predictable. The first graphs of a segment are compared with the eager segment. A segment
that cannot be captured, or whose graph differs, runs eagerly from then on.
"""

from __future__ import annotations

import logging
import pathlib
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.envs.robots.host_state import SCALARS, Effects, Path, Roots, Slot, Snapshot, memory_key
from canter.envs.robots.recording import CaptureMode, EagerResult, NotCapturable, Recorder, clone_tree, forbid_sync

_log = logging.getLogger(__name__)

OWN_FOLDERS = (str(pathlib.Path(__file__).parent), str(pathlib.Path(torch.__file__).parent))
"""Folders whose code is not the cause of a failed capture."""

WARM_UP = 3
"""Eager runs of a segment before its first capture: they fill caches and show which flags vary."""
MAX_EAGER_RUNS = 500
"""Eager runs after which a segment without any graph is given up: its flags never return to a known
state."""
NUM_CHECKED = 2
"""Graphs of a segment that are compared with the eager one; others are the same function for other
numbers of environments."""
MAX_VARIANTS = 4
"""Graphs of a segment for one number of environments: tensors that it reads lie where graphs of
other segments put them."""
MAX_GRAPHS = 256
"""Graphs of a segment in all; for further numbers of environments an unused one is replaced, or the
segment runs eagerly."""
UNUSED_AFTER = 500
"""Guard checks, two in a step, after which a graph counts as unused: a policy that learns ends
fewer episodes."""

Key = tuple[Any, ...]
"""The name of a segment, numbers of environments, and the state of the varying flags."""


@dataclass
class SegmentGraph:
    """A graph of a segment, and what Python did while it was captured."""

    replay: Callable[[], None]
    output: Any
    log: dict[str, Any]
    effects: Effects
    caches: list[Slot]
    """Caches of sensors that it reads, which must be those of its capture."""


class GuardGroup(NamedTuple):
    """The settings of one container, to be compared at once."""

    read: Callable[[Any], Any]
    container: Any
    values: Any
    paths: list[Path]


class Segments:
    """The segments of one environment's step, and their graphs.

    `log` returns the mapping into which the simulator reports, and which segments write.
    `hide_counters` is a context in which a segment that uses a counter of the environment raises
    NotCapturable. `record` records a function.
    """

    def __init__(
        self,
        roots: Roots,
        device: torch.device,
        log: Callable[[], dict[str, Any]],
        hide_counters: Callable[[], AbstractContextManager[None]],
        record: Recorder,
    ) -> None:
        self.roots = roots
        self.device = device
        self.log = log
        self.hide_counters = hide_counters
        self.record = record
        self.graphs: dict[Key, list[SegmentGraph]] = {}
        self.dropped: dict[str, str] = {}
        """Segments that always run eagerly, with the reasons."""
        self.env_ids: tuple[Tensor, ...] = ()
        """Indices of the environments for which the present segment runs."""
        self.replayed = False
        """The last segment was replayed."""
        self.restored = False
        """The last segment was captured, for which the whole state was restored several times."""
        self._num_graphs: Counter[str] = Counter()
        self._runs_without_graph: Counter[Any] = Counter()
        """Eager runs by the name of a segment, and by its key."""
        self._num_guard_checks = 0
        self._last_used: dict[Key, int] = {}
        """Number of guard checks at the last use of a key's graphs."""
        self._constants: dict[Any, Tensor] = {}
        self._caches_read: dict[str, set[Path]] = {}
        """Caches of sensors that a segment reads."""
        self._varying: dict[Path, Slot] = {}
        """Numbers and flags that were seen to change: a segment has a graph for each of their
        states."""
        self._guards: dict[Path, Slot] | None = None
        """All other settings, whose values are constants in the graphs; None before the first
        check."""
        self._guard_groups: list[GuardGroup] | None = None
        """`_guards` by container; None if they have changed."""
        self._fixed: dict[Path, Slot] = {}
        """Slots in which segments put new tensors, each with the tensor whose address graphs
        read."""

    def run(
        self, name: str, segment: Callable[[], Any], env_ids: tuple[Tensor, ...] = (), *, finds_env_ids: bool = False
    ) -> Any:
        """Return the result of a segment, from its graph if there is one.

        `env_ids` are the indices on which it works, at fixed addresses. A segment that
        `finds_env_ids` calls `nonzero` for each of them, in this order.
        """
        self.env_ids = env_ids
        self.replayed = False
        self.restored = False
        if name in self.dropped:
            return self._run_eagerly(segment)
        key = (name, *map(len, env_ids), tuple(map(_state, self._varying.values())))
        for graph in self.graphs.get(key, ()):
            if not any(slot.is_replaced() for slot in graph.caches):
                self._last_used[key] = self._num_guard_checks
                return self._use_graph(name, segment, graph)
        return self._run_without_graph(key, segment, finds_env_ids)

    def _use_graph(self, name: str, segment: Callable[[], Any], graph: SegmentGraph) -> Any:
        """Replay a graph; `benchmarks/robots/mjlab_captured.py` also runs the segment here."""
        return self._replay(graph)

    def _replay(self, graph: SegmentGraph) -> Any:
        self.replayed = True
        graph.replay()
        graph.effects.apply()
        self.log().update(graph.log)
        return graph.output

    def _run_without_graph(self, key: Key, segment: Callable[[], Any], finds_env_ids: bool) -> Any:
        """Run a segment eagerly, or capture it if it has run often enough."""
        name = key[0]
        self._runs_without_graph[name] += 1
        self._runs_without_graph[key] += 1
        if self._runs_without_graph[name] <= WARM_UP:
            return self._run_and_observe(segment)
        if len(self.graphs.get(key, ())) == MAX_VARIANTS:
            self.drop(name, "it reads tensors of other segments, which lie at another address each time")
        elif self._runs_without_graph[name] >= MAX_EAGER_RUNS and not self._num_graphs[name]:
            names = ", ".join(str(path[-1]) for path in list(self._varying)[:5])
            self.drop(name, f"it depends on a number that changes in every step, one of {names}")
        elif self._runs_without_graph[key] > self._required_runs(key) and self._has_room(name):
            return self._capture(key, segment, finds_env_ids)
        return self._run_eagerly(segment)

    def _required_runs(self, key: Key) -> int:
        """Return how often a segment runs eagerly before it is captured.

        Zero for a further number of environments, which is likely to return; one for a new state of
        the varying flags, which may change in every step.
        """
        if self._num_graphs[key[0]] < NUM_CHECKED:
            return WARM_UP
        return 0 if any((key[0], key[-1]) == (other[0], other[-1]) for other in self.graphs) else 1

    def _has_room(self, name: str) -> bool:
        """Return whether a segment may have one more graph; delete unused ones if need be."""
        if self._num_graphs[name] < MAX_GRAPHS:
            return True
        oldest = min((key for key in self.graphs if key[0] == name), key=lambda key: self._last_used[key])
        if self._num_guard_checks - self._last_used[oldest] < UNUSED_AFTER:
            return False
        self._num_graphs[name] -= len(self.graphs.pop(oldest))
        return True

    def _run_and_observe(self, segment: Callable[[], Any]) -> Any:
        """Run a segment eagerly and observe which flags vary and which tensors it replaces."""
        before = self.roots.view()
        output = segment()
        num_slots = Counter(memory_key(value) for value in before.values.values() if isinstance(value, Tensor))
        for path, slot in before.replaced_slots():
            if isinstance(slot.value, SCALARS) and isinstance(slot.current(), SCALARS):
                self._varying.setdefault(path, slot)
                (self._guards or {}).pop(path, None)
                self._guard_groups = None
            elif slot.copy_back(isinstance(slot.value, Tensor) and num_slots[memory_key(slot.value)] > 1):
                self._fixed.setdefault(path, slot)
        return output

    def _run_eagerly(self, segment: Callable[[], Any]) -> Any:
        """Run a segment; tensors stay at the addresses that graphs of other segments read."""
        output = segment()
        for slot in self._fixed.values():
            if slot.is_replaced():
                slot.copy_back()
        return output

    def drop(self, name: str, reason: str) -> None:
        """Run a segment eagerly from now on, and log the reason."""
        self.dropped[name] = reason
        self.graphs = {key: graphs for key, graphs in self.graphs.items() if key[0] != name}
        _log.warning("%s of the simulator's step runs eagerly, not as a CUDA graph: %s", name, reason)

    def check_guards(self) -> None:
        """Delete all graphs if a curriculum, or anything else outside, has changed a setting."""
        self._num_guard_checks += 1
        guards = self._guards or {}
        if self._guard_groups is None:
            self._guard_groups = _by_container(guards)
        try:  # about a thousand settings, twice in every step, once of it while the device waits
            suspects = [paths for read, container, values, paths in self._guard_groups if read(container) != values]
        except (LookupError, RuntimeError, ValueError):  # a key is gone, or holds a tensor or an array now
            suspects = [list(guards)]
        changed = {path: guards[path] for paths in suspects for path in paths if _setting_changed(guards[path])}
        if not changed and self._guards is not None:
            return
        self._varying |= {path: Slot(slot.container, slot.key, slot.current()) for path, slot in changed.items()}
        view = self.roots.view()
        settings = [path for path, value in view.values.items() if _is_setting(value) and path not in self._varying]
        slots = {path: view.slot(path) for path in settings}
        self._guards = {path: slot for path, slot in slots.items() if slot.container is not None}
        self._guard_groups = None
        self.forget()

    def forget(self) -> None:
        """Delete all graphs; segments are captured again."""
        self.graphs.clear()
        self._num_graphs.clear()

    def captured(self) -> list[str]:
        """Return the names of the segments that have graphs."""
        return sorted({str(key[0]) for key in self.graphs})

    def set_log(self, content: dict[str, Any]) -> None:
        """Replace the contents of the simulator's log."""
        log = self.log()
        log.clear()
        log.update(content)

    # Capturing
    # --------------------------------------------------------------------------------------------------------

    def _capture(self, key: Key, segment: Callable[[], Any], finds_env_ids: bool) -> Any:
        """Return the result of a new graph, which is kept if the eager result is equal."""
        name = key[0]
        check = self._num_graphs[name] < NUM_CHECKED
        self.restored = True
        start = Snapshot(self.roots, self.device, contents=check)
        log_before = dict(self.log())
        env_ids = self.env_ids if finds_env_ids else ()
        try:
            expected = self._rehearse(name, segment, start, env_ids) if check else None
            replay, (output, log, effects) = self.record(lambda: self._record(segment, start, env_ids))
            read = self._caches_read.get(name, set())
            caches = [slot for path, slot in start.view.valid_caches() if path in read]
            graph = SegmentGraph(replay, output, log, effects, caches)
            self._replay(graph)
            if expected is not None:
                expected.check(graph.output, self.log(), Snapshot(self.roots, self.device))
        except (NotCapturable, RuntimeError, TypeError) as error:
            start.restore()
            self.set_log(log_before)
            self.drop(name, f"{str(error).strip().partition(chr(10))[0]}{_format_origin(error)}")
            return self._run_eagerly(segment)
        self._fixed |= graph.effects.copied_back
        self._num_graphs[name] += 1
        self._last_used[key] = self._num_guard_checks
        self.graphs.setdefault(key, []).append(graph)
        return graph.output

    def _rehearse(
        self, name: str, segment: Callable[[], Any], start: Snapshot, env_ids: tuple[Tensor, ...]
    ) -> EagerResult:
        """Return the eager result; then run the segment as it will be recorded."""
        log_before = dict(self.log())
        expected = EagerResult(clone_tree(segment()), dict(self.log()), Snapshot(self.roots, self.device))
        start.restore()
        with self._capture_mode(env_ids):
            segment()  # makes the constants
        start.restore()
        with self.hide_counters(), forbid_sync(self.device), self._capture_mode(env_ids):
            segment()  # fails where a recording would, and does no harm
        start.restore()
        self._caches_read.setdefault(name, set()).update(self._find_caches_read(segment, start, env_ids))
        self.set_log(log_before)
        return expected

    def _find_caches_read(self, segment: Callable[[], Any], start: Snapshot, env_ids: tuple[Tensor, ...]) -> list[Path]:
        """Return all valid caches if the segment fails without them, else none."""
        caches = dict(start.view.valid_caches())
        for slot in caches.values():
            slot.set(None)
        try:
            with self._capture_mode(env_ids):
                segment()
        except Exception:  # of any kind: a sensor returns None in place of its cache
            return list(caches)
        finally:
            start.restore()
        return []

    def _record(
        self, segment: Callable[[], Any], start: Snapshot, env_ids: tuple[Tensor, ...]
    ) -> tuple[Any, dict[str, Any], Effects]:
        """Run a segment that is being recorded; return its result, log entries and effects."""
        log_before = dict(self.log())
        self.set_log({})
        with self.hide_counters(), self._capture_mode(env_ids):
            output = segment()
        effects = Effects.since(start.view, self.roots)
        log = dict(self.log())
        self.set_log(log_before)
        return output, log, effects

    def _capture_mode(self, env_ids: tuple[Tensor, ...]) -> CaptureMode:
        return CaptureMode(self._constants, list(env_ids), self.device)


def _is_setting(value: Any) -> bool:
    """Return whether a value is a number, a flag, a name or a tuple of these."""
    if isinstance(value, tuple):
        return all(isinstance(entry, SCALARS) for entry in value)
    return isinstance(value, SCALARS)


def _state(slot: Slot) -> Any:
    """Return the number or flag in a varying slot, or the type of anything else."""
    current = slot.current()
    return current if isinstance(current, SCALARS) else type(current)


def _setting_changed(slot: Slot) -> bool:
    """Return whether a slot holds another setting, or something that is none."""
    current = slot.current()
    return current is not slot.value and (not _is_setting(current) or current != slot.value)


def _by_container(slots: dict[Path, Slot]) -> list[GuardGroup]:
    """Return the slots of each container as one group."""
    together: dict[int, list[Path]] = {}
    for path, slot in slots.items():
        together.setdefault(id(slot.container), []).append(path)
    groups = []
    for paths in together.values():
        own = [slots[path] for path in paths]
        if len(own) == 1:
            own = own * 2  # itemgetter of one key returns no tuple
        read = itemgetter(*(slot.key for slot in own))
        groups.append(GuardGroup(read, own[0].container, tuple(slot.value for slot in own), paths))
    return groups


def _format_origin(error: BaseException) -> str:
    """Return the line of the simulator or the task that raised an error."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OWN_FOLDERS)
    ]
    return f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""

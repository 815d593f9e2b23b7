"""Stopping a run by a signal: finish the iteration, save, leave.

What is kept of a run in case that its next iteration fails, and how all ranks hear that it has failed on one.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.specs import Capturable, EnvFailed
from canter.core.struct import Metrics, copy_all_, row_writer, tree_leaves, tree_map
from canter.envs.contract import place_of, text_of
from canter.runs.run_folder import causes
from canter.runs.state import Parts
from canter.training.collector import Collector
from canter.training.episodes import SPOILT, NonFinite, NonFiniteElsewhere, NonFiniteUpdate, is_finite

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; the second ends the program.

    Python delivers signals to the main thread only, so elsewhere nothing is changed. A shell script's `canter train &`
    begins with SIGINT ignored; whoever sent the first means the second too, so that then it is heard all the same.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


NOT_KEPT = "the environment's state from before the failure was not kept"
"""Why episodes start anew after a failure where the state of the environment is not copied before every rollout."""


class RunFailed(RuntimeError):
    """An environment ended the run; what was learned before its last rollout is saved where there is a folder.

    The message says what the environment did, `kept` what became of the run, `rank` whose environment it was. Of
    several ranks all raise it, as all have saved their part.
    """

    def __init__(self, what: str, kept: str, rank: int = 0) -> None:
        super().__init__(f"{what}. {kept}")
        self.what, self.kept, self.rank = what, kept, rank


class LastGood:
    """The state of algorithm and collector at the end of the last iteration in which everything was finite.

    It is copied where it lives at the end of every iteration, unless something in it or in the rollout is not finite,
    in this iteration or in one since the host last read. On a GPU, where the host learns of a NaN only when it reads,
    whatever was computed after it can so be forgotten. Nothing waits for the host, and the launches are part of the
    captured update. A second copy, `clean`, stops also at a metric that is not finite: an optimiser leaves out steps by
    gradients that are not, so the run goes on, and the state before the first one explains it. In all it takes memory
    for the state three times.

    Where the host does not read after every iteration, a rollout is overwritten before it is known that something in it
    was not finite. With `reads_late` the first such rollout is copied, which takes memory for a second one; not with
    the short iterations of an algorithm that learns from older rollouts as well, whose last one explains little.

    The host keeps besides, for each iteration since it last read, the random states at its beginning, and the state of
    the environment where that is no matter of a captured graph.
    """

    def __init__(self, parts: Parts, collector: Collector, *, reads_late: bool = False) -> None:
        self.parts, self.collector = parts, collector
        living = parts.algorithm.living()
        self.shown = living is not None
        """Whether the algorithm shows its state where it lives; else it is copied by the host, which reads at once."""
        collector.tracker.reads_at_once |= not self.shown
        self.living = tree_leaves((living, collector.tensors()))
        self.copies = [_side_by_side(self.living) for _ in range(3)]
        self.fresh, self.kept, self.clean = self.copies
        self.flags = torch.ones(2, dtype=torch.bool, device=self.living[0].device)
        """Whether state and rollout are finite, and whether metrics are too, in all iterations since the host read."""
        self.told_finite = True
        """Whether all metrics of the iteration that was settled last are finite, where the host reads at once."""
        self.rollout = tree_map(torch.clone, collector.rollout) if reads_late else None
        """The first since the host read after which not everything was finite; None where the host always reads."""
        self.random: list[list[Tensor]] = []
        self.env: Callable[[], dict[str, Any]] | None = None
        self.algorithm: dict[str, Any] | None = None
        self.iteration = 0
        """The last one that the host has read."""

    def arm(self) -> None:
        """Take the state as it is now for a good one, of which the host knows everything."""
        self.fresh, self.kept, self.clean = self.copies
        copy_all_(self.kept.leaves, self.living)
        copy_all_(self.clean.leaves, self.living)
        self.flags.fill_(True)
        self.read()

    def read(self) -> None:
        """The host has read everything up to now, and found it finite."""
        self.random.clear()
        self.iteration = self.parts.run.progress().iteration

    def begin(self) -> None:
        """An iteration begins."""
        self.random.append([generator.get_state() for generator in self.parts.algorithm.generators()])
        if not (self.flags.is_cuda and isinstance(self.collector.env, Capturable)):
            self.env = None  # not that of an earlier iteration, should this fail
            self.env = self.collector.env_snapshot()
        if not self.shown:
            self.algorithm = self.parts.algorithm.state_dict()

    def settle(self, metrics: Metrics) -> None:
        """An iteration has ended: copy its state, if everything is finite; `count` makes it the last good one.

        Raises `NonFiniteUpdate` if the new state is not, where the host reads at once, as on a CPU.
        """
        if not self.fresh.quickly(0, self.living):
            copy_all_(self.fresh.leaves, self.living)
        if self.collector.tracker.reads_at_once:
            if not all(is_finite(x) for x in self.fresh.buffers.values() if x.is_floating_point()):
                raise NonFiniteUpdate(SPOILT)
            self.told_finite = all(math.isfinite(value.item()) for value in metrics.values())
            return
        floats = [x for x in self.fresh.buffers.values() if x.is_floating_point()]
        good = (torch.stack([(x - x).sum().double() for x in floats]).sum() == 0) & self.collector.tracker.finite
        told = [value.detach().double() for value in metrics.values()]
        found = torch.stack([good, good & torch.isfinite(torch.stack(told or [good.double()])).all()])
        if distributed.world_size() > 1:
            found = distributed.max_((~found).float()) == 0  # ranks must keep the state of the same iteration
        if self.rollout is not None:
            first = self.flags[1] & ~found[1]
            for target, source in zip(tree_leaves(self.rollout), tree_leaves(self.collector.rollout), strict=True):
                torch.where(first, source, target, out=target)
        self.flags.logical_and_(found)
        for dtype, fresh in self.fresh.buffers.items():
            for flag, copy in ((self.flags[0], self.kept), (self.flags[1], self.clean)):
                torch.where(flag, fresh, copy.buffers[dtype], out=copy.buffers[dtype])

    def count(self) -> None:
        """The iteration that was settled last counts, on all ranks; on a GPU the device has decided by itself.

        Nothing is copied a second time, the copies only change places.
        """
        if not self.collector.tracker.reads_at_once:
            return
        self.kept = self.fresh
        if self.told_finite and self.flags[1]:
            self.clean = self.fresh
        elif self.flags[1]:
            self.flags[1] = False
            if self.rollout is not None:
                copy_all_(tree_leaves(self.rollout), tree_leaves(self.collector.rollout))
        self.fresh = next(copy for copy in self.copies if copy is not self.kept and copy is not self.clean)

    def rollout_after(self, good: int) -> Rollout[Any] | None:
        """The rollout that followed `good` iterations since the last reading, if it is still there."""
        if good == len(self.random) - 1:
            return self.collector.rollout
        return self.rollout if self.collector.tracker.unclean == good else None

    def before_unclean(self, good: int) -> dict[str, Any]:
        """State of the algorithm before the first iteration with a metric that is not finite; changes nothing."""
        copy_all_(self.fresh.leaves, self.living)
        copy_all_(self.living, self.clean.leaves)
        state = self.algorithm or self.parts.algorithm.state_dict()
        copy_all_(self.living, self.fresh.leaves)
        return {"algorithm": state, "random": self.random[good]}

    def before(self, good: int) -> dict[str, Any]:
        """State of algorithm and collector after `good` iterations since the last reading; loads it into both."""
        copy_all_(self.living, self.kept.leaves)
        counted = self.parts.run.progress().iteration - self.iteration
        if good < len(self.random):
            for generator, state in zip(self.parts.algorithm.generators(), self.random[good], strict=True):
                generator.set_state(state)
        self.collector.steps_before -= (counted - good) * self.collector.algorithm.horizon
        env = self.env() if self.env is not None and good == len(self.random) - 1 else None
        return {
            "algorithm": self.algorithm or self.parts.algorithm.state_dict(),
            "collector": self.collector.state_after_failure(env, NOT_KEPT),
        }


class Copy(NamedTuple):
    """Memory for copies of tensors, side by side."""

    buffers: dict[torch.dtype, Tensor]
    """One for each dtype."""
    leaves: list[Tensor]
    """The place of each tensor."""
    quickly: Callable[[int, list[Any]], bool]
    """As `row_writer` gives it, of the only row 0 of each: the same tensors are copied at every end of an iteration."""


def _side_by_side(leaves: list[Tensor]) -> Copy:
    """Memory for copies of tensors, one after the other in a buffer for each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for leaf in leaves:
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.numel()
    buffers = {dtype: torch.empty(size, dtype=dtype, device=leaves[0].device) for dtype, size in sizes.items()}
    rest, places = dict(buffers), []
    for leaf in leaves:
        places.append(rest[leaf.dtype][: leaf.numel()].view(leaf.shape))
        rest[leaf.dtype] = rest[leaf.dtype][leaf.numel() :]
    return Copy(buffers, places, row_writer([place.unsqueeze(0) for place in places]))


class RankFailed(RuntimeError):
    """What failed on one rank, as all ranks are told it; `trace` is that rank's traceback."""

    def __init__(self, rank: int, what: str, trace: str) -> None:
        super().__init__(what)
        self.rank, self.trace, self.where = rank, trace, f"on rank {rank}"


class RankNonFinite(RankFailed, NonFinite):
    """The same, of NaN or infinity."""


def agree(error: Exception | None) -> RankFailed:
    """The error of the first rank that has one; all ranks must call it, at least one with an error of its own.

    One that an environment began comes before what other ranks have learned from it meanwhile.
    """
    parts = distributed.gather_bytes(json.dumps(_told(error)).encode())
    found = [(rank, told) for rank, told in enumerate(map(json.loads, parts)) if told]
    rank, told = min(found, key=lambda item: (item[1]["learned"], item[0]))
    kind = RankFailed if told["before"] is None else RankNonFinite
    failed = kind(rank, told["what"], told["trace"])
    if isinstance(failed, NonFinite):
        failed.before = told["before"]
    return failed


def _told(error: Exception | None) -> dict[str, Any]:
    """What other ranks need to know of an error; nothing where it is another's."""
    if error is None or isinstance(error, NonFiniteElsewhere):
        return {}
    what = text_of(error)
    if not isinstance(error, EnvFailed | NonFinite):  # which say so themselves
        what = f"{type(error).__name__}: {what} ({place_of(error)})"
    inner = [trace for link in causes(error) if (trace := getattr(link, "trace", ""))]
    trace = "\n".join(["".join(traceback.format_exception(error)), *inner])
    before = error.before if isinstance(error, NonFinite) else None
    return {"what": what, "trace": trace, "before": before, "learned": isinstance(error, NonFiniteUpdate)}

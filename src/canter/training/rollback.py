"""Copies of the training state, so that a failed iteration can be undone.

An iteration is a transaction: `stage` before it, `snapshot` as the last part of its update, and
`commit` once it counts. `restore` brings back the state after the last good iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.specs import Capturable
from canter.core.struct import Metrics, copy_all_, fused_writer, tree_leaves, tree_map
from canter.runs.state import TrainState
from canter.training.collector import Collector
from canter.training.episodes import NONFINITE_UPDATE, NonFiniteUpdate, is_finite

NOT_KEPT = "the environment's state from before the failure was not kept"
"""Reason why episodes restart if the state of the environment is not copied before every
rollout."""


class Rollback:
    """The state of algorithm and collector after the last iteration in which everything was finite.

    Three copies of the state are kept in addition to the live tensors:

    - `fresh`: the state after the iteration that was snapshot last.
    - `kept`: the last one whose state and rollout were finite. A failed run is saved from it.
    - `clean`: the last one whose metrics were finite too. An optimizer skips steps with NaN
      gradients, so training goes on after them; this copy explains the first one.

    On a CPU the host checks every iteration, and `commit` only swaps the copies. On a GPU the host
    learns of a NaN when it reads the next row of the log. Until then the device decides: `snapshot`
    is part of the captured update and overwrites `kept` and `clean` only while everything has been
    finite since the host read last. Nothing waits.

    With `reads_late` (rows of the log are rarer than iterations) the first rollout after which
    something was not finite is copied as well, before the next one overwrites it.
    """

    def __init__(self, state: TrainState, collector: Collector, *, reads_late: bool = False) -> None:
        self.state = state
        self.collector = collector
        live = state.algorithm.state_tensors()
        self.has_live_tensors = live is not None
        """The algorithm exposes its state where it lives. Otherwise the host copies it, and reads
        after every rollout."""
        collector.tracker.reads_at_once |= not self.has_live_tensors
        self.live = tree_leaves((live, collector.tensors()))
        self.copies = [_allocate_copy(self.live) for _ in range(3)]
        self.fresh, self.kept, self.clean = self.copies
        self.flags = torch.ones(2, dtype=torch.bool, device=self.live[0].device)
        """State and rollout, and metrics too, have been finite in all iterations since the host
        read last."""
        self.metrics_finite = True
        """All metrics of the last snapshot are finite; used if the host reads after every
        iteration."""
        self.rollout = tree_map(torch.clone, collector.rollout) if reads_late else None
        """The first rollout since the host read last after which something was not finite."""
        self.random: list[list[Tensor]] = []
        """Random states at the start of every iteration since the host read last."""
        self.env: Callable[[], dict[str, Any]] | None = None
        """Returns the state of the environment at the start of the iteration; None if it cannot be
        restored."""
        self.algorithm: dict[str, Any] | None = None
        """State of the algorithm at the start of the iteration, if it has no live tensors."""
        self.iteration = 0
        """The last iteration that the host has read."""
        self.fraction: float | Tensor = 0.0
        """Completed fraction of the run at the start of the iteration."""

    def reset(self) -> None:
        """Take the present state as good, and as fully read by the host."""
        self.fresh, self.kept, self.clean = self.copies
        copy_all_(self.kept.leaves, self.live)
        copy_all_(self.clean.leaves, self.live)
        self.flags.fill_(True)
        self.mark_read()

    def mark_read(self) -> None:
        """Note that the host has read everything up to now and found it finite."""
        self.random.clear()
        self.iteration = self.state.run.progress().iteration

    def stage(self, fraction: float | Tensor) -> None:
        """Keep what the coming iteration will change and `snapshot` does not copy."""
        self.fraction = fraction
        self.random.append([generator.get_state() for generator in self.state.algorithm.generators()])
        if not (self.flags.is_cuda and isinstance(self.collector.env, Capturable)):
            self.env = None  # an earlier iteration's copy is no use if this one fails to be taken
            self.env = self.collector.env_snapshot()
        if not self.has_live_tensors:
            self.algorithm = self.state.algorithm.state_dict()

    def snapshot(self, metrics: Metrics) -> None:
        """Copy the state after an update; if the host reads at once, raise NonFiniteUpdate."""
        if not self.fresh.copy_fast(0, self.live):
            copy_all_(self.fresh.leaves, self.live)
        floats = [buffer for buffer in self.fresh.buffers.values() if buffer.is_floating_point()]
        if self.collector.tracker.reads_at_once:
            if not all(is_finite(buffer) for buffer in floats):
                raise NonFiniteUpdate(NONFINITE_UPDATE)
            self.metrics_finite = all(math.isfinite(value.item()) for value in metrics.values())
        else:
            self._snapshot_on_device(floats, metrics)

    def _snapshot_on_device(self, floats: list[Tensor], metrics: Metrics) -> None:
        """Decide on the device which copies the new state replaces; no host sync."""
        state_is_finite = torch.stack([(x - x).sum().double() for x in floats]).sum() == 0
        good = state_is_finite & self.collector.tracker.finite
        values = [value.detach().double() for value in metrics.values()] or [good.double()]
        found = torch.stack([good, good & torch.isfinite(torch.stack(values)).all()])
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

    def commit(self) -> None:
        """Make the last snapshot the last good state, and keep its episodes for the log.

        On a GPU the device has decided in `snapshot`; on a CPU the copies swap places. Neither
        copies a tensor.
        """
        if self.collector.tracker.reads_at_once:
            self._swap_copies()
        self.collector.keep_episodes(self.flags)

    def _swap_copies(self) -> None:
        self.kept = self.fresh
        if self.metrics_finite and self.flags[1]:
            self.clean = self.fresh
        elif self.flags[1]:
            self.flags[1] = False
            if self.rollout is not None:
                copy_all_(tree_leaves(self.rollout), tree_leaves(self.collector.rollout))
        self.fresh = next(copy for copy in self.copies if copy is not self.kept and copy is not self.clean)

    def rollout_after(self, good: int) -> Rollout[Any] | None:
        """Return the rollout after `good` iterations since the last reading, if it exists."""
        if good == len(self.random) - 1:
            return self.collector.rollout
        return self.rollout if self.collector.tracker.unclean == good else None

    def state_before_nonfinite_metric(self, good: int) -> dict[str, Any]:
        """Return the algorithm's state before its first nonfinite metric; change nothing."""
        copy_all_(self.fresh.leaves, self.live)
        copy_all_(self.live, self.clean.leaves)
        state = self.algorithm or self.state.algorithm.state_dict()
        copy_all_(self.live, self.fresh.leaves)
        return {"algorithm": state, "random": self.random[good]}

    def restore(self, good: int) -> dict[str, Any]:
        """Load the state after `good` iterations since the last reading; return it as a tree."""
        copy_all_(self.live, self.kept.leaves)
        committed = self.state.run.progress().iteration - self.iteration
        if good < len(self.random):
            for generator, state in zip(self.state.algorithm.generators(), self.random[good], strict=True):
                generator.set_state(state)
        self.collector.steps_before -= (committed - good) * self.collector.algorithm.horizon
        env = None
        if self.env is not None and good == len(self.random) - 1:
            env = self.env()
        return {
            "algorithm": self.algorithm or self.state.algorithm.state_dict(),
            "collector": self.collector.state_after_failure(env, NOT_KEPT),
        }


class TensorCopy(NamedTuple):
    """Memory for a copy of many tensors: one buffer per dtype, checked in one operation."""

    buffers: dict[torch.dtype, Tensor]
    leaves: list[Tensor]
    """Views into the buffers, one for each tensor."""
    copy_fast: Callable[[int, list[Any]], bool]
    """Copies all tensors in one native call, see `fused_writer`; returns False if it cannot."""


def _allocate_copy(tensors: list[Tensor]) -> TensorCopy:
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    buffers = {dtype: torch.empty(size, dtype=dtype, device=tensors[0].device) for dtype, size in sizes.items()}
    unused = dict(buffers)
    leaves = []
    for tensor in tensors:
        leaves.append(unused[tensor.dtype][: tensor.numel()].view(tensor.shape))
        unused[tensor.dtype] = unused[tensor.dtype][tensor.numel() :]
    return TensorCopy(buffers, leaves, fused_writer([leaf.unsqueeze(0) for leaf in leaves]))

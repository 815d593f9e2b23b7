"""Settings that cannot work with an environment, refused before any work is lost.

One loss, one optimiser, so many epochs and minibatches.

L sequence length, S sequences in a batch, B sequences in a minibatch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.specs import EnvSpec
from canter.core.struct import Metrics, TensorStruct, tree_leaves
from canter.functional.minibatches import Shuffle, epoch_orders
from canter.nn.optimizer import Optimizer
from canter.nn.stack import has_batch_norm


def check_batch(
    horizon: int,
    num_envs: int,
    num_minibatches: int,
    sequence_length: int = 1,
    key: str = "",
    *,
    even: bool = True,
    may_drop: bool = True,
) -> None:
    """Refuse sequences and minibatches that do not divide the rollout, and offer the nearest numbers that do.

    Without `even` the minibatches need only be there; `may_drop` says that there is a setting for that.
    """
    if horizon % sequence_length:
        fits = [n for n in range(1, horizon + 1) if horizon % n == 0]
        near = min(fits, key=lambda n: abs(n - sequence_length))
        longer = math.ceil(horizon / sequence_length) * sequence_length
        raise ValueError(
            f"sequence_length={sequence_length} does not divide horizon={horizon}; "
            f"use sequence_length={near}, or horizon={longer}"
        )
    batch = horizon // sequence_length * num_envs
    if batch % num_minibatches == 0 or (not even and num_minibatches < batch):
        return
    fewer = next(n for n in range(num_minibatches, 0, -1) if batch % n == 0)
    more = next((n for n in range(num_minibatches, batch) if batch % n == 0), batch)
    step = num_minibatches // math.gcd(num_minibatches, num_envs) * sequence_length
    over = f" / sequence_length = {horizon} * {num_envs} / {sequence_length}" if sequence_length > 1 else ""
    drop = ", or uneven_minibatches=drop, which leaves some rows out" if may_drop and even else ""
    raise ValueError(
        f"{key}num_minibatches={num_minibatches} does not divide horizon * num_envs"
        f"{over or f' = {horizon} * {num_envs}'} = {batch}; "
        f"use {key}num_minibatches={fewer} or {more}, or horizon={math.ceil(horizon / step) * step}"
        + (drop if num_minibatches < batch else "")
    )


def check_blocks(blocks: int | None, num_envs: int) -> int:
    """Environments of a block that is shuffled apart; refuses blocks that ranks or their environments do not fill."""
    ranks = distributed.world_size()
    own = (blocks or ranks) // ranks
    if blocks is not None and (blocks % ranks or num_envs % own):
        fits = [n * ranks for n in range(1, num_envs + 1) if num_envs % n == 0]
        near = min(fits, key=lambda n: abs(n - blocks))
        raise ValueError(
            f"shuffle_blocks={blocks} does not divide {num_envs * ranks} environments on {ranks} ranks into blocks "
            f"within ranks; use shuffle_blocks={near}"
        )
    return num_envs // own


def check_norms(model: nn.Module) -> None:
    """Refuse batch norm: its statistics would stay as they begin, as only joint batches move them."""
    if has_batch_norm(model):
        raise ValueError("a norm of kind batch needs the joint batches of sac; use layer or rms with ppo")


def check_discount(gamma: float, spec: EnvSpec) -> None:
    """Refuse gamma = 1 where values would have no fixed point, warn where they might not."""
    if gamma < 1 or spec.truncates is False:
        return
    reason = (
        "with gamma=1 a value is the whole future reward; where episodes are cut off and bootstrapped from that value, "
        "it has no fixed point and drifts without end"
    )
    if spec.truncates:
        raise ValueError(
            f"gamma=1 on {spec.env_id or 'this environment'}, whose episodes are truncated: {reason}. "
            "Use gamma < 1, or declare finite_horizon=True if the deadline is part of the task and the observation "
            "tells the time"
        )
    warnings.warn(f"gamma=1: {reason}. This is fine only if every episode terminates by itself", stacklevel=3)


Batch = TypeVar("Batch", bound=TensorStruct)
BatchIn = TypeVar("BatchIn", bound=TensorStruct, contravariant=True)
KL = "policy/kl"
"""The metric of a minibatch that early stops and adaptive learning rates look at."""


class Gradients(Protocol[BatchIn]):
    """Source of the gradients of a phase: an engine, or any loss through `LossGradients`."""

    optimizer: Optimizer

    def begin(self, batch: BatchIn) -> Any:
        """Take the rows `[L, S, ...]` to learn from."""
        ...

    def gradients(self, rows: Any, index: Tensor, coefs: Any) -> Metrics:
        """Write the gradients of sequences `index` `[B]` into the optimiser; gives what there is to log."""
        ...


class WeightedMean:
    """Means of 0-d tensors, gathered without asking the host."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.rows: list[list[Tensor]] = []
        self.weights: list[Tensor] = []

    def add(self, metrics: Metrics, weight: Tensor) -> None:
        """Note one observation of the same metrics as before; a 0-d `weight` of 0 leaves it out, whatever it holds."""
        self.names = tuple(metrics)
        self.rows.append([value.detach() if value.requires_grad else value for value in metrics.values()])
        self.weights.append(weight)

    @property
    def count(self) -> Tensor:
        """Sum of the weights."""
        return torch.stack(self.weights).sum() if self.weights else torch.zeros(())

    def means(self) -> Metrics:
        """Weighted means of all observations."""
        if not self.rows:
            return {}
        rows = torch.stack([value for row in self.rows for value in row]).view(len(self.rows), -1)
        weights = torch.stack(self.weights).unsqueeze(-1)
        means = torch.where(weights > 0, rows * weights, 0.0).sum(0) / weights.sum().clamp(min=1.0)
        return dict(zip(self.names, means.unbind(), strict=True))


@dataclass
class Phase(Generic[Batch]):
    """Passes over a batch in minibatches of one size; what is left over at the end of a pass is left out."""

    source: Gradients[Batch]
    epochs: int
    num_minibatches: int
    generator: torch.Generator
    target_kl: float = float("inf")
    """No further step is taken in this run once a minibatch finds a KL above this."""
    name: str = "optim"
    """What the optimiser's own metrics are filed under."""
    shuffle: Shuffle = "epoch"
    num_envs: int = 1
    """For `shuffle="none"` and `blocks`: how many environments the sequences are of."""
    blocks: int | None = None
    """Blocks of environments, over all ranks, that are shuffled apart; None for one on each rank."""
    draw: Callable[[Rollout[Any]], Batch] | None = None
    """Gives the batch `[L, S, ...]` of this phase for a new rollout; None takes the rows of the algorithm itself."""

    @property
    def optimizer(self) -> Optimizer:
        """The one that the gradients are written for."""
        return self.source.optimizer

    def run(self, batch: Batch, coefs: Any = None, *, kl: Tensor | None = None, refresh: Any = None) -> Metrics:
        """Train on `batch`, tensors of `[L, S, ...]`; metrics are means over the minibatch updates that were done.

        `kl` is what adaptive learning rates follow where the loss finds none. `refresh()` gives the batch anew before
        each epoch after the first; None uses the same one throughout.
        """
        totals, steps, may_stop = WeightedMean(), WeightedMean(), self.target_kl < float("inf")
        stopped = torch.zeros((), dtype=torch.bool, device=self.generator.device)
        kl = stopped.float() if kl is None else kl
        weight, rows, sequences = (~stopped).float(), self.source.begin(batch), tree_leaves(batch)[0].shape[1]
        orders = epoch_orders(self.shuffle, sequences, self.num_envs, self.generator, self.num_minibatches, self.blocks)
        if self.draw is not None and sequences % self.num_minibatches:
            raise ValueError(f"{self.name}: num_minibatches={self.num_minibatches} must divide its {sequences} rows")
        optimizer, together = self.optimizer, distributed.active()
        for number in range(self.epochs):
            if refresh is not None and number > 0:
                rows = self.source.begin(refresh())
            epoch = WeightedMean()
            order = next(orders)
            size = len(order) // self.num_minibatches
            indices = order[: size * self.num_minibatches].view(-1, size)
            counts = count_valid(batch, indices) if together else None
            for place, index in enumerate(indices.unbind()):
                metrics = self.source.gradients(rows, index, coefs)
                if counts is not None:
                    metrics = optimizer.exchange_(metrics, counts[place])
                kl = metrics.get(KL, kl)
                epoch.add({"kl": kl}, weight)
                if may_stop:
                    # A tensor that blocks the step, alike on all ranks: nothing waits for the host.
                    stopped = stopped | ~(kl <= self.target_kl)
                    weight = (~stopped).float()
                    if self._host_stops(stopped):
                        break
                if totals.rows:  # before the first step the KL is rounding error only
                    optimizer.observe_(kl, "minibatch")
                totals.add(metrics, weight)
                steps.add(optimizer.step(stopped), weight)
                optimizer.observe_(kl, "step")
            kl = epoch.means()["kl"]
            optimizer.observe_(kl, "epoch")
            if self._host_stops(stopped):
                break
        optimizer.observe_(kl, "update")
        own = steps.means() | optimizer.learning_rates() | {"minibatch_updates": totals.count}
        return totals.means() | {f"{self.name}/{key}": value for key, value in own.items()}

    def _host_stops(self, stopped: Tensor) -> bool:
        """Whether to end the loop: on a CPU, where reading is free. A GPU runs the remaining steps without effect."""
        return self.target_kl < float("inf") and stopped.is_cpu and bool(stopped)


def count_valid(batch: TensorStruct, indices: Tensor) -> Tensor:
    """How many rows of minibatches of sequences `indices` `[M, B]` are valid, `[M]`: what a rank counts for."""
    valid = getattr(batch, "valid", None)
    if valid is None:
        return torch.ones_like(indices[:, 0], dtype=torch.float32)
    return valid.sum(0, dtype=torch.float32)[indices].sum(-1)

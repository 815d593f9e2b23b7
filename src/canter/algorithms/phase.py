"""A phase of an update: one loss, one optimizer, and the epochs and minibatches to train it with.

L sequence length (1 for feed-forward networks), S sequences in a batch, B sequences in a minibatch,
M minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from canter.core import distributed
from canter.core.data.rollout import Rollout
from canter.core.registry import UserError
from canter.core.struct import Metrics, TensorStruct, tree_leaves
from canter.engines.base import UpdateResult
from canter.functional.optimization import Shuffle, epoch_orders
from canter.nn.optimizer import Optimizer

Batch = TypeVar("Batch", bound=TensorStruct)
BatchIn = TypeVar("BatchIn", bound=TensorStruct, contravariant=True)
KL = "policy/kl"
"""Name under which a phase logs the KL."""


class Gradients(Protocol[BatchIn]):
    """Source of the gradients of a phase: an engine, or any loss through `LossGradients`."""

    optimizer: Optimizer

    def begin(self, batch: BatchIn) -> Any:
        """Return the samples `[L, S, ...]` in the form that `gradients` takes."""
        ...

    def gradients(self, samples: Any, index: Tensor, coefs: Any) -> UpdateResult:
        """Write the gradients of sequences `index` `[B]`; return metrics and KL."""
        ...


@dataclass
class Phase(Generic[Batch]):
    """Epochs over a batch in minibatches of equal size; each epoch leaves out the remainder."""

    source: Gradients[Batch]
    epochs: int
    num_minibatches: int
    generator: torch.Generator
    """Random stream of the shuffling."""
    target_kl: float = float("inf")
    """Stop a run, without a further step, once the KL of a minibatch exceeds this."""
    name: str = "optim"
    """Prefix of the optimizer's metrics."""
    shuffle: Shuffle = "epoch"
    num_envs: int = 1
    """Number of environments that the sequences come from, for `shuffle="none"` and `blocks`."""
    select: Callable[[Batch], Batch] | None = None
    """Returns the sequences of a batch that are trained on, those of `num_envs` environments; None takes all."""
    blocks: int | None = None
    """Blocks of environments, over all ranks, that are shuffled separately; None for one per
    rank."""
    draw: Callable[[Rollout[Any]], Batch] | None = None
    """Returns the phase's own batch `[L, S, ...]` for a new rollout; None takes the algorithm's
    samples."""

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer that the gradients are written into."""
        return self.source.optimizer

    def run(self, batch: Batch, coefs: Any = None, *, kl: Tensor | None = None, refresh: Any = None) -> UpdateResult:
        """Train on `batch`, tensors of `[L, S, ...]`; return means over the minibatch updates.

        Adaptive learning rates follow `kl` if the loss measures no KL. `refresh()` returns a new
        batch before each epoch after the first; None uses the same batch throughout.
        """
        optimizer = self.optimizer
        select = self.select or (lambda batch: batch)
        batch = select(batch)
        samples = self.source.begin(batch)
        orders = self._epoch_orders(batch)
        kl = torch.zeros((), device=self.generator.device) if kl is None else kl
        stopped = torch.zeros_like(kl, dtype=torch.bool)
        weight = (~stopped).float()
        last_kl = kl
        updates = WeightedMean()
        steps = WeightedMean()
        for epoch in range(self.epochs):
            if refresh is not None and epoch > 0:
                samples = self.source.begin(select(refresh()))
            minibatches = self._minibatches(next(orders))
            counts = count_valid(batch, minibatches) if distributed.active() else None
            epoch_kl = WeightedMean()
            for number, index in enumerate(minibatches.unbind()):
                result = self.source.gradients(samples, index, coefs)
                if counts is not None:
                    result = _mean_over_ranks(optimizer, result, counts[number])
                metrics = result.metrics
                if result.kl is not None:
                    kl = result.kl
                    metrics = metrics | {KL: kl}
                epoch_kl.add({"kl": kl}, weight)
                if self.target_kl < float("inf"):
                    # A tensor that blocks the step, equal on all ranks: nothing waits for the host.
                    stopped = stopped | ~(kl <= self.target_kl)
                    weight = (~stopped).float()
                    if self._leaves_loop(stopped):
                        break
                    kl = torch.where(stopped, 0.0, kl)  # to a schedule: no step was taken
                if updates.observations:  # before the first step the KL is rounding error only
                    optimizer.observe_(kl, "minibatch")
                updates.add(metrics, weight)
                steps.add(optimizer.step(stopped), weight)
                optimizer.observe_(kl, "step")
            kl = epoch_kl.means()["kl"]
            optimizer.observe_(kl, "epoch")
            last_kl = torch.where(epoch_kl.count > 0, kl, last_kl) if self.target_kl < float("inf") else kl
            if self._leaves_loop(stopped):
                break
        optimizer.observe_(last_kl, "update")
        metrics = updates.means()
        own = steps.means() | optimizer.learning_rates() | {"minibatch_updates": updates.count}
        logged = metrics | {f"{self.name}/{key}": value for key, value in own.items()}
        return UpdateResult(logged, metrics.get(KL))

    def _epoch_orders(self, batch: Batch) -> Iterator[Tensor]:
        """Return an iterator over the orders `[S]` of the sequences, one for each epoch."""
        sequences = tree_leaves(batch)[0].shape[1]
        if self.draw is not None and sequences % self.num_minibatches:
            raise UserError(f"{self.name}: num_minibatches={self.num_minibatches} must divide its {sequences} samples")
        return epoch_orders(self.shuffle, sequences, self.num_envs, self.generator, self.num_minibatches, self.blocks)

    def _minibatches(self, order: Tensor) -> Tensor:
        """Return the sequences of each minibatch, `[M, B]`."""
        size = len(order) // self.num_minibatches
        return order[: size * self.num_minibatches].view(-1, size)

    def _leaves_loop(self, stopped: Tensor) -> bool:
        """Return True to leave the loop: on a CPU, where reading is free.

        A GPU runs the remaining steps without effect.
        """
        return self.target_kl < float("inf") and stopped.is_cpu and bool(stopped.all())


class WeightedMean:
    """Weighted means of 0-d tensors by name, accumulated without reading them on the host.

    For a population all tensors are `[P]`, and so are the means.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.observations: list[list[Tensor]] = []
        self.weights: list[Tensor] = []

    def add(self, metrics: Metrics, weight: Tensor) -> None:
        """Add an observation of the same metrics as before.

        A 0-d `weight` of 0 leaves it out, even if it is NaN.
        """
        self.names = tuple(metrics)
        self.observations.append([value.detach() if value.requires_grad else value for value in metrics.values()])
        self.weights.append(weight)

    @property
    def count(self) -> Tensor:
        """Sum of the weights."""
        return torch.stack(self.weights).sum(0) if self.weights else torch.zeros(())

    def means(self) -> Metrics:
        """Return the weighted mean of each metric."""
        if not self.observations:
            return {}
        values = torch.stack([value for observation in self.observations for value in observation])
        values = values.unflatten(0, (len(self.observations), -1))
        weights = torch.stack(self.weights).unsqueeze(1)
        means = torch.where(weights > 0, values * weights, 0.0).sum(0) / weights.sum().clamp(min=1.0)
        return dict(zip(self.names, means.unbind(), strict=True))


def _mean_over_ranks(optimizer: Optimizer, result: UpdateResult, count: Tensor) -> UpdateResult:
    """Average gradients, metrics and KL over ranks in one exchange, weighted by valid samples."""
    if result.kl is None:
        return UpdateResult(optimizer.exchange_(result.metrics, count))
    averaged = optimizer.exchange_(result.metrics | {KL: result.kl}, count)
    kl = averaged.pop(KL)
    return UpdateResult(averaged, kl)


def count_valid(batch: TensorStruct, indices: Tensor) -> Tensor:
    """Return the number of valid samples `[M]` in minibatches of sequences `indices` `[M, B]`."""
    valid = getattr(batch, "valid", None)
    if valid is None:  # a batch of a user's phase may have no mask
        return torch.ones_like(indices[:, 0], dtype=torch.float32)
    return valid.sum(0, dtype=torch.float32)[indices].sum(-1)


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
    """Raise UserError if the rollout cannot be split evenly into sequences and minibatches.

    The message names numbers that fit. Without `even`, minibatches may leave a remainder.
    `may_drop` mentions the setting `uneven_minibatches`.
    """
    if horizon % sequence_length:
        divisors = [n for n in range(1, horizon + 1) if horizon % n == 0]
        near = min(divisors, key=lambda n: abs(n - sequence_length))
        longer = math.ceil(horizon / sequence_length) * sequence_length
        raise UserError(
            f"sequence_length={sequence_length} does not divide horizon={horizon}; "
            f"use sequence_length={near}, or horizon={longer}"
        )
    batch = horizon // sequence_length * num_envs
    if batch % num_minibatches == 0 or (not even and num_minibatches < batch):
        return
    fewer = next(n for n in range(num_minibatches, 0, -1) if batch % n == 0)
    more = next((n for n in range(num_minibatches, batch) if batch % n == 0), batch)
    step = num_minibatches // math.gcd(num_minibatches, num_envs) * sequence_length
    longer = math.ceil(horizon / step) * step
    size = f"horizon * num_envs = {horizon} * {num_envs}"
    if sequence_length > 1:
        size = f"horizon * num_envs / sequence_length = {horizon} * {num_envs} / {sequence_length}"
    fitting = " or ".join(map(str, dict.fromkeys((fewer, more))))
    message = (
        f"{key}num_minibatches={num_minibatches} does not divide {size} = {batch}; "
        f"use {key}num_minibatches={fitting}, or horizon={longer}"
    )
    if may_drop and even and num_minibatches < batch:
        message += ", or uneven_minibatches=drop, which leaves some samples out"
    raise UserError(message)


def check_blocks(blocks: int | None, num_envs: int) -> int:
    """Return the environments per shuffled block; raise UserError if blocks do not fit the ranks.

    `blocks` counts over all ranks, `num_envs` are those of one rank.
    """
    ranks = distributed.world_size()
    own = (blocks or ranks) // ranks
    if blocks is not None and (blocks % ranks or num_envs % own):
        candidates = [n * ranks for n in range(1, num_envs + 1) if num_envs % n == 0]
        near = min(candidates, key=lambda n: abs(n - blocks))
        raise UserError(
            f"shuffle_blocks={blocks} does not divide {num_envs * ranks} environments on {ranks} ranks into blocks "
            f"within ranks; use shuffle_blocks={near}"
        )
    return num_envs // own

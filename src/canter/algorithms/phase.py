"""One loss, one optimiser, so many epochs and minibatches.

L sequence length, S sequences in a batch, B sequences in a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from canter import distributed
from canter.algorithms.base import Metrics
from canter.kernels import usable
from canter.optim import Optimizer
from canter.struct import TensorStruct

Batch = TypeVar("Batch", bound=TensorStruct)


@dataclass
class LossOutput:
    """A minibatch's loss, how far it finds the policy moved, and what to log; all 0-d."""

    loss: Tensor | None
    """What autograd is to differentiate; None where the gradients are already in `Optimizer.gradients`."""
    kl: Tensor
    metrics: Metrics


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
        """Weighted means of all observations, over all ranks; the weights are alike on each."""
        if not self.rows:
            return {}
        rows = torch.stack([value for row in self.rows for value in row]).view(len(self.rows), -1)
        weights = torch.stack(self.weights).unsqueeze(-1)
        means = torch.where(weights > 0, rows * weights, 0.0).sum(0) / weights.sum().clamp(min=1.0)
        return dict(zip(self.names, distributed.mean_(means).unbind(), strict=True))


@dataclass
class Phase(Generic[Batch]):
    """Passes over a batch, each in a new random order in which every sequence comes exactly once."""

    loss: Callable[[Batch], LossOutput]
    optimizer: Optimizer
    epochs: int
    num_minibatches: int
    generator: torch.Generator
    target_kl: float = float("inf")
    """No further step is taken in this run once a minibatch finds a KL above this."""
    name: str = "optim"
    """What the optimiser's own metrics are filed under."""

    def run(self, batch: Batch, refresh: Callable[[], Batch] | None = None) -> Metrics:
        """Train on `batch`, tensors of `[L, S, ...]`; metrics are means over the minibatch updates that were done.

        `refresh` gives the batch anew before each epoch after the first; None uses the same one throughout.
        """
        totals, kl, may_stop = WeightedMean(), torch.zeros(()), self.target_kl < float("inf")
        stopped = torch.zeros((), dtype=torch.bool, device=self.generator.device)
        weight = (~stopped).float()
        for number in range(self.epochs):
            batch = refresh() if refresh is not None and number > 0 else batch
            epoch = WeightedMean()
            for minibatch in self._shuffled(batch):
                output = self.loss(minibatch)
                kl = distributed.mean(output.kl.detach())
                epoch.add({"kl": kl}, weight)
                if may_stop:
                    # A tensor that blocks the step, alike on all ranks: nothing waits for the host.
                    stopped = stopped | ~(kl <= self.target_kl)
                    weight = (~stopped).float()
                if self._host_stops(stopped):
                    break
                if totals.rows:  # before the first step the KL is nothing but rounding
                    self.optimizer.observe_(kl, "minibatch")
                step = self.optimizer.step(output.loss, stopped)
                totals.add(output.metrics | self._named(step), weight)
            kl = epoch.means()["kl"]
            self.optimizer.observe_(kl, "epoch")
            if self._host_stops(stopped):
                break
        self.optimizer.observe_(kl, "update")
        own = self.optimizer.learning_rates() | {"minibatch_updates": totals.count}
        return totals.means() | self._named(own)

    def _named(self, metrics: Metrics) -> Metrics:
        return {f"{self.name}/{key}": value for key, value in metrics.items()}

    def _host_stops(self, stopped: Tensor) -> bool:
        """Whether no further step is taken, where looking costs nothing; elsewhere blocked steps run to no effect."""
        return self.target_kl < float("inf") and stopped.device.type == "cpu" and bool(stopped)

    def _shuffled(self, batch: Batch) -> list[Batch]:
        """Minibatches `[L, B, ...]` of one epoch: one gather, then slices."""
        sequences = batch_size(batch)
        order = random_order(sequences, self.generator)
        size, slices = sequences // self.num_minibatches, []
        batch.map(lambda x: slices.append(reorder(x, order).split(size, 1)) or x)
        return [batch.map(partial(_next, iter(minibatch))) for minibatch in zip(*slices, strict=True)]


def _next(tensors: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(tensors)


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """A random permutation `[count]` on the generator's device."""
    if not usable(torch.empty(0, device=generator.device)):
        return torch.randperm(count, generator=generator, device=generator.device)
    from canter.kernels import rows

    return rows.random_order(count, generator)


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Sequences `[L, S, ...]` in another order."""
    if not usable(x):
        return x.index_select(1, order)
    from canter.kernels.rows import gather_sequences

    return gather_sequences(x, order)


def batch_size(batch: TensorStruct) -> int:
    """S, the number of sequences in a batch of `[L, S, ...]` tensors."""
    sizes: list[int] = []
    batch.map(lambda x: sizes.append(x.shape[1]) or x)
    return sizes[0]

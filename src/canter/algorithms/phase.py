"""One loss, one optimiser, so many epochs and minibatches.

L sequence length, S sequences in a batch, B sequences in a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from canter import distributed
from canter.data.rollout import Rollout
from canter.functional.order import Shuffle, epoch_orders
from canter.optim import Optimizer
from canter.struct import Metrics, TensorStruct, tree_leaves

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

"""An engine that acts, values and learns in C, without memory, on a CPU.

N environments, L sequence length, B sequences, S rows to learn from, A action components, P distribution parameters.
The autograd engine stays the definition: tests hold every description that this one accepts against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from canter.core import distributed
from canter.core.specs import ACTION_MASK
from canter.core.struct import Metrics, Obs, State
from canter.engines.base import Acted, Coefs, PPOBatch, PPOLoss, Valued
from canter.engines.native.declines import compiled, declines
from canter.engines.native.description import Description
from canter.functional.statistics import moments
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import DiagGaussian, MultiCategorical
from canter.nn.optimizer import Optimizer

NAMES = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction", "loss/bound")
"""What C gives the means of, in its order."""


@dataclass(frozen=True)
class NativeRows:
    """Rows to learn from: arrays held by C, and what Python needs of them where several ranks learn together."""

    handle: Any
    valid: Tensor
    """`[S]`."""
    advantage: Tensor
    """`[S]`."""


class NativeEngine:
    """One loss of one model; raises ValueError with the sentence of `declines` where it does not know either.

    Gradients of parameters that the loss does not depend on become zero. Parameters and gradients must stay where they
    are. As many threads may share a call as torch has when rows come in; how many do follows from sizes alone.
    """

    name = "native"

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        reason = declines(loss, model)
        if reason is not None:
            raise ValueError(reason)
        self.loss, self.model, self.optimizer = loss, model, optimizer
        gradients = optimizer.gradients
        self.dtype = next(model.parameters()).dtype
        self.distribution: Any = model.policy.distribution
        # Looked up once: a module's attributes take longer to find than an action.
        self._policy_groups, self._masked = model.actor.network.groups, model.actor.masked
        self._gaussian = isinstance(self.distribution, DiagGaussian)
        self._bounded = self._gaussian and self.distribution.bounds != "none"
        self._action_dtype = self.dtype if self._gaussian else torch.int64
        self._params = torch.empty(0, 0)
        self._description = Description(loss, model, gradients)
        written = self._description.written
        self._unused = [view for parameter, view in gradients.items() if parameter not in written]
        self._handle, self._handle_threads = None, 0
        has = {"loss/policy": loss.surrogate, "loss/value": loss.value_loss, "loss/bound": loss.bound}
        reported = [has.get(name, loss.surrogate) is not None for name in NAMES]
        reported[NAMES.index("loss/bound")] &= loss.surrogate is not None
        self._reported = [name if wanted else None for name, wanted in zip(NAMES, reported, strict=True)]
        self._means = _fresh_numbers(len(NAMES), self.dtype)

    def act(self, obs: Obs, state: State, reset: Tensor, rng: Generator) -> Acted:
        """What the environment receives, the action as drawn, `dist_params` `[N, P]`, and the state as it came.

        The next call writes over the latter two; an environment may keep what it receives.
        """
        arrays = [self._checked(obs[name]) for name in self._policy_groups]
        rows = arrays[0].shape[0]
        if self._params.shape[0] != rows:
            self._prepare(rows)
        self._draw(generator=rng)
        for_env = next(self._for_env)
        arrays += [self._checked(obs[ACTION_MASK], torch.bool)] if self._masked else []
        compiled().act(self._model(), rows, (*arrays, *self._fixed, for_env))
        return for_env, self._action if self._bounded else for_env, self._params, state

    def _prepare(self, rows: int) -> None:
        """Memory for acting on so many rows: noise of all ranks, of which this one's is taken, and results."""
        noises = self.distribution.dim if self._gaussian else self.distribution.param_dim
        shape: tuple[int, ...] = (rows, noises) if self._gaussian else (rows,)
        if isinstance(self.distribution, MultiCategorical):
            shape = (rows, len(self.distribution.nvec))
        noise = torch.empty((rows * distributed.world_size(), noises), dtype=self.dtype)
        self._draw = noise.normal_ if self._gaussian else noise.uniform_
        self._params = torch.empty((rows, self.distribution.param_dim), dtype=self.dtype)
        self._action, self._for_env = torch.empty(shape, dtype=self._action_dtype), _fresh(shape, self._action_dtype)
        fixed = [noise[distributed.own_rows(rows)], self._params, *[self._action] * self._bounded]
        self._fixed = [tensor.numpy() for tensor in fixed]  # whose addresses are found sooner than those of tensors

    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Values `[L, B]` in units of the reward, of observations `[L, B, ...]`, and the state as it came.

        Where `needed` `[L, B]` is False the value is 0.
        """
        critic = self.model.critic
        shape = obs[critic.network.groups[0]].shape[:2]
        groups = [self._checked(obs[name]) for name in critic.network.groups]
        rows = shape.numel()
        index = None if needed is None else np.flatnonzero(needed.numpy())
        found = torch.empty(rows if index is None else len(index), dtype=self.dtype)
        if len(found):
            compiled().values(self._model(), rows, index, (*groups, found))
        found = critic.head.normalizer.inverse(found)
        if index is None:
            return found.view(shape), state
        values = torch.zeros(rows, dtype=self.dtype)
        values[torch.from_numpy(index)] = found
        return values.view(shape), state

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities `[...]` of actions under parameters `[..., P]`, rounded as `gradients` rounds them."""
        shape = dist_params.shape[:-1]
        result = torch.empty(shape, dtype=self.dtype)
        if shape.numel():
            arrays = (self._checked(dist_params), self._checked(action, self._action_dtype), result)
            compiled().log_prob(self._model(), shape.numel(), arrays)
        return result

    def begin(self, batch: PPOBatch) -> NativeRows:
        """Rows of a `PPOBatch` of `[1, S, ...]`, which must not change while they are learned from."""
        networks = [self.model.actor.network, *([] if self.model.shared_trunk else [self.model.critic.network])]
        arrays = [self._checked(batch.obs[name]) for network in networks for name in network.groups]
        arrays += [self._checked(batch.obs[ACTION_MASK], torch.bool)] if self._masked else []
        arrays += [self._checked(batch.valid, torch.bool), self._checked(batch.action, self._action_dtype)]
        names = ("dist_params", "log_prob", "advantage", "value", "return_")
        arrays += [self._checked(getattr(batch, name)) for name in names]
        valid = batch.valid.reshape(-1)
        handle = compiled().rows(self._model(), len(valid), tuple(arrays))
        return NativeRows(handle, valid, batch.advantage.reshape(-1))

    def gradients(self, rows: NativeRows, index: Tensor, coefs: Coefs) -> Metrics:
        """Write all gradients of the loss of some rows, `index` int64 `[B]`; returns 0-d means over the valid ones."""
        adv_mean, adv_divisor = 0.0, -1.0  # negative: C finds both
        if distributed.world_size() > 1 and self.loss.advantage != "given":
            unbiased = self.loss.advantage == "minibatch_sample"
            adv_mean, adv_divisor = _divisor(rows.advantage[index], rows.valid[index], unbiased)
        entropy = float(coefs.entropy.numpy())
        array, means = next(self._means)
        array[:] = compiled().gradients(rows.handle, index, entropy, adv_mean, adv_divisor)
        for view in self._unused:
            view.zero_()
        return {name: mean for name, mean in zip(self._reported, means, strict=True) if name}

    def _model(self) -> Any:
        """The model in C, with as many workspaces as there may be threads."""
        threads = torch.get_num_threads()
        if self._handle is None or threads != self._handle_threads:
            self._handle, self._handle_threads = self._description.build(threads), threads
        return self._handle

    def _checked(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in C's order; raises TypeError for another dtype than the model's, or the one asked for."""
        if tensor.dtype is not (dtype or self.dtype):
            raise TypeError(f"a tensor of {tensor.dtype} where the native engine needs {dtype or self.dtype}")
        return tensor.contiguous()


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """One new tensor `[N, ...]` after the other, made many at a time: a single one takes half as long as acting."""
    while True:
        yield from torch.empty((max(1, 1024 // shape[0]), *shape), dtype=dtype).unbind()


def _fresh_numbers(count: int, dtype: torch.dtype) -> Iterator[tuple[np.ndarray, tuple[Tensor, ...]]]:
    """One array `[count]` after the other, each with its numbers as new 0-d tensors, made many at a time too."""
    while True:
        block = torch.empty((64, count), dtype=dtype)
        yield from zip(block.numpy(), zip(*[iter(block.view(-1).unbind())] * count, strict=True), strict=True)


def _divisor(advantage: Tensor, valid: Tensor, unbiased: bool) -> tuple[float, float]:
    """Mean and divisor by which advantages `[B]` of all ranks are standardised, as in `stats.normalize`."""
    count, mean, m2 = (float(part) for part in moments(advantage, valid))
    std = (m2 / max(count - unbiased, 1.0)) ** 0.5
    resolution = max(torch.finfo(advantage.dtype).eps, 64 * torch.finfo(torch.float64).eps)
    return mean, std + 1e-8 if std > resolution * abs(mean) else 0.0

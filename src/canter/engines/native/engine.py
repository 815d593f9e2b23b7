"""The engine of PPO in C: acts, values and learns with feed-forward and recurrent networks on a CPU.

N environments, L sequence length, B sequences, S sequences to learn from, A action components, P
distribution parameters. The autograd engine is the definition: tests compare every supported
description with it.
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
from canter.core.struct import Obs, State, tree_leaves
from canter.engines.base import (
    NUMBERS,
    PLAIN_NETWORKS,
    Acted,
    Capabilities,
    Coefs,
    PPOBatch,
    PPOLoss,
    UpdateResult,
    Valued,
    unsupported_reason,
)
from canter.engines.native import ACTIVATIONS, STD_FORMS, build_requirement, compiled
from canter.engines.native.description import PPODescription
from canter.functional.statistics import moments
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import Beta, DiagGaussian, MultiCategorical, TanhGaussian
from canter.nn.optimizer import Optimizer

LAYERS = {
    **PLAIN_NETWORKS,
    "activation": ACTIVATIONS,
    "form": STD_FORMS,
    "parameter dtype": {"torch.float32", "torch.float64"},
    "device": {"cpu"},
}
"""Features of networks that both PPO and SAC in C support."""

CAPABILITIES = Capabilities(
    device="cpu",
    loss={
        "surrogate": {None, "clipped", "smooth_clipped", "vanilla"},
        "clip_ratio": NUMBERS,
        "value_loss": {None, "mse", "clipped", "huber"},
        "value_clip": NUMBERS,
        "value_coef": NUMBERS,
        "advantage": {"given", "minibatch", "minibatch_sample"},
        "bound": {None, "soft", "regularisation"},
    },
    model=LAYERS
    | {
        "layer norm": {"before_activation"},
        "distribution": {"gaussian", "tanh_gaussian", "beta", "categorical", "multi_categorical"},
        "action mask": {"torch.bool"},
        "rnn": {"standard"},
        "cell": {"lstm", "gru"},
        "layers": range(1, 9),
        "std kind": {"parameter", "constant", "network"},
        "critic": {"standard"},
        "value head": {"standard"},
    },
    requirement=build_requirement,
)

MEANS = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clip_fraction", "loss/bound")
"""Means that C returns, in its order."""
KL = MEANS.index("policy/kl")


@dataclass(frozen=True)
class NativeSamples:
    """Samples to learn from: arrays held by C, and tensors for advantages over several ranks."""

    handle: Any
    valid: Tensor
    """`[L, S]`."""
    advantage: Tensor
    """`[L, S]`."""


class NativeEngine:
    """Computes one loss of one model.

    Raises ValueError with the reason where it does not support them. Gradients of parameters that
    the loss does not depend on become zero. Parameters and gradients must keep their addresses. A
    call uses up to as many threads as torch has; their number follows from sizes alone.
    """

    name = "native"
    capabilities = CAPABILITIES

    def __init__(self, loss: PPOLoss, model: ActorCritic, optimizer: Optimizer) -> None:
        reason = unsupported_reason(CAPABILITIES, loss, model)
        if reason is not None:
            raise ValueError(reason)
        self.loss = loss
        self.model = model
        self.optimizer = optimizer
        gradients = optimizer.gradients
        self.dtype = next(model.parameters()).dtype
        self.distribution: Any = model.policy.distribution
        # Looked up once: a module's attributes take longer to find than an action.
        self._policy_groups = model.actor.network.groups
        self._masked = model.actor.masked
        self._gaussian = isinstance(self.distribution, DiagGaussian | TanhGaussian)
        self._is_beta = isinstance(self.distribution, Beta)
        match self.distribution:
            case DiagGaussian(bounds=bounds):
                self._bounded = bounds != "none"
            case other:
                self._bounded = isinstance(other, TanhGaussian)
        self._action_dtype = self.dtype if self._gaussian or self._is_beta else torch.int64
        self._params = torch.empty(0, 0)
        self._description = PPODescription(loss, model, gradients)
        written = self._description.written
        self._unused = [view for parameter, view in gradients.items() if parameter not in written]
        self._handle: Any = None
        self._handle_threads = 0
        self._length = 1 if model.is_recurrent else 0
        self._policy_state = StateLayout(model.actor.network.initial_state(1))
        self._critic_state = StateLayout(model.critic.network.initial_state(1))
        self._trains_policy = loss.surrogate is not None
        self._reported = [name if self._reports(name) else None for name in MEANS]
        self._means = _fresh_numbers(len(MEANS), self.dtype)

    def _reports(self, name: str) -> bool:
        """Return True if a mean is a metric of this loss; the KL is returned separately."""
        match name:
            case "policy/kl":
                return False
            case "loss/value":
                return self.loss.value_loss is not None
            case "loss/bound":
                return self.loss.bound is not None and self._trains_policy
        return self._trains_policy

    def act(self, obs: Obs, state: State, reset: Tensor | None, rng: Generator) -> Acted:
        """Sample actions.

        Return the action for the environment, the sample, `dist_params` `[N, P]` and the next
        state. The next call overwrites the sample and the parameters; an environment may keep the
        action it receives.
        """
        arrays: list[Tensor | None] = [self._checked(obs[name]) for name in self._policy_groups]
        count = obs[self._policy_groups[0]].shape[0]
        if self._params.shape[0] != count:
            self._prepare(count)
        arrays += [self._checked(obs[ACTION_MASK], torch.bool)] if self._masked else []
        if self._policy_state.tensors:
            after = next(self._states)
            arrays += [*self._read_state(state, reset), after]
            state = self._policy_state.split(after)
        if self._is_beta:
            compiled().act(self._model(), count, (*arrays, *self._fixed))
            action = self.distribution.sample(self._params, rng)
            return self.distribution.to_env(action), action, self._params, state
        self._draw(generator=rng)
        for_env = next(self._for_env)
        compiled().act(self._model(), count, (*arrays, *self._fixed, for_env))
        return for_env, self._action if self._bounded else for_env, self._params, state

    def _prepare(self, count: int) -> None:
        """Allocate the noise of all ranks, of which this one uses its part, and the results."""
        width = self.distribution.param_dim // (2 if self._gaussian else 1)
        shape: tuple[int, ...] = (count, width) if self._gaussian else (count,)
        if isinstance(self.distribution, MultiCategorical):
            shape = (count, len(self.distribution.nvec))
        noise = torch.empty((count * distributed.world_size(), width), dtype=self.dtype)
        self._draw = noise.normal_ if self._gaussian else noise.uniform_
        self._params = torch.empty((count, self.distribution.param_dim), dtype=self.dtype)
        self._action = torch.empty(shape, dtype=self._action_dtype)
        self._for_env = _fresh(shape, self._action_dtype)
        self._states = _fresh(self._policy_state.shape(count), self.dtype)
        fixed = [noise[distributed.rank_slice(count)], self._params, *[self._action] * self._bounded]
        if self._is_beta:  # sampled by torch, whose gamma variates C does not have
            fixed = [self._params]
        self._fixed = [tensor.numpy() for tensor in fixed]  # C finds the address of an array faster than of a tensor

    def values(self, obs: Obs, state: State, reset: Tensor | None, needed: Tensor | None = None) -> Valued:
        """Return values `[L, B]`, 0 where `needed` `[L, B]` is False, and the states after each sample.

        A feed-forward critic returns the unchanged state.
        """
        critic = self.model.critic
        shape = obs[critic.network.groups[0]].shape[:2]
        arrays: list[Tensor | None] = [self._checked(obs[name]) for name in critic.network.groups]
        count = shape.numel()
        index = None if needed is None else np.flatnonzero(needed.numpy())
        found = torch.empty(count if index is None else len(index), dtype=self.dtype)
        steps = 1
        if self._critic_state.tensors:
            steps = shape[0]
            after = torch.empty(self._critic_state.shape(*shape), dtype=self.dtype) if index is None else None
            arrays += [*self._read_state(state, reset), after]
            state = () if after is None else self._critic_state.split(after)
        if len(found):
            compiled().values(self._model(), count, steps, index, (*arrays, found))
        found = critic.head.normalizer.inverse(found)
        if index is None:
            return found.view(shape), state
        values = torch.zeros(count, dtype=self.dtype)
        values[torch.from_numpy(index)] = found
        return values.view(shape), state

    def log_prob(self, dist_params: Tensor, action: Tensor) -> Tensor:
        """Return log-probabilities `[...]` of actions, rounded as in `gradients`."""
        shape = dist_params.shape[:-1]
        result = torch.empty(shape, dtype=self.dtype)
        if shape.numel():
            arrays = (self._checked(dist_params), self._checked(action, self._action_dtype), result)
            compiled().log_prob(self._model(), shape.numel(), arrays)
        return result

    def begin(self, batch: PPOBatch) -> NativeSamples:
        """Take the samples of a batch of `[L, S, ...]`, which must not change while learning."""
        networks = [self.model.actor.network, *([] if self.model.shared_trunk else [self.model.critic.network])]
        arrays: list[Tensor | None] = [
            self._checked(batch.obs[name]) for network in networks for name in network.groups
        ]
        arrays += [self._checked(batch.obs[ACTION_MASK], torch.bool)] if self._masked else []
        if self._length:
            states = (batch.policy_state,) if self.model.shared_trunk else (batch.policy_state, batch.critic_state)
            arrays += self._read_state(states, batch.reset)
        arrays += [self._checked(batch.valid, torch.bool), self._checked(batch.action, self._action_dtype)]
        columns = (batch.dist_params, batch.log_prob, batch.advantage, batch.value, batch.return_)
        arrays += [self._checked(column) for column in columns]
        steps = len(batch.valid) if self._length else 1
        handle = compiled().samples(self._model(steps), batch.valid.numel(), steps, tuple(arrays))
        return NativeSamples(handle, batch.valid, batch.advantage)

    def gradients(self, samples: NativeSamples, index: Tensor, coefs: Coefs) -> UpdateResult:
        """Write all gradients of the loss of the sequences `index` int64 `[B]`.

        Return means over the valid ones.
        """
        adv_mean = 0.0
        adv_divisor = -1.0  # negative: C computes both
        if distributed.world_size() > 1 and self.loss.advantage != "given":
            unbiased = self.loss.advantage == "minibatch_sample"
            adv_mean, adv_divisor = _divisor(samples.advantage[:, index], samples.valid[:, index], unbiased)
        entropy = float(coefs.entropy.numpy())
        array, means = next(self._means)
        array[:] = compiled().gradients(samples.handle, index, entropy, adv_mean, adv_divisor)
        for view in self._unused:
            view.zero_()
        metrics = {name: mean for name, mean in zip(self._reported, means, strict=True) if name}
        return UpdateResult(metrics, means[KL] if self._trains_policy else None)

    def _model(self, length: int = 0) -> Any:
        """Return the model in C, with a workspace for each thread that torch may use.

        Those of recurrent networks hold the longest sequence to learn from so far.
        """
        threads = torch.get_num_threads()
        if self._handle is None or threads != self._handle_threads or (self._length and length > self._length):
            self._length = max(self._length, length) if self._length else 0
            self._handle = self._description.build(threads, length=self._length)
            self._handle_threads = threads
        return self._handle

    def _read_state(self, state: State, reset: Tensor | None) -> list[Tensor | None]:
        """Return the tensors of recurrent states, and which samples begin an episode."""
        tensors = [self._checked(tensor) for tensor in tree_leaves(state)]
        return [*tensors, None if reset is None else self._checked(reset, torch.bool)]

    def _checked(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor in C order.

        Raise TypeError for another dtype than the model's or the given one.
        """
        if tensor.dtype is not (dtype or self.dtype):
            raise TypeError(f"a tensor of {tensor.dtype} where the native engine needs {dtype or self.dtype}")
        return tensor.contiguous()


class StateLayout:
    """Recurrent states of a network as C writes them, in one tensor `[P, ..., H]`; P is 0 if feed-forward."""

    def __init__(self, state: State) -> None:
        self.tensors = len(tree_leaves(state))
        """P: the hidden state of each layer, and of an LSTM its cell state."""
        self.of_layer = len(state[0]) if self.tensors else 1
        self.hidden = state[0][0].shape[-1] if self.tensors else 0

    def shape(self, *leading: int) -> tuple[int, ...]:
        """Return the shape of that tensor for states `[*leading, H]`."""
        return (self.tensors, *leading, self.hidden)

    def split(self, states: Tensor) -> State:
        """Return views of the states: for each layer a tuple of `[..., H]` tensors."""
        return tuple(zip(*[iter(states.unbind())] * self.of_layer, strict=True))


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield new tensors `[N, ...]`, allocated many at a time.

    A single allocation takes half as long as acting.
    """
    while True:
        yield from torch.empty((max(1, 1024 // shape[0]), *shape), dtype=dtype).unbind()


def _fresh_numbers(count: int, dtype: torch.dtype) -> Iterator[tuple[np.ndarray, tuple[Tensor, ...]]]:
    """Yield new arrays `[count]`, each with its numbers as 0-d tensors, in large blocks."""
    while True:
        block = torch.empty((64, count), dtype=dtype)
        yield from zip(block.numpy(), zip(*[iter(block.view(-1).unbind())] * count, strict=True), strict=True)


def _divisor(advantage: Tensor, valid: Tensor, unbiased: bool) -> tuple[float, float]:
    """Return mean and divisor that standardise advantages `[B]` over all ranks.

    As in `statistics.normalize`.
    """
    count, mean, m2 = (float(part) for part in moments(advantage, valid))
    std = (m2 / max(count - unbiased, 1.0)) ** 0.5
    resolution = max(torch.finfo(advantage.dtype).eps, 64 * torch.finfo(torch.float64).eps)
    return mean, std + 1e-8 if std > resolution * abs(mean) else 0.0

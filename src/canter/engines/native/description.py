"""A model and its loss as the C code reads them: whole numbers, settings and arrays, in the order of `model.c`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from canter.core.specs import TensorSpec
from canter.engines.base import PPOLoss
from canter.engines.native.declines import ACTIVATION_NAMES, ADVANTAGES, BOUND_FORMS, SURROGATES, VALUE_LOSSES, compiled
from canter.nn.actor_critic import ActorCritic
from canter.nn.distributions import Categorical, DiagGaussian, MultiCategorical
from canter.nn.heads import GaussianHead
from canter.nn.network import Network
from canter.nn.normalizer import Normalizer

Gradients = Mapping[Tensor, Tensor]
"""Where the gradient of each parameter goes."""
OUTPUT_HEAD, STD_HEAD, VALUE_HEAD = 0, 1, 2
"""Roles of heads, by their numbers in C."""


class Lists:
    """Reads networks into three lists. Arrays are views of their tensors: every update in place is seen."""

    def __init__(self, obs: dict[str, TensorSpec], dtype: torch.dtype, gradients: Gradients) -> None:
        self.obs, self.dtype, self.gradients = obs, dtype, gradients
        self.numbers: list[int] = []
        self.settings: list[float] = []
        self.arrays: list[np.ndarray | None] = []
        self.written: set[Tensor] = set()
        """Parameters whose gradients C writes."""

    def build(self, threads: int, rows: int = 0) -> Any:
        """The model in C; for SAC with room for `rows`."""
        numbers, settings = np.array(self.numbers, np.int64), np.array(self.settings, np.float64)
        return compiled().model(self.dtype == torch.float64, threads, rows, numbers, settings, self.arrays)

    def tower(self, network: Any, heads: list[tuple[int, nn.Linear, bool]], learns: bool) -> None:
        """A network and the layers behind it: their roles, themselves, and whether each learns."""
        layers = _layers(network)
        self.numbers += [len(network.groups), len(layers), len(heads)]
        self.groups(network)
        for linear, norm, activation in layers:
            self._layer(linear, norm, activation, OUTPUT_HEAD, learns)
        for role, linear, learns_head in heads:
            self._layer(linear, None, "identity", role, learns_head)

    def groups(self, network: Any) -> None:
        """What a network reads."""
        for name, normalizer in zip(network.groups, network.normalizers, strict=True):
            self.numbers.append(math.prod(self.obs[name].shape))
            if isinstance(normalizer, Normalizer):
                self.settings.append(math.inf if normalizer.clip is None else normalizer.clip)
                self.arrays += [normalizer.shift.numpy(), normalizer.inverse_scale.numpy()]
            else:
                self.settings.append(math.inf)
                self.arrays += [None, None]

    def _layer(self, linear: nn.Linear, norm: nn.LayerNorm | None, activation: str, role: int, learns: bool) -> None:
        self.numbers += [linear.out_features, compiled().ACTIVATIONS.index(activation), role, 0]
        self.parameter(linear.weight, learns)
        self.parameter(linear.bias, learns)
        self.parameter(None if norm is None else norm.weight, learns)
        self.parameter(None if norm is None else norm.bias, learns)

    def parameter(self, parameter: Tensor | None, learns: bool) -> None:
        """A parameter and where its gradient goes, if anywhere."""
        gradient = None
        if parameter is not None and learns:
            gradient = self.gradients[parameter].numpy()
            self.written.add(parameter)
        self.arrays += [None if parameter is None else parameter.detach().numpy(), gradient]

    def std(self, head: GaussianHead, learns: bool) -> None:
        """How a Gaussian's std follows from what is learned."""
        self.numbers.append(compiled().STD_FORMS.index(head.log_std.form))
        self.settings += [head.log_std.mid, head.log_std.half_range]
        std = head.raw_std if isinstance(head.raw_std, Tensor) else None
        self.parameter(std, learns and isinstance(std, nn.Parameter))


class Description(Lists):
    """Reads a model and its loss."""

    def __init__(self, loss: PPOLoss, model: ActorCritic, gradients: Gradients) -> None:
        super().__init__(model.policy.spec.obs, next(model.parameters()).dtype, gradients)
        self.loss, self.model = loss, model
        learns_policy, learns_value = loss.surrogate is not None, loss.value_loss is not None
        policy, value = _policy_heads(model), [(VALUE_HEAD, model.critic.head.linear, learns_value)]
        heads = [(role, layer, learns_policy) for role, layer in policy]
        if model.shared_trunk:
            towers = [(model.actor.network, heads + value, learns_policy or learns_value)]
        else:
            towers = [(model.actor.network, heads, learns_policy), (model.critic.network, value, learns_value)]
        self.numbers.append(len(towers))
        for network, of_tower, learns in towers:
            self.tower(network, of_tower, learns)
        self._policy(learns_policy)
        self._loss()

    def _policy(self, learns: bool) -> None:
        distribution, dtype = self.model.policy.distribution, self.dtype
        match distribution:
            case DiagGaussian(dim):
                family, outputs, options = 0, dim, ()
            case Categorical(n):
                family, outputs, options = 1, n, (n,)
            case MultiCategorical(nvec):
                family, outputs, options = 1, sum(nvec), nvec
            case _:
                raise TypeError(f"{distribution} should have been declined")
        self.numbers += [family, outputs, int(self.model.actor.masked), len(options)]
        self.arrays.append(np.array(options, np.int64) if options else None)
        head = self.model.actor.head
        if not isinstance(distribution, DiagGaussian) or not isinstance(head, GaussianHead):
            return
        self.std(head, learns)
        self.numbers.append(int(distribution.bounds != "none"))
        columns = [torch.tensor(column, dtype=dtype) for column in distribution.interval()]
        bound = self.loss.bound
        units = (bound.centre, bound.half) if bound else (torch.zeros(outputs), torch.ones(outputs))
        columns += [unit.to(dtype).expand(outputs).contiguous() for unit in units]
        self.arrays += [column.numpy() for column in columns]

    def _loss(self) -> None:
        loss, bound = self.loss, self.loss.bound and self.loss.bound.config
        self.numbers += [SURROGATES.index(loss.surrogate), VALUE_LOSSES.index(loss.value_loss)]
        self.numbers += [BOUND_FORMS.index(bound.form) if bound else 0, ADVANTAGES.index(loss.advantage)]
        self.settings += [loss.clip_ratio, loss.value_clip, loss.value_coef]
        self.settings += [bound.coef, bound.limit] if bound else [0.0, 0.0]


def _policy_heads(model: ActorCritic) -> list[tuple[int, Any]]:
    head: Any = model.actor.head
    if not isinstance(head, GaussianHead):
        return [(OUTPUT_HEAD, head.linear)]
    std = [] if isinstance(head.raw_std, Tensor) else [(STD_HEAD, head.raw_std)]
    return [(OUTPUT_HEAD, head.mean), *std]


def _layers(network: Network) -> list[tuple[nn.Linear, nn.LayerNorm | None, str]]:
    """Each hidden layer with its layer norm, if it has one, and the name of its activation."""
    layers: list[tuple[nn.Linear, nn.LayerNorm | None, str]] = []
    linear, norm = None, None
    for module in network.hidden:
        if isinstance(module, nn.Linear):
            linear, norm = module, None
        elif isinstance(module, nn.LayerNorm):
            norm = module
        elif linear is not None:
            layers.append((linear, norm, ACTIVATION_NAMES[type(module)]))
    return layers

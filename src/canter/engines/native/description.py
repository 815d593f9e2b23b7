"""A model and its loss as nested dictionaries of named fields, which `model.c` reads by name.

Arrays are views of their tensors, so every later update in place is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from canter.core.specs import TensorSpec
from canter.engines.base import PPOLoss, SACLoss
from canter.engines.native import compiled
from canter.functional.densities import NORMAL_NODES, NORMAL_WEIGHTS, log_volume
from canter.nn.actor_critic import ActorCritic
from canter.nn.describe import CELLS, LayerSpec, SACModel, describe
from canter.nn.distributions import Beta, Categorical, DiagGaussian, MultiCategorical, TanhGaussian, interval
from canter.nn.normalizer import Normalizer

Gradients = Mapping[Tensor, Tensor]
"""Gradient of each parameter, a view that stays where it is."""
Fields = dict[str, Any]


class Description:
    """Fields of a model for C, and the parameters whose gradients C writes."""

    fields: Fields

    def __init__(self, obs: Mapping[str, TensorSpec], dtype: torch.dtype, gradients: Gradients) -> None:
        self.obs = obs
        self.dtype = dtype
        self.gradients = gradients
        self.written: set[Tensor] = set()
        """Parameters whose gradients C writes."""

    def build(self, threads: int, batch_size: int = 0, length: int = 0) -> Any:
        """Return the model in C, with workspaces for the threads.

        `batch_size` is for SAC; `length`, for recurrent networks, the steps of a sequence to learn
        from.
        """
        return compiled().model(self.dtype == torch.float64, threads, batch_size, length, self.fields)

    def tower(self, layers: Iterable[LayerSpec], trained: Mapping[str, bool]) -> Fields:
        """Return a network: its inputs, hidden layers and heads; `trained` by kind of layer."""
        layers = list(layers)
        heads = [layer for layer in layers if layer.kind in ("output", "std", "value") and layer.module is not None]
        return {
            "groups": [self.group(layer) for layer in layers if layer.kind == "input"],
            "hidden": [
                self.cell(layer, trained["hidden"])
                if layer.kind == "recurrent"
                else self.layer(layer, trained["hidden"])
                for layer in layers
                if layer.kind in ("recurrent", "hidden")
            ],
            "heads": [self.layer(layer, trained[layer.kind]) for layer in heads],
        }

    def group(self, layer: LayerSpec) -> Fields:
        """Return an observation group and its normalizer."""
        normalizer = layer.normalizer
        if not isinstance(normalizer, Normalizer):
            return unnormalized_group(math.prod(self.obs[layer.group].shape))
        return {
            "width": math.prod(self.obs[layer.group].shape),
            "clip": math.inf if normalizer.clip is None else normalizer.clip,
            "shift": normalizer.shift.numpy(),
            "inverse_scale": normalizer.inverse_scale.numpy(),
        }

    def layer(self, layer: LayerSpec, trained: bool) -> Fields:
        """Return a linear layer with its layer norm and activation."""
        linear: nn.Linear = layer.module
        norm = layer.norm
        return {
            "outputs": linear.out_features,
            "activation": layer.activation,
            "role": layer.kind,
            "transposed": False,
            "weight": self.parameter(linear.weight, trained),
            "bias": self.parameter(linear.bias, trained),
            "gamma": None if norm is None else self.parameter(norm.weight, trained),
            "beta": None if norm is None else self.parameter(norm.bias, trained),
        }

    def cell(self, layer: LayerSpec, trained: bool) -> Fields:
        """Return a recurrent layer with its layer norm."""
        cell: nn.RNNCellBase = layer.module
        norm = layer.norm
        return {
            "cell": CELLS[type(cell)],
            "keeps_state": not layer.reset_on_end,
            "outputs": cell.hidden_size,
            "weight": self.parameter(cell.weight_ih, trained),
            "bias": self.parameter(cell.bias_ih, trained),
            "state_weight": self.parameter(cell.weight_hh, trained),
            "state_bias": self.parameter(cell.bias_hh, trained),
            "gamma": None if norm is None else self.parameter(norm.weight, trained),
            "beta": None if norm is None else self.parameter(norm.bias, trained),
        }

    def parameter(self, parameter: Tensor, trained: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a parameter and its gradient, None where it is not trained."""
        if not trained:
            return parameter.detach().numpy(), None
        self.written.add(parameter)
        return parameter.detach().numpy(), self.gradients[parameter].numpy()

    def std(self, head: Any, trained: bool) -> Fields:
        """Return the parameterisation of a Gaussian's standard deviation."""
        raw = head.raw_std
        is_parameter = isinstance(raw, nn.Parameter)
        return {
            "std_form": head.log_std.form,
            "std_mid": head.log_std.mid,
            "std_half_range": head.log_std.half_range,
            "raw_std": self.parameter(raw, trained and is_parameter) if isinstance(raw, Tensor) else None,
        }


def unnormalized_group(width: int) -> Fields:
    """Return an observation group that is read as it is."""
    return {"width": width, "clip": math.inf, "shift": None, "inverse_scale": None}


class PPODescription(Description):
    """Description of an actor, a critic and PPO's loss."""

    def __init__(self, loss: PPOLoss, model: ActorCritic, gradients: Gradients) -> None:
        super().__init__(model.policy.spec.obs, next(model.parameters()).dtype, gradients)
        self.loss = loss
        self.model = model
        trains_policy = loss.surrogate is not None
        trains_value = loss.value_loss is not None
        trained = {"output": trains_policy, "std": trains_policy, "value": trains_value}
        hidden = {"policy": trains_policy, "critic": trains_value}
        if model.shared_trunk:
            hidden = {"policy": trains_policy or trains_value}
        layers = describe(model)
        self.fields = {
            "towers": [
                self.tower((layer for layer in layers if layer.network == name), trained | {"hidden": trunk})
                for name, trunk in hidden.items()
            ],
            "policy": self._policy(trains_policy),
            "loss": self._loss(),
        }

    def _policy(self, trained: bool) -> Fields:
        match self.model.policy.distribution:
            case DiagGaussian() | TanhGaussian() as distribution:
                return self._gaussian(distribution, trained)
            case Beta(low, high) as distribution:
                beta = {"family": "beta", "outputs": distribution.param_dim, "masked": False}
                return beta | {"log_volume": log_volume(low, high)}
            case Categorical(n):
                options = (n,)
            case MultiCategorical(nvec):
                options = nvec
            case other:
                raise TypeError(f"the native engine does not support {other}")
        return {
            "family": "categorical",
            "outputs": sum(options),
            "masked": self.model.actor.masked,
            "options": np.array(options, np.int64),
        }

    def _gaussian(self, distribution: DiagGaussian | TanhGaussian, trained: bool) -> Fields:
        dim = distribution.param_dim // 2
        squashed = isinstance(distribution, TanhGaussian)
        to_env = interval(distribution.low, distribution.high) if squashed else distribution.interval()
        bound = self.loss.bound
        columns = {
            name: torch.tensor(column, dtype=self.dtype).numpy()
            for name, column in zip(("scale", "centre", "low", "high"), to_env, strict=True)
        }
        centre, half = (bound.centre, bound.half) if bound else (torch.zeros(dim), torch.ones(dim))
        columns["bound_centre"] = centre.to(self.dtype).expand(dim).contiguous().numpy()
        columns["bound_half"] = half.to(self.dtype).expand(dim).contiguous().numpy()
        columns["nodes"] = torch.tensor(NORMAL_NODES, dtype=self.dtype).numpy()
        columns["node_weights"] = torch.tensor(NORMAL_WEIGHTS, dtype=self.dtype).numpy()
        gaussian = {
            "family": "gaussian",
            "outputs": dim,
            "masked": False,
            "to_env": squashed or distribution.bounds != "none",
            "squashed": squashed,
            "log_volume": log_volume(distribution.low, distribution.high) if squashed else 0.0,
        }
        return gaussian | self.std(self.model.actor.head, trained) | columns

    def _loss(self) -> Fields:
        loss = self.loss
        bound = loss.bound.config if loss.bound else None
        return {
            "surrogate": loss.surrogate or "none",
            "value_loss": loss.value_loss or "none",
            "advantage": loss.advantage,
            "bound": bound.form if bound else "none",
            "clip_ratio": loss.clip_ratio,
            "value_clip": loss.value_clip,
            "value_coef": loss.value_coef,
            "bound_coef": bound.coef if bound else 0.0,
            "bound_limit": bound.limit if bound else 0.0,
        }


class SACDescription(Description):
    """Description of an actor, critics and target critics; each critic is a tower."""

    def __init__(self, loss: SACLoss, model: SACModel, gradients: Gradients) -> None:
        head: Any = model.actor.head
        super().__init__(model.spec.obs, head.mean.weight.dtype, gradients)
        self.action_dim: int = head.mean.out_features
        members = model.critics.members
        trained = {"hidden": True, "output": True, "std": True}
        towers = [self.tower((layer for layer in describe(model) if layer.network == "policy"), trained)]
        for critics, is_trained in ((model, True), (replace(model, critics=model.target_critics), False)):
            layers = [layer for layer in describe(critics) if layer.network == "critic"]
            towers += [self._critic(layers, member, is_trained) for member in range(members)]
        self.fields = {
            "towers": towers,
            "policy": {"family": "gaussian", "outputs": self.action_dim, "masked": False} | self.std(head, True),
            "critics": {"members": members, "lowest": loss.pessimism == "min"},
        }

    def _critic(self, layers: list[LayerSpec], member: int, trained: bool) -> Fields:
        """Return one of the critics, whose weights are stacked; the action is its last group."""
        groups = [self.group(layer) for layer in layers if layer.kind == "input"]
        return {
            "groups": [*groups, unnormalized_group(self.action_dim)],
            "hidden": [self._member(layer, member, trained) for layer in layers if layer.kind == "hidden"],
            "heads": [self._member(layer, member, trained) for layer in layers if layer.kind == "value"],
        }

    def _member(self, layer: LayerSpec, member: int, trained: bool) -> Fields:
        """Return one critic's part of stacked linear layers."""
        weight, bias = (
            (part.detach()[member].numpy(), self.gradients[part][member].numpy() if trained else None)
            for part in (layer.module.weight, layer.module.bias)
        )
        return {
            "outputs": layer.module.weight.shape[-1],
            "activation": layer.activation,
            "role": layer.kind,
            "transposed": True,
            "weight": weight,
            "bias": bias,
            "gamma": None,
            "beta": None,
        }

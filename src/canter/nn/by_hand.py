"""The most frequent model, two networks of linear layers, evaluated and differentiated by hand on a CPU.

M rows, P distribution parameters. Around small networks autograd and modules cost several times what the arithmetic
does. This is the same function as `ActorCritic.forward`, which stays the definition: tests hold it against that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from canter.kernels.host_layers import layer_gradients, linear, run_layers
from canter.nn.actor_critic import ActorCritic
from canter.nn.heads import BoundedLogStd, GaussianHead, LinearHead
from canter.nn.mlp import MLP
from canter.nn.network import AnyNetwork, Network
from canter.nn.normalizer import Normalizer
from canter.nn.rnn import NoMemory
from canter.struct import Obs

Gradients = dict[Tensor, Tensor]
"""Gradients by the parameter that they are of."""


class Stack:
    """A network without memory, and the linear layer behind it."""

    def __init__(self, network: Network, last: nn.Linear) -> None:
        self.inputs = dict(zip(network.groups, map(_standardize, network.normalizers), strict=True))
        self.activation, self.weights, self.last = network.hidden.activation or "", network.hidden.weights, last

    def run(self, obs: Obs) -> list[Tensor]:
        """What goes in, what each layer makes of it, and what comes out: `[M, ...]` each."""
        parts = [standardize(obs[name]) for name, standardize in self.inputs.items()]
        outputs = run_layers(parts[0] if len(parts) == 1 else torch.cat(parts, -1), self.activation, self.weights)
        return [*outputs, linear(outputs[-1], self.last.weight, self.last.bias)]

    def gradients(self, outputs: list[Tensor], gradient: Tensor) -> Gradients:
        """Of all parameters, from that of what comes out `[M, N]`; `outputs` are from `run`."""
        own = {self.last.weight: torch.mm(gradient.t(), outputs[-2]), self.last.bias: gradient.sum(0)}
        inner = torch.mm(gradient, self.last.weight)
        before = layer_gradients(outputs[:-1], self.activation, self.weights, inner)
        return own | dict(zip(self.weights, before, strict=True))


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of rows of observations, and what its gradients need of the way there."""

    params: Tensor
    """`[M, P]`."""
    value: Tensor
    """`[M]`, in normalised units."""
    actor: list[Tensor]
    critic: list[Tensor]


class HandModel:
    """An actor and a critic without memory, each with a network of its own."""

    def __init__(self, actor: Stack, critic: Stack, std: BoundedParameter | None) -> None:
        self.actor, self.critic, self.std = actor, critic, std

    def params(self, obs: Obs) -> Tensor:
        """Distribution parameters `[M, P]`."""
        return self._with_std(self.actor.run(obs)[-1])

    def __call__(self, obs: Obs) -> Evaluation:
        """Parameters and values."""
        actor, critic = self.actor.run(obs), self.critic.run(obs)
        return Evaluation(self._with_std(actor[-1]), critic[-1].squeeze(-1), actor, critic)

    def gradients(self, made: Evaluation, d_params: Tensor, d_value: Tensor) -> Gradients:
        """Of all parameters of the model, from those of its parameters `[M, P]` and values `[M]`."""
        gradients = self.critic.gradients(made.critic, d_value.unsqueeze(-1))
        if self.std is not None:
            d_params, d_log_std = d_params.chunk(2, -1)
            gradients[self.std.raw] = self.std.gradient(d_log_std.sum(0))
        return gradients | self.actor.gradients(made.actor, d_params)

    def _with_std(self, output: Tensor) -> Tensor:
        return output if self.std is None else torch.cat([output, self.std().expand_as(output)], -1)


class BoundedParameter:
    """A log-std that is the same in every row, by the formula of `BoundedLogStd`, rounding included."""

    def __init__(self, raw: nn.Parameter, bound: BoundedLogStd) -> None:
        # Tensors, for a number has to be made one in every operation.
        self.raw, like = raw, raw.data
        self.mid, self.half = torch.full_like(like, bound.mid), torch.full_like(like, bound.half_range)
        self.one = torch.ones_like(like)

    def __call__(self) -> Tensor:
        """The log-std `[A]`."""
        x = self.raw / self.half
        return self._root(x).mul_(self.half * x).add_(self.mid)

    def gradient(self, gradient: Tensor) -> Tensor:
        """Of the raw numbers, from that of the log-std `[A]`."""
        return self._root(self.raw / self.half).pow_(3).mul_(gradient)

    def _root(self, x: Tensor) -> Tensor:
        return (x * x).add_(self.one).rsqrt_()


def by_hand(model: ActorCritic) -> HandModel | None:
    """The model differentiated by hand, or None where it has parts that this is not done for."""
    if model.shared_trunk or model.actor.masked:
        return None
    std = None
    match model.actor.head:
        case GaussianHead(raw_std=nn.Parameter() as raw) as head:
            last, std = head.mean, BoundedParameter(raw, head.bound)
        case LinearHead() as head:
            last = head.linear
        case _:
            return None
    actor, critic = _stack(model.actor.network, last), _stack(model.critic.network, model.critic.head.linear)
    return None if actor is None or critic is None else HandModel(actor, critic, std)


def _standardize(normalizer: nn.Module) -> Callable[[Tensor], Tensor]:
    """From an observation group `[..., *shape]` to rows `[M, width]`."""
    if not isinstance(normalizer, Normalizer):
        return lambda x: x.flatten(0, -2)
    shift, inverse_scale, clip = normalizer.shift, normalizer.inverse_scale, normalizer.clip
    assert clip is not None
    return lambda x: (x - shift).mul_(inverse_scale).clamp_(-clip, clip).flatten(0, -2)


def _stack(network: AnyNetwork, last: nn.Module) -> Stack | None:
    if type(network) is not Network or not isinstance(last, nn.Linear):
        return None
    plain = (
        isinstance(network.memory, NoMemory)
        and isinstance(network.hidden, MLP)  # a user's network may have put another module there
        and network.hidden.activation is not None
        and not network.in_bfloat16
        and all(isinstance(encoder, nn.Identity) for encoder in network.encoders)
    )
    return Stack(network, last) if plain else None

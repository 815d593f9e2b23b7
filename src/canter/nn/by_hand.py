"""The most frequent model, two networks of linear layers, evaluated and differentiated by hand on a CPU.

M rows, A action components, N numbers that an actor puts out, P distribution parameters. Around small networks
autograd, modules and even torch's operations cost several times what the arithmetic does. This is the same function as
`ActorCritic.forward`, which stays the definition: tests hold it against that. Arrays are views of the tensors, so that
every update in place is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Generator, Tensor, nn

from canter.kernels.host_layers import Array, last_output, layer_gradients, run_layers
from canter.kernels.host_threads import parts, share
from canter.nn.actor_critic import ActorCritic
from canter.nn.choice import Choose, choice
from canter.nn.heads import BoundedLogStd, GaussianHead, LinearHead
from canter.nn.network import AnyNetwork, Network, plain_network
from canter.nn.normalizer import Normalizer
from canter.struct import Obs

ACTOR_INPUT, CRITIC_INPUT = "actor", "critic"
"""Names of what `HandModel.read_rows` gives."""
Arrays = dict[str, Array]
"""Observation groups `[M, width]` by name."""
Gradients = Mapping[Tensor, Tensor]
"""Where the gradient of each parameter goes."""


class Stack:
    """A network without memory, and the linear layer behind it."""

    def __init__(self, network: Network, last: nn.Linear, gradients: Gradients) -> None:
        self.inputs = dict(zip(network.groups, map(_standardize, network.normalizers), strict=True))
        parameters = [*network.hidden.weights, last.weight, last.bias]
        self.weights = [parameter.detach().numpy() for parameter in parameters]
        self.activations = [network.hidden.activation or ""] * (len(parameters) // 2 - 1) + ["identity"]
        self.into = [gradients[parameter].numpy() for parameter in parameters]

    def read(self, obs: Arrays) -> Array:
        """What goes into the first layer `[M, width]`."""
        parts = [standardize(obs[name]) for name, standardize in self.inputs.items()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    def read_rows(self, obs: Obs) -> Tensor:
        """The same of tensors `[L, S, ...]`, as `[L, S, width]`."""
        arrays = {name: obs[name].flatten(0, 1).numpy() for name in self.inputs}
        return torch.from_numpy(self.read(arrays)).unflatten(0, obs[next(iter(self.inputs))].shape[:2])

    def run(self, x: Array) -> list[Array]:
        """What goes in `[M, width]`, what each layer makes of it, and what comes out: `[M, ...]` each."""
        return run_layers(x, self.activations, self.weights)

    def descend(self, outputs: list[Array], gradient: Array, into: list[Array]) -> None:
        """Write the gradients of all parameters, from that of what comes out `[M, N]`; spoils it and `outputs`."""
        layer_gradients(outputs, self.activations, self.weights, gradient, into)


@dataclass
class Into:
    """Where the gradients of a model's parameters go."""

    actor: list[Array]
    critic: list[Array]
    std: list[Array]

    def __iter__(self) -> Iterator[Array]:
        return chain(self.actor, self.critic, self.std)

    def empty_like(self) -> Into:
        """As much room elsewhere."""
        return Into(*([np.empty_like(place) for place in part] for part in (self.actor, self.critic, self.std)))


class HandModel:
    """An actor and a critic without memory, each with a network of its own."""

    def __init__(self, actor: Stack, critic: Stack, std: BoundedParameter | None, choose: Choose) -> None:
        self.actor, self.critic, self.choose = actor, critic, choose
        self.std = std
        """None where a distribution has no log-std."""
        self.into = [Into(actor.into, critic.into, [std.into] if std else [])]
        """Of each thread; the first has the gradients where the optimiser looks for them."""

    def act(self, obs: Obs, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """What the environment receives, the action as drawn, and the distribution parameters `[M, P]`."""
        with np.errstate(all="ignore"):  # what is not finite stops the run later, with its name
            params = self._params({name: group.numpy() for name, group in obs.items()})
            for_env, action = self.choose(params, generator)
        return torch.from_numpy(for_env), torch.from_numpy(action), torch.from_numpy(params)

    def read_rows(self, obs: Obs) -> Obs:
        """What goes into actor and critic, of observations `[L, S, ...]`; the same throughout an update."""
        return {ACTOR_INPUT: self.actor.read_rows(obs), CRITIC_INPUT: self.critic.read_rows(obs)}

    def share(self, rows: int, learn: Callable[[slice, Into], Array]) -> Array:
        """Let threads share the rows of a minibatch; adds up the gradients that they write and what they return."""
        among = parts(rows, max(place.size for place in self.into[0]))
        self.into += [self.into[0].empty_like() for _ in among[len(self.into) :]]
        found = share(lambda thread, some: learn(some, self.into[thread]), among)
        for others in self.into[1 : len(among)]:
            for place, other in zip(self.into[0], others, strict=True):
                place += other
        return sum(found[1:], start=found[0])

    def _params(self, obs: Arrays) -> Array:
        output = last_output(self.actor.read(obs), self.actor.activations, self.actor.weights)
        if self.std is None:
            return output
        dim = output.shape[1]
        params = np.empty((len(output), 2 * dim), output.dtype)
        params[:, :dim], params[:, dim:] = output, self.std()
        return params


class BoundedParameter:
    """A log-std that is the same in every row, by the formula of `BoundedLogStd`."""

    def __init__(self, raw: nn.Parameter, bound: BoundedLogStd, gradients: Gradients) -> None:
        self.raw, self.into = raw.detach().numpy(), gradients[raw].numpy()
        self.mid, self.half = bound.mid, bound.half_range

    def __call__(self) -> Array:
        """The log-std `[A]`."""
        x = self.raw / self.half
        return self.mid + self.half * x / np.sqrt(1.0 + x * x)

    def descend(self, gradient: Array, into: Array) -> None:
        """Write the gradient of the raw numbers, from that of the log-std `[A]`."""
        x = self.raw / self.half
        np.multiply((1.0 + x * x) ** -1.5, gradient, out=into)


def by_hand(model: ActorCritic, gradients: Gradients) -> HandModel | None:
    """The model differentiated by hand, or None where it has parts that this is not done for."""
    choose = choice(model.policy.distribution)
    if model.shared_trunk or model.actor.masked or choose is None:
        return None
    std = None
    match model.actor.head:
        case GaussianHead(raw_std=nn.Parameter() as raw) as head:
            last, std = head.mean, BoundedParameter(raw, head.bound, gradients)
        case LinearHead() as head:
            last = head.linear
        case _:
            return None
    actor = _stack(model.actor.network, last, gradients)
    critic = _stack(model.critic.network, model.critic.head.linear, gradients)
    return None if actor is None or critic is None else HandModel(actor, critic, std, choose)


def _standardize(normalizer: nn.Module) -> Callable[[Array], Array]:
    """What a normaliser does to an observation group `[M, width]`."""
    if not isinstance(normalizer, Normalizer):
        return lambda x: x
    shift, inverse_scale, clip = normalizer.shift.numpy(), normalizer.inverse_scale.numpy(), normalizer.clip
    assert clip is not None

    def standardize(x: Array) -> Array:
        y = x - shift
        y *= inverse_scale
        np.maximum(y, -clip, out=y)
        return np.minimum(y, clip, out=y)

    return standardize


def _stack(network: AnyNetwork, last: nn.Module, gradients: Gradients) -> Stack | None:
    plain = plain_network(network)
    return Stack(plain, last, gradients) if plain is not None and isinstance(last, nn.Linear) else None

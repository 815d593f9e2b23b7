"""SAC in C, on a CPU: what the policy does, the gradients of the critics in one call, those of the policy in another.

B rows, A action components, E critics. `canter.algorithms.sac.learner` stays the definition: tests hold every
configuration that this accepts against it. The optimisers' steps are those of any other engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from canter.core.data.replay import Transitions
from canter.core.specs import EnvSpec
from canter.core.struct import Obs
from canter.engines.native.declines import (
    ACTIVATION_NAMES,
    AVAILABLE,
    LAYERS,
    compiled,
    declines_last,
    declines_network,
    declines_tensors,
    knows_std,
)
from canter.engines.native.description import OUTPUT_HEAD, STD_HEAD, VALUE_HEAD, Gradients, Lists
from canter.nn.actor_critic import Actor
from canter.nn.heads import GaussianHead
from canter.nn.stack import Critics, Stack, StackedLinear

MOST_CRITICS = 8
ONE_THREAD = 2**15 - 1
"""Numbers up to which torch does not wake its threads: these go on looking for work for longer than all of this takes,
and meanwhile those in C wait for a core."""


@dataclass(frozen=True)
class SoftModel:
    """Everything that SAC's gradients depend on besides a batch and the temperature."""

    spec: EnvSpec
    actor: Actor
    critics: Critics
    slow: Critics
    """Of the critics, without gradients."""
    pessimism: str
    """Whether the lowest critic counts ("min") or the mean of all."""
    gradients: Gradients
    """Of the actor's and of the critics' parameters."""
    changed: bool = False
    """Whether a subclass of the learner may have changed the definition."""


def declines_soft(model: SoftModel) -> str | None:
    """Why the engine cannot compute SAC's gradients of these networks; None where it can."""
    actor, critics = model.actor, model.critics
    if not AVAILABLE:
        return "it was not built: there was no C compiler when Canter was installed"
    if model.changed:
        return "it would not call what a subclass of the learner changed"
    if model.pessimism not in ("min", "mean"):
        return f"it does not know pessimism={model.pessimism}"
    for part, kind in ((actor, Actor), (actor.head, GaussianHead), (critics, Critics), (critics.stack, Stack)):
        if type(part) is not kind:
            return f"it does not know {type(part).__name__}"
    reason = declines_network("policy", actor.network, model.spec) or _declines_std(actor.head)
    if not reason and any(isinstance(layer, nn.LayerNorm) for layer in actor.modules()):
        reason = "it does not know layer norms in a network of sac"
    reason = reason or declines_network("critic", critics.encoder, model.spec) or _declines_critics(critics)
    return reason or declines_tensors(nn.ModuleList([actor, critics]))


def _declines_std(head: Any) -> str | None:
    if isinstance(head.raw_std, Tensor):
        return "it knows a std that the network gives, not one that is a parameter"
    return declines_last([head.mean, head.raw_std]) if knows_std(head.log_std) else "it does not know the std's form"


def _declines_critics(critics: Critics) -> str | None:
    if critics.atoms > 1:
        return f"it does not know critics of several atoms, and these have {critics.atoms}"
    if critics.members > MOST_CRITICS:
        return f"it knows up to {MOST_CRITICS} critics, not {critics.members}"
    if critics.stack.in_bfloat16:
        return "it does not multiply in bfloat16, as the critics do"
    layers = [layer for layer in critics.stack.layers if type(layer) is not nn.Identity]
    for place, layer in enumerate([*layers, critics.head]):
        known = type(layer) is StackedLinear and layer.bias is not None
        if place % 2:
            known = type(layer) in ACTIVATION_NAMES and LAYERS[type(layer)](layer)
        if not known:
            return f"it does not know {layer}, which the critics have"
    return None


class SoftDescription(Lists):
    """The towers as C reads them: the actor, the critics, their slow copies."""

    def __init__(self, model: SoftModel) -> None:
        head: Any = model.actor.head
        super().__init__(model.spec.obs, head.mean.weight.dtype, model.gradients)
        self.action_dim, members = head.mean.out_features, model.critics.members
        self.numbers.append(1 + 2 * members)
        self.tower(model.actor.network, [(OUTPUT_HEAD, head.mean, True), (STD_HEAD, head.raw_std, True)], True)
        for critics, learns in ((model.critics, True), (model.slow, False)):
            for member in range(members):
                self._critic(critics, member, learns)
        gaussian, unmasked, choices = 0, 0, 0
        self.numbers += [gaussian, self.action_dim, unmasked, choices]
        self.arrays.append(None)
        self.std(head, True)
        self.numbers += [members, int(model.pessimism == "min")]

    def _critic(self, critics: Critics, member: int, learns: bool) -> None:
        """One of several that lie side by side; the action is its last group."""
        layers: list[Any] = [layer for layer in critics.stack.layers if type(layer) is not nn.Identity]
        activations = [ACTIVATION_NAMES[type(layer)] for layer in layers[1::2]] + ["identity"]
        linears = [*layers[::2], critics.head]
        self.numbers += [len(critics.encoder.groups) + 1, len(linears) - 1, 1]
        self.groups(critics.encoder)
        self.numbers.append(self.action_dim)
        self.settings.append(math.inf)
        self.arrays += [None, None]
        for linear, activation in zip(linears, activations, strict=True):
            role, turned = VALUE_HEAD if linear is critics.head else OUTPUT_HEAD, 1
            self.numbers += [linear.weight.shape[-1], compiled().ACTIVATIONS.index(activation), role, turned]
            for parameter in (linear.weight, linear.bias):
                gradient = self.gradients[parameter][member].numpy() if learns else None
                self.arrays += [parameter.detach()[member].numpy(), gradient]
            self.arrays += [None] * 4  # of a norm


class SoftEngine:
    """Writes the gradients of a `SoftModel`, whose parameters and gradients must stay where they are.

    As many threads may share a call as torch has; results do not depend on how many there are. Raises ValueError with
    the sentence of `declines_soft` where it does not know the model.
    """

    name = "native"

    def __init__(self, model: SoftModel) -> None:
        reason = declines_soft(model)
        if reason is not None:
            raise ValueError(reason)
        self._description = SoftDescription(model)
        self._reads = model.actor.network.groups
        self._groups = (*self._reads, *model.critics.encoder.groups)
        self._models: dict[tuple[int, int], Any] = {}

    def act(self, obs: Obs, noise: Tensor) -> Tensor:
        """The policy's actions before they are squashed `[N, A]`, of observations `[N, ...]` and noise `[N, A]`."""
        params, raw = noise.new_empty(len(noise), 2 * self._description.action_dim), torch.empty_like(noise)
        arrays = [self._checked(array) for array in (*[obs[name] for name in self._reads], noise)]
        compiled().act(self._model(len(noise)), len(noise), (*arrays, params, raw))
        return raw

    def learn_critics(self, batch: Transitions, noise: Tensor, temperature: Tensor) -> dict[str, float]:
        """From rows `[B, ...]`, noise `[B, A]` of the successors' actions and the temperature `[1]`."""
        arrays = [*self._read(batch.obs), batch.action, *self._read(batch.next_obs), batch.action]
        valid = self._checked(batch.valid, torch.bool)
        arrays = [self._checked(array) for array in (*arrays, batch.reward, batch.discount)]
        means = self._call(False, temperature, (*arrays, valid, self._checked(noise)))
        return {"loss/critic": means[0], "value/target_std": means[1]}

    def learn_policy(self, batch: Transitions, noise: Tensor, temperature: Tensor) -> dict[str, float]:
        """The same of the policy, with noise of its own actions."""
        arrays = [self._checked(array) for array in (*self._read(batch.obs), batch.action, noise)]
        loss, log_prob, std, value = self._call(True, temperature, tuple(arrays))
        return {"loss/policy": loss, "policy/entropy": -log_prob, "policy/std": std, "value/mean": value}

    def _read(self, obs: Obs) -> list[Tensor]:
        return [obs[name] for name in self._groups]

    def _call(self, policy: bool, temperature: Tensor, arrays: tuple[Tensor, ...]) -> tuple[float, float, float, float]:
        return compiled().soft(self._model(len(arrays[-1])), policy, temperature.tolist()[0], arrays)

    def _model(self, rows: int) -> Any:
        """The model in C with room for so many rows, and for as many threads as there may be."""
        made_for = torch.get_num_threads(), rows
        if made_for not in self._models:
            self._models[made_for] = self._description.build(*made_for)
        return self._models[made_for]

    def _checked(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if tensor.dtype is not (dtype or self._description.dtype):
            raise TypeError(f"a tensor of {tensor.dtype} where the native engine needs {self._description.dtype}")
        return tensor.contiguous()

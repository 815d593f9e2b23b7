"""What may be added to an algorithm without changing its file: four hooks, and no more.

T steps, N environments, L sequence length, B sequences in a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from canter.algorithms.phase import Phase
from canter.data.rollout import Rollout
from canter.engines.base import Augment, Term
from canter.engines.batch import ModelOutput, PPOBatch
from canter.nn.actor_critic import ActorCritic
from canter.plain import check_settings
from canter.registry import Registry
from canter.specs import EnvSpec
from canter.struct import Metrics

T = TypeVar("T")


class Extension(nn.Module):
    """Does nothing; override what you need.

    Whatever must survive a stop is a parameter or a buffer. Hooks must not read tensors on the host, and tensors that
    persist keep their addresses: then an extension runs under CUDA graphs as well.
    """

    def reward(self, rollout: Rollout[Any]) -> Tensor:
        """The reward `[T, N]` to learn from, once for every rollout; `rollout.reward` is what it would be without."""
        return rollout.reward

    def augment(self, batch: PPOBatch) -> PPOBatch:
        """A minibatch `[L, B, ...]`, changed or with further sequences, on its way to the loss."""
        return batch

    def loss(self, batch: PPOBatch, output: ModelOutput) -> Metrics:
        """Further terms of the policy's loss, `[L, B]` each and with their weights, by the name they are logged as."""
        return {}

    def phases(self) -> dict[str, Phase[PPOBatch]]:
        """Further phases of an update, which run after the algorithm's own."""
        return {}


class ExtensionConfig(Protocol):
    """Frozen settings that build an extension."""

    def build(self, spec: EnvSpec, model: ActorCritic, generator: torch.Generator) -> Extension:
        """The extension of an algorithm that trains `model`; phases shuffle by `generator`, its random stream."""
        ...


extensions: Registry[type[ExtensionConfig]] = Registry("extension", check_settings)
"""Settings of extensions by the name that `kind` has in settings files."""

AnyExtensionConfig = Annotated[ExtensionConfig, extensions]


class Extensions(nn.Module):
    """All extensions of an algorithm, one after another; there may be none."""

    def __init__(self, extensions: Iterable[Extension]) -> None:
        super().__init__()
        self.each = nn.ModuleList(extensions)

    def __iter__(self) -> Iterator[Extension]:
        return (cast(Extension, extension) for extension in self.each)

    def reward(self, rollout: Rollout[Any]) -> Rollout[Any]:
        """The rollout with the rewards to learn from."""
        for extension in self:
            rollout = replace(rollout, reward=extension.reward(rollout))
        return rollout

    def augments(self) -> tuple[Augment, ...]:
        """The hooks of those that change minibatches."""
        return tuple(extension.augment for extension in self if type(extension).augment is not Extension.augment)

    def terms(self) -> tuple[Term, ...]:
        """The hooks of those that add to the loss."""
        return tuple(extension.loss for extension in self if type(extension).loss is not Extension.loss)

    def add_phases(self, phases: dict[str, Phase[PPOBatch]]) -> dict[str, Phase[PPOBatch]]:
        """These phases and then the further ones."""
        for extension in self:
            phases = phases | _unless_taken("phases", extension.phases(), phases)
        return phases


def _unless_taken(what: str, named: dict[str, T], taken: Iterable[str]) -> dict[str, T]:
    twice = sorted(set(named) & set(taken))
    if twice:
        raise ValueError(f"extensions: {what} called {', '.join(map(repr, twice))} are there already")
    return named

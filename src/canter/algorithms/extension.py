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
from canter.core.data.rollout import Rollout
from canter.core.plain import check_settings
from canter.core.registry import Registry, UserError
from canter.core.specs import EnvSpec
from canter.core.struct import Metrics
from canter.engines.base import Augment, ExtensionLoss, ModelOutput, PPOBatch
from canter.nn.actor_critic import ActorCritic

T = TypeVar("T")


class Extension(nn.Module):
    """Does nothing; override what you need.

    Whatever must survive a stop is a parameter or a buffer. Hooks must not read tensors on the host, and tensors that
    persist keep their addresses: then an extension runs under CUDA graphs as well.
    """

    progress: Tensor
    """The share of the run that is done, 0-d, for schedules; the algorithm sets and moves it."""

    def reward(self, rollout: Rollout[Any]) -> Tensor | tuple[Tensor, Tensor]:
        """The reward `[T, N]` to learn from, once for every rollout; `rollout.reward` is what it would be without.

        Where the critic has a second head (`algorithm.bonus_value`), a pair is the reward and the bonus that this head
        judges; `rollout.bonus` is that of extensions before, None where they gave none.
        """
        return rollout.reward

    def carry(self, rollout: Rollout[Any]) -> dict[str, Any]:
        """What `augment` and `loss` read of each row besides what batches have; once, before learning from a rollout.

        Trees of `[T, N, ...]` by name, such as the next observations (`rollout.transitions().next_obs`), or of
        `[T / L, N, ...]`, one for each sequence. Minibatches have them as `batch.carried`.
        """
        return {}

    def augment(self, batch: PPOBatch) -> PPOBatch:
        """A minibatch `[L, B, ...]`, changed or with further sequences, on its way to the loss.

        `original` may say which rows count for KL, entropy and adaptive learning rates.
        """
        return batch

    def loss(self, batch: PPOBatch, output: ModelOutput) -> Metrics:
        """Further terms of the policy's loss, `[L, B]` each and with their weights, by the name they are logged as."""
        return {}

    def phases(self) -> dict[str, Phase[Any]]:
        """Further phases of an update, after the algorithm's own, on its rows or on batches that they draw."""
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

    def __init__(self, extensions: Iterable[Extension], progress: Tensor) -> None:
        super().__init__()
        self.each = nn.ModuleList(extensions)
        for extension in self:
            extension.progress = progress

    def __iter__(self) -> Iterator[Extension]:
        return (cast(Extension, extension) for extension in self.each)

    def reward(self, rollout: Rollout[Any]) -> Rollout[Any]:
        """The rollout with the rewards to learn from."""
        for extension in self:
            given = extension.reward(rollout)
            reward, bonus = given if isinstance(given, tuple) else (given, rollout.bonus)
            rollout = replace(rollout, reward=reward, bonus=bonus)
        return rollout

    def carry(self, rollout: Rollout[Any]) -> dict[str, Any]:
        """What their hooks on the way to the loss need beside the rows; nothing where there are no such hooks."""
        carried: dict[str, Any] = {}
        for extension in self:
            if offers(extension, "augment") or offers(extension, "loss"):
                carried |= _unless_taken("carried tensors", extension.carry(rollout), carried)
        return carried

    def augments(self) -> tuple[Augment, ...]:
        """The hooks of those that change minibatches."""
        return tuple(extension.augment for extension in self if offers(extension, "augment"))

    def terms(self) -> tuple[ExtensionLoss, ...]:
        """The hooks of those that add to the loss."""
        return tuple(extension.loss for extension in self if offers(extension, "loss"))

    def add_phases(self, phases: dict[str, Phase[Any]]) -> dict[str, Phase[Any]]:
        """These phases and then the further ones."""
        for extension in self:
            phases = phases | _unless_taken("phases", extension.phases(), phases)
        return phases


def offers(extension: Extension, hook: str) -> bool:
    """Whether an extension has a hook of its own."""
    return getattr(type(extension), hook) is not getattr(Extension, hook)


def _unless_taken(what: str, named: dict[str, T], taken: Iterable[str]) -> dict[str, T]:
    twice = sorted(set(named) & set(taken))
    if twice:
        raise UserError(f"extensions: {what} called {', '.join(map(repr, twice))} are there already")
    return named

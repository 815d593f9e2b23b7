"""The hooks by which extensions add to an algorithm without changing its file.

`reward`, `augment`, `loss` and `phases` add to an update; `carry` provides the data that `augment`
and `loss` need.

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
    """Base class of extensions; it does nothing. Override the hooks you need.

    State that must survive a restart is a parameter or a buffer. Hooks must not read tensors on the
    host, and persistent tensors keep their addresses: then an extension also runs under CUDA
    graphs.
    """

    progress: Tensor
    """Completed fraction of the run, 0-d, for schedules; the algorithm updates it."""

    def reward(self, rollout: Rollout[Any]) -> Tensor | tuple[Tensor, Tensor]:
        """Return the reward `[T, N]` to learn from; called once for every rollout.

        `rollout.reward` is the reward so far. If the critic has a second head
        (`algorithm.bonus_value`), return a pair of the reward and the bonus that this head
        evaluates; `rollout.bonus` is the bonus of earlier extensions, or None.
        """
        return rollout.reward

    def carry(self, rollout: Rollout[Any]) -> dict[str, Any]:
        """Return further data of each sample for `augment` and `loss`; called once a rollout.

        The data are trees of `[T, N, ...]` by name, such as the next observations
        (`rollout.transitions().next_obs`), or of `[T / L, N, ...]`, one for each sequence.
        Minibatches hold them in `batch.carried`.
        """
        return {}

    def augment(self, batch: PPOBatch) -> PPOBatch:
        """Return the minibatch `[L, B, ...]` for the loss, changed or with further sequences.

        Mark added samples by `original=False` to leave them out of KL, entropy and adaptive
        learning rates.
        """
        return batch

    def loss(self, batch: PPOBatch, output: ModelOutput) -> Metrics:
        """Return further terms of the policy's loss, weighted, `[L, B]` each, by logged name."""
        return {}

    def phases(self) -> dict[str, Phase[Any]]:
        """Return further phases by name; they run after the algorithm's own."""
        return {}


class ExtensionConfig(Protocol):
    """Frozen settings that build an extension."""

    def build(self, spec: EnvSpec, model: ActorCritic, generator: torch.Generator) -> Extension:
        """Return the extension of an algorithm that trains `model`.

        `generator` is the random stream by which its phases shuffle.
        """
        ...


extensions: Registry[type[ExtensionConfig]] = Registry("extension", check_settings)
"""Settings of extensions by their `kind` in settings files."""

AnyExtensionConfig = Annotated[ExtensionConfig, extensions]


class Extensions(nn.Module):
    """All extensions of an algorithm, in order; there may be none."""

    def __init__(self, extensions: Iterable[Extension], progress: Tensor) -> None:
        super().__init__()
        self.each = nn.ModuleList(extensions)
        for extension in self:
            extension.progress = progress

    def __iter__(self) -> Iterator[Extension]:
        return (cast(Extension, extension) for extension in self.each)

    def reward(self, rollout: Rollout[Any]) -> Rollout[Any]:
        """Return the rollout with the rewards to learn from."""
        for extension in self:
            reward = extension.reward(rollout)
            bonus = rollout.bonus
            if isinstance(reward, tuple):
                reward, bonus = reward
            rollout = replace(rollout, reward=reward, bonus=bonus)
        return rollout

    def carry(self, rollout: Rollout[Any]) -> dict[str, Any]:
        """Return the data for `augment` and `loss` hooks, of extensions that have such hooks."""
        carried: dict[str, Any] = {}
        for extension in self:
            if overrides(extension, "augment") or overrides(extension, "loss"):
                carried |= _without_duplicates("carried tensors", extension.carry(rollout), carried)
        return carried

    def augments(self) -> tuple[Augment, ...]:
        """Return the hooks that change minibatches."""
        return tuple(extension.augment for extension in self if overrides(extension, "augment"))

    def terms(self) -> tuple[ExtensionLoss, ...]:
        """Return the hooks that add to the loss."""
        return tuple(extension.loss for extension in self if overrides(extension, "loss"))

    def add_phases(self, phases: dict[str, Phase[Any]]) -> dict[str, Phase[Any]]:
        """Return `phases` followed by those of the extensions."""
        for extension in self:
            phases = phases | _without_duplicates("phases", extension.phases(), phases)
        return phases


def overrides(extension: Extension, hook: str) -> bool:
    """Return True if the class of an extension overrides a hook."""
    return getattr(type(extension), hook) is not getattr(Extension, hook)


def _without_duplicates(kind: str, named: dict[str, T], taken: Iterable[str]) -> dict[str, T]:
    """Return `named`; raise UserError if one of its names is taken."""
    duplicates = sorted(set(named) & set(taken))
    if duplicates:
        raise UserError(f"extensions: two {kind} are called {', '.join(map(repr, duplicates))}; rename one")
    return named

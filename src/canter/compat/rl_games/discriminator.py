"""The discriminator in files of IsaacGymEnvs' `amp_continuous`, as that of the extension `amp`.

The parent judges frames with the newest first, Canter with the earliest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from canter.algorithms.extensions.amp import AMP
from canter.algorithms.ppo import PPO
from canter.compat.weights import (
    Statistics,
    Weights,
    check_moments,
    check_same,
    check_statistics,
    moments_in,
    set_statistics,
    statistics_of,
    taken_of,
)
from canter.nn.normalizer import Normalizer
from canter.nn.optimizer import ParameterGroup

PREFIX, ROLE = "a2c_network._disc_", "amp"
"""How its parameters' names begin; whose statistics are those of the frames."""


def discriminator_of(ppo: PPO) -> AMP | None:
    """The extension, where there is one."""
    return next((extension for extension in ppo.extensions if isinstance(extension, AMP)), None)


def _parameters(amp: AMP) -> dict[str, Tensor]:
    """By the parent's names, in its order."""
    named = {f"mlp.{name}": parameter for name, parameter in amp.trunk.named_parameters()}
    named |= {f"logits.{name}": parameter for name, parameter in amp.logit.named_parameters()}
    return {f"{PREFIX}{name}": parameter for name, parameter in named.items()}


def _group(amp: AMP) -> ParameterGroup:
    (group,) = amp.phase.optimizer.groups.values()
    return group


def _turned(amp: AMP, value: Tensor, name: str = f"{PREFIX}mlp.0.weight") -> Tensor:
    """The same with frames in the other order, where they are columns of it."""
    if name != f"{PREFIX}mlp.0.weight":
        return value.clone()
    return value.unflatten(-1, (amp.config.frames, -1)).flip(-2).flatten(-2)


def _normalizers(amp: AMP) -> list[Normalizer]:
    return [amp.normalizer] if isinstance(amp.normalizer, Normalizer) else []


def check(amp: AMP, weights: Weights) -> None:
    """Refuse a file with another discriminator, or none."""
    theirs = {name: tensor for name, tensor in weights.parameters.items() if name.startswith(PREFIX)}
    check_same(_parameters(amp), theirs)
    check_moments(_parameters(amp), weights)
    check_statistics(_normalizers(amp), weights.statistics.get(ROLE), ROLE)


@torch.no_grad()
def load(amp: AMP, weights: Weights) -> None:
    """Take it from a file that was checked; remembered transitions are in none."""
    own, group = _parameters(amp), _group(amp)
    moments = moments_in(group, own.items())
    for name, parameter in own.items():
        parameter.copy_(_turned(amp, weights.parameters[name], name))
        for here, value in zip(moments[name], weights.moments.get(name, ()), strict=False):
            here.copy_(_turned(amp, value, name))
    group.adam.step.fill_(weights.optimizers["policy"].steps)  # the parent has one Adam for both
    if (found := weights.statistics.get(ROLE)) is not None:
        found = Statistics(_turned(amp, found.mean), _turned(amp, found.variance), found.count)
    set_statistics(_normalizers(amp), found)


@torch.no_grad()
def take(amp: AMP) -> Weights:
    """It by the parent's names, and in the parent's order of frames."""
    own, group = _parameters(amp), _group(amp)
    weights = Weights(optimizers={"policy": taken_of(group)})
    for name, (mean, square) in moments_in(group, own.items()).items():
        weights.parameters[name] = _turned(amp, own[name].detach(), name).cpu()
        weights.moments[name] = _turned(amp, mean, name).cpu(), _turned(amp, square, name).cpu()
    if (found := statistics_of(_normalizers(amp))) is not None:
        weights.statistics[ROLE] = Statistics(_turned(amp, found.mean), _turned(amp, found.variance), found.count)
    return weights

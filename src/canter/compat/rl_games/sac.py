"""The files of rl_games' SAC, read and written.

Its critics read actions in the environment's units and Canter's in -1..1, so their first layers are
rescaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.sac import SAC
from canter.compat.pickled_file import CheckpointRefused, number, read_pickled
from canter.compat.rl_games.checkpoint import buffers_of, statistics_in, uncompiled
from canter.compat.weights import (
    Weights,
    check_moments,
    check_same,
    check_statistics,
    moments_in,
    optimizer_progress,
    set_optimizer_progress,
    set_statistics,
    statistics_of,
    torch_adam,
)
from canter.core.plain import ConfigError
from canter.core.specs import Continuous
from canter.nn.actor_critic import Actor
from canter.nn.distributions import interval
from canter.nn.heads import GaussianHead
from canter.nn.network import Network
from canter.nn.normalizer import Normalizer
from canter.nn.optimizer import ParameterGroup
from canter.nn.stack import Critics, Stack, StackedLinear, StackNetwork

OPTIMIZERS = {"policy": "actor", "critic": "critic", "temperature": "log_alpha"}
"""Canter's names of the optimizers, and rl_games' names of their parameters."""
NETWORKS = ("actor", "critic", "critic_target")
Views = dict[str, list[Tensor]]
"""For each name in a file, the parts of the tensors here that are its rows, in order."""


def is_sac(tree: Mapping[str, Any]) -> bool:
    """Return True for a file of rl_games' SAC."""
    return all(isinstance(tree.get(part), Mapping) for part in NETWORKS)


def read_weights(path: Path) -> Weights:
    """Read the weights of a file, by rl_games' names."""
    return weights_in(read_pickled(path), path)


def weights_in(tree: Mapping[str, Any], path: Path) -> Weights:
    """Return the weights of a file's contents."""
    if not is_sac(tree):
        raise CheckpointRefused(path, f"no file of rl_games' SAC: it has {', '.join(map(str, list(tree)[:8]))}")
    weights = Weights(iteration=int(number(tree, "epoch", 0)), env_steps=int(number(tree, "frame", 0)))
    named = {part: uncompiled(tree[part]) for part in NETWORKS}
    for part, tensors in named.items():
        weights.parameters |= {f"{part}.{name}": x for name, x in tensors.items() if isinstance(x, Tensor)}
    if isinstance(tree.get("log_alpha"), Tensor):  # 1.6.5 does not save it, and restarts with init_alpha
        weights.parameters["log_alpha"] = tree["log_alpha"]
    for phase, part in OPTIMIZERS.items():
        names = [f"{part}.{name}" for name in named[part]] if part in named else [part]
        weights.add_optimizer(phase, tree.get(f"{part}_optimizer"), names)
    if isinstance(tree.get("running_mean_std"), Mapping):
        weights.statistics["observations"] = statistics_in(tree["running_mean_std"])
    return weights


# what is what
# --------------------------------------------------------------------------------------------------------


def views_of(part: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> Views:
    """Return the parts of a module's parameters by the file's names."""
    if isinstance(module, Critics):
        views: Views = {}
        for member in range(module.members):
            own, last = _layers("stack.", module.stack, f"{part}.Q{member + 1}", member, tensors)
            views |= own | _layer(last, "head", member, tensors)
        return views
    if not isinstance(module, Actor):
        return {part: [tensors["log"][0]]}
    if not isinstance(module.network, StackNetwork):
        raise ConfigError(f"algorithm.policy: rl_games' form is kind=stack, not a {type(module.network).__name__}")
    head = module.head
    assert isinstance(head, GaussianHead)
    if head.log_std.form != "tanh" or not isinstance(head.raw_std, nn.Module):
        kind = "network" if isinstance(head.raw_std, nn.Module) else "parameter"
        raise ConfigError(
            f"algorithm.std: form={head.log_std.form}, kind={kind}, but rl_games' SAC has form=tanh, kind=network: "
            "import its settings with parity"
        )
    views, last = _layers("network.stack.", module.network.stack, "actor.trunk", 0, tensors)
    for kind in ("weight", "bias"):
        views[f"{last}.{kind}"] = [tensors[f"head.mean.{kind}"], tensors[f"head.raw_std.{kind}"]]
    return views


def _layers(prefix: str, stack: Stack, name: str, member: int, tensors: Mapping[str, Tensor]) -> tuple[Views, str]:
    """Yield the hidden layers of an ensemble member, and the name of the layer behind them."""
    linear = [f"{prefix}layers.{i}" for i, layer in enumerate(stack.layers) if isinstance(layer, StackedLinear)]
    views: Views = {}
    for place, ours in enumerate(linear):
        views |= _layer(f"{name}.{2 * place}", ours, member, tensors)
    return views, f"{name}.{2 * len(linear)}"


def _layer(name: str, ours: str, member: int, tensors: Mapping[str, Tensor]) -> Views:
    """Return the parts of one layer, transposed."""
    weight = tensors[f"{ours}.weight"][member].T
    bias = tensors.get(f"{ours}.bias")
    return {f"{name}.weight": [weight]} | ({} if bias is None else {f"{name}.bias": [bias[member, 0]]})


def modules_of(sac: SAC) -> dict[str, nn.Module]:
    """Return the modules with weights, by rl_games' names."""
    learner = sac.learner
    return {
        "actor": learner.actor,
        "critic": learner.critics,
        "critic_target": learner.target_critics,
        "log_alpha": learner.temperature,
    }


def _normalizers(module: nn.Module) -> list[Normalizer]:
    encoders = [part for part in module.modules() if isinstance(part, Network)]
    return [each for part in encoders for each in part.normalizers if isinstance(each, Normalizer)]


def _moments(sac: SAC) -> Iterator[tuple[str, ParameterGroup, list[tuple[Views, float]]]]:
    """Yield each optimizer with Adam's two moments as views, and their parts by rl_games' names."""
    for phase, part in OPTIMIZERS.items():
        (group,) = sac.learner.optimizers[phase].groups.values()
        module = modules_of(sac)[part]
        found = moments_in(group, module.named_parameters())
        pair = [views_of(part, module, {name: moments[k] for name, moments in found.items()}) for k in (0, 1)]
        # rl_games' gradient is by the temperature, ours by its logarithm.
        slope = sac.learner.temperature().item() if part == "log_alpha" else 1.0
        yield phase, group, [(pair[0], slope), (pair[1], slope**2)]


def _action_scale(sac: SAC) -> tuple[Tensor, Tensor]:
    """Return half the width and the centre of the actions' bounds, `[A]`."""
    action = sac.spec.action
    assert isinstance(action, Continuous)
    scale, centre = interval(action.low, action.high)[:2]
    return torch.tensor(scale), torch.tensor(centre)


def _convert_actions(weights: Weights, scale: Tensor, centre: Tensor) -> Weights:
    """Convert critics of `scale * a + centre` into critics of `a`."""
    columns = len(scale)
    weights = replace(weights, parameters=dict(weights.parameters), moments=dict(weights.moments))
    for part in NETWORKS[1:]:
        for name in [name for name in weights.parameters if name.startswith(part) and name.endswith(".0.weight")]:
            weight = weights.parameters[name]
            bias = name.replace("weight", "bias")
            weights.parameters[bias] = weights.parameters[bias] + weight[:, -columns:] @ centre
            weights.parameters[name] = _scaled(weight, scale)
            if name in weights.moments:
                mean, square = weights.moments[name]
                weights.moments[name] = _scaled(mean, 1 / scale), _scaled(square, 1 / scale**2)
    return weights


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([weight[:, : -len(scale)], weight[:, -len(scale) :] * scale], 1)


# theirs to ours
# ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_networks(modules: Mapping[str, nn.Module], weights: Weights) -> None:
    """Load a file's networks and statistics into these modules, all or none.

    Names and shapes are compared first.
    """
    for part, module in modules.items():
        _check(part, module, weights)
    for part, module in modules.items():
        for name, parts in views_of(part, module, dict(module.named_parameters())).items():
            if name in weights.parameters:
                _put(parts, weights.parameters[name])
        if part != "critic_target":  # which looks through the critics' statistics
            set_statistics(_normalizers(module), weights.statistics.get("observations"))


def _check(part: str, module: nn.Module, weights: Weights) -> None:
    own = dict(module.named_parameters())
    views = {name: _joined(parts) for name, parts in views_of(part, module, own).items()}
    theirs = {name: tensor for name, tensor in weights.parameters.items() if name.split(".")[0] == part}
    if sum(view.numel() for view in views.values()) != sum(tensor.numel() for tensor in own.values()):
        raise ConfigError(f"{part}: rl_games' form has plain layers only, without norms, blocks and images")
    if theirs or part != "log_alpha":
        check_same(views, theirs)
    check_moments(views, weights)
    if part in ("actor", "critic"):
        check_statistics(_normalizers(module), weights.statistics.get("observations"), part)


def _put(parts: list[Tensor], value: Tensor) -> None:
    rows = [value] if len(parts) == 1 else value.split([len(view) for view in parts])
    for view, own in zip(parts, rows, strict=True):
        view.copy_(own)


@torch.no_grad()
def load(sac: SAC, weights: Weights) -> None:
    """Continue from a file; it holds no replay buffer, so its policy collects a new one."""
    for part, module in modules_of(sac).items():
        _check(part, module, weights)
    weights = _convert_actions(weights, *_action_scale(sac))
    load_networks(modules_of(sac), weights)
    for phase, group, pair in _moments(sac):
        for k, (views, factor) in enumerate(pair):
            for name, parts in views.items():
                if name in weights.moments:
                    _put(parts, weights.moments[name][k] / factor)
        set_optimizer_progress(group, weights.optimizers[phase])
    sac.rollouts = weights.iteration
    sac.refilled = 0


# ours to theirs
# ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def dump(sac: SAC, epoch: int, frame: int, best: float) -> dict[str, Any]:
    """Return SAC in rl_games' layout: tensors, numbers and None only."""
    scale, centre = _action_scale(sac)
    weights = Weights()
    for part, module in modules_of(sac).items():
        views = views_of(part, module, dict(module.named_parameters()))
        weights.parameters |= {name: _joined(parts) for name, parts in views.items()}
    for phase, group, pair in _moments(sac):
        mean, square = ({n: _joined(parts) * factor for n, parts in views.items()} for views, factor in pair)
        weights.moments |= {name: (mean[name], square[name]) for name in mean}
        weights.optimizers[phase] = optimizer_progress(group)
    weights = _convert_actions(weights, 1 / scale, -centre / scale)
    tree: dict[str, Any] = {"log_alpha": weights.parameters["log_alpha"]}
    for part in NETWORKS:
        tree[part] = {n.removeprefix(f"{part}."): x for n, x in weights.parameters.items() if n.split(".")[0] == part}
    found = statistics_of(_normalizers(sac.learner.actor))
    if found is not None:
        tree["running_mean_std"] = buffers_of(found)
    for phase, group, _ in _moments(sac):
        names = [name for name in weights.parameters if name.split(".")[0] == OPTIMIZERS[phase]]
        tree[f"{OPTIMIZERS[phase]}_optimizer"] = torch_adam(weights, names, phase, group.config)
    return tree | {"epoch": epoch, "frame": frame, "last_mean_rewards": best, "env_state": None}


def _joined(parts: list[Tensor]) -> Tensor:
    """Return a copy on the CPU."""
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined.detach().cpu().clone(memory_format=torch.contiguous_format)

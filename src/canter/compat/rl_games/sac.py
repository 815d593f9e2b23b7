"""The files of rl_games' SAC, read and written.

Its critics read actions in the environment's units and Canter's in -1..1, so their first layers are scaled on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.sac import SAC
from canter.compat.pickled_file import CheckpointRefused, number, read_pickled
from canter.compat.rl_games.checkpoint import buffers_of, statistics_in
from canter.compat.weights import (
    Taken,
    Weights,
    check_statistics,
    positional,
    set_statistics,
    statistics_of,
    torch_adam,
)
from canter.distributions import interval
from canter.nn.actor_critic import Actor
from canter.nn.critics import Critics
from canter.nn.network import Network
from canter.nn.normalizer import Normalizer
from canter.nn.stack import Stack, StackedLinear, StackNetwork
from canter.optim import OptimizerConfig
from canter.plain import ConfigError
from canter.specs import Continuous

OPTIMIZERS = {"policy": "actor", "critic": "critic", "temperature": "log_alpha"}
"""Canter's names of the optimisers, and rl_games' of what they move."""
NETWORKS = ("actor", "critic", "critic_target")
Views = dict[str, list[Tensor]]
"""For each name in a file, the parts of our tensors that are its rows, in their order."""


def is_sac(tree: Mapping[str, Any]) -> bool:
    """Whether a file was written by rl_games' SAC."""
    return all(isinstance(tree.get(part), Mapping) for part in NETWORKS)


def read_weights(path: Path) -> Weights:
    """The weights in a file, by the parent's names."""
    return weights_in(read_pickled(path), path)


def weights_in(tree: Mapping[str, Any], path: Path) -> Weights:
    """The same from a mapping that was read."""
    if not is_sac(tree):
        raise CheckpointRefused(path, f"no file of rl_games' SAC: it has {', '.join(map(str, list(tree)[:8]))}")
    weights = Weights(iteration=int(number(tree, "epoch", 0)))
    named = {part: {str(name).replace("_orig_mod.", ""): x for name, x in tree[part].items()} for part in NETWORKS}
    for part, tensors in named.items():
        weights.parameters |= {f"{part}.{name}": x for name, x in tensors.items() if isinstance(x, Tensor)}
    if isinstance(tree.get("log_alpha"), Tensor):  # 1.6.5 does not save it, and begins anew with init_alpha
        weights.parameters["log_alpha"] = tree["log_alpha"]
    for phase, part in OPTIMIZERS.items():
        names = [f"{part}.{name}" for name in named[part]] if part in named else [part]
        moments, weights.optimizers[phase] = positional(tree.get(f"{part}_optimizer"), names)
        weights.moments |= moments
    if isinstance(tree.get("running_mean_std"), Mapping):
        weights.statistics["observations"] = statistics_in(tree["running_mean_std"])
    return weights


# what is what --------------------------------------------------------------------------------------------------------


def views_of(part: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> Views:
    """What the file's tensors of a part are of ours, which go by the names of the module's parameters."""
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
    form = getattr(getattr(module.head, "log_std", None), "form", "other")
    if form != "tanh":
        raise ConfigError(f"algorithm.std.form={form}: rl_games' SAC has tanh; import its settings with parity")
    views, last = _layers("network.stack.", module.network.stack, "actor.trunk", 0, tensors)
    for kind in ("weight", "bias"):
        views[f"{last}.{kind}"] = [tensors[f"head.mean.{kind}"], tensors[f"head.raw_std.{kind}"]]
    return views


def _layers(prefix: str, stack: Stack, name: str, member: int, tensors: Mapping[str, Tensor]) -> tuple[Views, str]:
    """A member's layers, each with an activation behind it, and the name of the next."""
    linear = [f"{prefix}layers.{i}" for i, layer in enumerate(stack.layers) if isinstance(layer, StackedLinear)]
    views: Views = {}
    for place, ours in enumerate(linear):
        views |= _layer(f"{name}.{2 * place}", ours, member, tensors)
    return views, f"{name}.{2 * len(linear)}"


def _layer(name: str, ours: str, member: int, tensors: Mapping[str, Tensor]) -> Views:
    """One layer; ours multiply from the other side."""
    weight, bias = tensors[f"{ours}.weight"][member].T, tensors.get(f"{ours}.bias")
    return {f"{name}.weight": [weight]} | ({} if bias is None else {f"{name}.bias": [bias[member, 0]]})


def modules_of(sac: SAC) -> dict[str, nn.Module]:
    """What has weights, by rl_games' names."""
    learner = sac.learner
    return {
        "actor": learner.actor,
        "critic": learner.critics,
        "critic_target": learner.slow,
        "log_alpha": learner.temperature,
    }


def _normalizers(module: nn.Module) -> list[Normalizer]:
    encoders = [part for part in module.modules() if isinstance(part, Network)]
    return [each for part in encoders for each in part.normalizers if isinstance(each, Normalizer)]


def _moments(sac: SAC) -> Iterator[tuple[str, str, nn.Module, list[dict[str, Tensor]]]]:
    """Each optimiser, what it moves, and Adam's two moments by the names of our parameters."""
    modules = modules_of(sac)
    for phase, part in OPTIMIZERS.items():
        (group,) = sac.learner.optimizers[phase].groups.values()
        names = {id(parameter): name for name, parameter in modules[part].named_parameters()}
        sizes = [parameter.numel() for parameter in group.parameters]
        pair = [
            {
                names[id(parameter)]: flat.view_as(parameter)
                for parameter, flat in zip(group.parameters, moment.split(sizes), strict=True)
            }
            for moment in (group.adam.exp_avg, group.adam.exp_avg_sq)
        ]
        yield phase, part, modules[part], pair


def _units(sac: SAC) -> tuple[Tensor, Tensor]:
    """Half the width and the centre of the actions' bounds, `[A]`."""
    action = sac.spec.action
    assert isinstance(action, Continuous)
    scale, centre = interval(action.low, action.high)[:2]
    return torch.tensor(scale), torch.tensor(centre)


def _in_units(weights: Weights, scale: Tensor, centre: Tensor) -> Weights:
    """The same critics for actions `a` where they read `scale * a + centre` before."""
    columns = len(scale)
    for part in NETWORKS[1:]:
        for name in [name for name in weights.parameters if name.startswith(part) and name.endswith(".0.weight")]:
            weight, bias = weights.parameters[name], name.replace("weight", "bias")
            weights.parameters[bias] = weights.parameters[bias] + weight[:, -columns:] @ centre
            weights.parameters[name] = _scaled(weight, scale)
            if name in weights.moments:
                mean, square = weights.moments[name]
                weights.moments[name] = _scaled(mean, 1 / scale), _scaled(square, 1 / scale**2)
    return weights


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([weight[:, : -len(scale)], weight[:, -len(scale) :] * scale], 1)


# theirs to ours ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_networks(modules: Mapping[str, nn.Module], weights: Weights) -> None:
    """Put a file's networks and statistics into these modules, all or none: names and shapes are compared first."""
    statistics, views = weights.statistics.get("observations"), Views()
    for part, module in modules.items():
        own = dict(module.named_parameters())
        found = views_of(part, module, own)
        _check(part, own, found, weights)
        views |= found
        if part in ("actor", "critic"):  # the slow critics look through the same statistics
            check_statistics(_normalizers(module), statistics, part)
    for name, parts in views.items():
        if name in weights.parameters:
            _put(parts, weights.parameters[name])
    for part in ("actor", "critic"):
        if part in modules:
            set_statistics(_normalizers(modules[part]), statistics)


def _check(part: str, own: Mapping[str, Tensor], views: Views, weights: Weights) -> None:
    theirs = {name for name in weights.parameters if name.split(".")[0] == part}
    if part == "log_alpha" and not theirs:
        return
    covered = sum(view.numel() for parts in views.values() for view in parts)
    if covered != sum(tensor.numel() for tensor in own.values()):
        raise ConfigError(f"{part}: rl_games' form has plain layers only, without norms, blocks and images")
    odd = sorted(theirs ^ set(views))
    if odd:
        raise ConfigError(f"file and settings do not have the same layers: {', '.join(odd)} in only one of them")
    for name, parts in views.items():
        wanted = torch.Size((sum(view.shape[0] for view in parts), *parts[0].shape[1:])) if parts[0].ndim else ()
        if weights.parameters[name].shape != wanted and weights.parameters[name].numel() != 1:
            shape = tuple(weights.parameters[name].shape)
            raise ConfigError(f"{name}: {shape} in the file, {tuple(wanted)} by the settings")


def _put(parts: list[Tensor], value: Tensor) -> None:
    start = 0
    for view in parts:
        stop = start + (view.shape[0] if view.ndim else 1)
        view.copy_(value.reshape(-1)[0] if not view.ndim else value[start:stop])
        start = stop


@torch.no_grad()
def load(sac: SAC, weights: Weights) -> None:
    """Continue from a file; remembered transitions are not in it, and are collected anew by its policy."""
    weights = _in_units(weights, *_units(sac))
    load_networks(modules_of(sac), weights)
    slope = sac.learner.temperature().item()  # rl_games' gradient is by the temperature, ours by its logarithm
    for phase, part, module, pair in _moments(sac):
        (group,) = sac.learner.optimizers[phase].groups.values()
        for k, tensors in enumerate(pair):
            for name, parts in views_of(part, module, tensors).items():
                if name in weights.moments:
                    _put(parts, weights.moments[name][k] / (slope ** (k + 1) if part == "log_alpha" else 1.0))
        taken = weights.optimizers[phase]
        group.adam.step.fill_(taken.steps)
        if taken.learning_rate is not None:
            group.learning_rate.fill_(taken.learning_rate)
    sac.rollouts, sac.refilled = weights.iteration, 0


# ours to theirs ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def dump(sac: SAC, epoch: int, frame: int, best: float) -> dict[str, Any]:
    """SAC as rl_games saves it: tensors, numbers and None only."""
    scale, centre = _units(sac)
    weights, slope = Weights(), sac.learner.temperature().item()
    for part, module in modules_of(sac).items():
        own = {name: parameter.detach() for name, parameter in module.named_parameters()}
        weights.parameters |= {name: _joined(parts) for name, parts in views_of(part, module, own).items()}
    for phase, part, module, pair in _moments(sac):
        mean, square = ({n: _joined(v) for n, v in views_of(part, module, own).items()} for own in pair)
        factor = slope if part == "log_alpha" else 1.0
        weights.moments |= {name: (mean[name] * factor, square[name] * factor**2) for name in mean}
        (group,) = sac.learner.optimizers[phase].groups.values()
        weights.optimizers[phase] = Taken(int(group.adam.step.item()), group.learning_rate.item())
    weights = _in_units(weights, 1 / scale, -centre / scale)
    config, tree = sac.config, dict[str, Any]()
    for part in NETWORKS:
        tree[part] = {n.removeprefix(f"{part}."): x for n, x in weights.parameters.items() if n.split(".")[0] == part}
    found = statistics_of(_normalizers(sac.learner.actor))
    if found is not None:
        tree["running_mean_std"] = buffers_of(found)
    tree |= {"epoch": epoch, "frame": frame, "log_alpha": weights.parameters["log_alpha"]}
    critic = config.critic_optimizer or config.optimizer
    adams: dict[str, OptimizerConfig] = {"policy": config.optimizer, "critic": critic}
    for phase, settings in (adams | {"temperature": config.temperature.optimizer}).items():
        part = OPTIMIZERS[phase]
        names = [name for name in weights.parameters if name.split(".")[0] == part]
        tree[f"{part}_optimizer"] = torch_adam(weights, names, phase, settings)
    return tree | {"last_mean_rewards": best, "env_state": None}


def _joined(parts: list[Tensor]) -> Tensor:
    """On the CPU, and not a part of anything of ours."""
    return (torch.cat(parts) if parts[0].ndim else parts[0]).cpu().clone(memory_format=torch.contiguous_format)

"""The files of rl_games' SAC, read and written.

Its critics read actions in the environment's units and Canter's in -1..1, so their first layers are
rescaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.sac import SAC
from canter.compat.pickled_file import CheckpointRefused, number
from canter.compat.rl_games.checkpoint import buffers_of, statistics_in, uncompiled
from canter.compat.weights import Link, NetworkTensors, Weights, linear_links, with_statistics
from canter.core.plain import ConfigError
from canter.core.specs import Continuous
from canter.nn.actor_critic import Actor
from canter.nn.distributions import interval
from canter.nn.heads import GaussianHead
from canter.nn.network import Network
from canter.nn.normalizer import Normalizer
from canter.nn.optimizer import Optimizer
from canter.nn.stack import Critics, Stack, StackedLinear, StackNetwork

OPTIMIZERS = {"policy": "actor", "critic": "critic", "temperature": "log_alpha"}
"""Canter's names of the optimizers, and rl_games' names of their parameters."""
NETWORKS = ("actor", "critic", "critic_target")


def is_sac(tree: Mapping[str, Any]) -> bool:
    """Return True for a file of rl_games' SAC."""
    return all(isinstance(tree.get(part), Mapping) for part in NETWORKS)


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


def links_of(part: str, module: nn.Module) -> list[Link]:
    """Return the links of a module's parameters, whose names here begin with rl_games' name of it."""
    if isinstance(module, Critics):
        links: list[Link] = []
        for member in range(module.members):
            own, last = _layers(f"{part}.stack.", module.stack, f"{part}.Q{member + 1}", member)
            links += own + _layer(last, f"{part}.head", member)
        return links
    if not isinstance(module, Actor):
        return [Link(part, f"{part}.log")]
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
    links, last = _layers(f"{part}.network.stack.", module.network.stack, f"{part}.trunk", 0)
    return links + linear_links(last, f"{part}.head.mean") + linear_links(last, f"{part}.head.raw_std")


def _layers(prefix: str, stack: Stack, name: str, member: int) -> tuple[list[Link], str]:
    """Return the links of the hidden layers of an ensemble member, and the name of the layer behind them."""
    linear = [f"{prefix}layers.{i}" for i, layer in enumerate(stack.layers) if isinstance(layer, StackedLinear)]
    links = [link for place, ours in enumerate(linear) for link in _layer(f"{name}.{2 * place}", ours, member)]
    return links, f"{name}.{2 * len(linear)}"


def _layer(name: str, ours: str, member: int) -> list[Link]:
    """Return the links of one layer of an ensemble member, whose weights are transposed here."""
    weight = Link(f"{name}.weight", f"{ours}.weight", lambda tensor: tensor[member].T)
    return [weight, Link(f"{name}.bias", f"{ours}.bias", lambda tensor: tensor[member, 0])]


def modules_of(sac: SAC) -> dict[str, nn.Module]:
    """Return the modules with weights, by rl_games' names."""
    learner = sac.learner
    return {
        "actor": learner.actor,
        "critic": learner.critics,
        "critic_target": learner.target_critics,
        "log_alpha": learner.temperature,
    }


def tensors_of(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer] = MappingProxyType({})
) -> NetworkTensors:
    """Return the tensors of modules and their optimizers by rl_games' names."""
    own = {f"{part}.{name}": x for part, module in modules.items() for name, x in module.named_parameters()}
    links = [link for part, module in modules.items() for link in links_of(part, module)]
    if own.keys() - {link.ours for link in links}:
        form = "rl_games' form has plain layers only, without norms, blocks and images"
        raise ConfigError(f"{', '.join(modules)}: {form}")
    # The target looks through the statistics of the critics.
    normalizers = [("observations", _normalizers(modules[part])) for part in ("actor", "critic") if part in modules]
    groups = {phase: [*optimizers[phase].groups.values()] for phase in OPTIMIZERS if phase in optimizers}
    return NetworkTensors(own, links, normalizers, groups)


def _normalizers(module: nn.Module) -> list[Normalizer]:
    encoders = [part for part in module.modules() if isinstance(part, Network)]
    return with_statistics(each for part in encoders for each in part.normalizers)


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


def _scale_temperature(weights: Weights, slope: float) -> None:
    """Scale Adam's moments of the logarithm: rl_games' loss is linear in the temperature, ours in the logarithm."""
    if "log_alpha" in weights.moments:
        mean, square = weights.moments["log_alpha"]
        weights.moments["log_alpha"] = mean.reshape(()) * slope, square.reshape(()) * slope**2


# theirs to ours
# ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(sac: SAC, weights: Weights) -> None:
    """Continue from a file; it holds no replay buffer, so its policy collects a new one."""
    tensors = tensors_of(modules_of(sac), sac.learner.optimizers)
    weights.parameters.setdefault("log_alpha", sac.learner.temperature.log)
    weights.check_names(tensors.links)
    tensors.check(weights)
    weights = _convert_actions(weights, *_action_scale(sac))
    _scale_temperature(weights, 1 / weights.parameters["log_alpha"].exp().item())
    tensors.load(weights)
    sac.rollouts = weights.iteration
    sac.refilled = 0


# ours to theirs
# ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def dump(sac: SAC, epoch: int, frame: int, best: float) -> dict[str, Any]:
    """Return SAC in rl_games' layout: tensors, numbers and None only."""
    scale, centre = _action_scale(sac)
    learner = sac.learner
    weights = tensors_of(modules_of(sac), learner.optimizers).take()
    weights = _convert_actions(weights, 1 / scale, -centre / scale)
    _scale_temperature(weights, learner.temperature().item())
    tree: dict[str, Any] = {"log_alpha": weights.parameters["log_alpha"].reshape(())}
    for part in NETWORKS:
        tree[part] = {n.removeprefix(f"{part}."): x for n, x in weights.parameters.items() if n.split(".")[0] == part}
    if (found := weights.statistics.get("observations")) is not None:
        tree["running_mean_std"] = buffers_of(found)
    for phase, part in OPTIMIZERS.items():
        names = [name for name in weights.parameters if name.split(".")[0] == part]
        (group,) = learner.optimizers[phase].groups.values()
        tree[f"{part}_optimizer"] = weights.torch_adam(names, phase, group.config)
    return tree | {"epoch": epoch, "frame": frame, "last_mean_rewards": best, "env_state": None}

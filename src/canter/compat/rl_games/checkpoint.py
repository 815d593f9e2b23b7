"""rl_games' `nn/NAME.pth` files, with the discriminator of IsaacGymEnvs' AMP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.extensions.amp import AMP
from canter.algorithms.ppo import PPO
from canter.compat.layout import check_rl_games, is_impala
from canter.compat.pickled_file import CheckpointRefused, number
from canter.compat.rl_games.own_network import OwnNetwork
from canter.compat.weights import (
    Link,
    NetworkTensors,
    OptimizerProgress,
    Statistics,
    Weights,
    linear_links,
    network_links,
    network_of,
    tensors_of,
    with_statistics,
)
from canter.core.plain import ConfigError
from canter.core.specs import MultiDiscrete
from canter.nn.heads import GaussianHead
from canter.nn.optimizer import OptimizerConfig

DISCRIMINATOR = "a2c_network._disc_"
FRAMES = "amp"
"""Prefix of the discriminator's parameters; role of the statistics of its frames."""


def discriminator_of(ppo: PPO) -> AMP | None:
    """Return the extension, or None."""
    return next((extension for extension in ppo.extensions if isinstance(extension, AMP)), None)


def tensors_of_amp(amp: AMP) -> NetworkTensors:
    """Return the discriminator by rl_games' names, in its order."""
    own = {f"mlp.{name}": parameter for name, parameter in amp.trunk.named_parameters()}
    own |= {f"logits.{name}": parameter for name, parameter in amp.logit.named_parameters()}
    links = [Link(f"{DISCRIMINATOR}{name}", name) for name in own]
    groups = {FRAMES: [*amp.phase.optimizer.groups.values()]}
    return NetworkTensors(own, links, [(FRAMES, with_statistics([amp.normalizer]))], groups)


def flip_frames(weights: Weights, frames: int) -> Weights:
    """Return the weights of a discriminator that reads the frames in the opposite order: rl_games' newest is first."""
    first = f"{DISCRIMINATOR}mlp.0.weight"

    def flip(name: str, value: Tensor) -> Tensor:
        return value.unflatten(-1, (frames, -1)).flip(-2).flatten(-2) if name in (first, FRAMES) else value

    return replace(
        weights,
        parameters={name: flip(name, x) for name, x in weights.parameters.items()},
        moments={name: (flip(name, mean), flip(name, square)) for name, (mean, square) in weights.moments.items()},
        statistics={
            role: Statistics(flip(role, found.mean), flip(role, found.variance), found.count)
            for role, found in weights.statistics.items()
        },
    )


NET = "a2c_network"
CENTRAL = "central."
"""The policy's network; prefix here of the central value's names, which is a separate model."""
OWN = f"{CENTRAL}{NET}"
STYLE = "amp_input_mean_std"
"""Statistics of the discriminator's input frames."""


def is_rl_games(tree: Mapping[str, Any]) -> bool:
    """Return True for a file of rl_games' PPO."""
    return isinstance(tree.get("model"), Mapping) and any(NET in str(name) for name in tree["model"])


def weights_in(tree: Mapping[str, Any], path: Path) -> Weights:
    """Return the weights of a file's contents, by rl_games' names; those of a central value begin with `central.`."""
    if not is_rl_games(tree):
        raise CheckpointRefused(path, f"no file of rl_games' PPO: it has {', '.join(map(str, list(tree)[:8]))}")
    model = uncompiled(tree["model"])
    nets = uncompiled(tree.get("assymetric_vf_nets") or {})
    central = {CENTRAL + name.removeprefix("model."): tensor for name, tensor in nets.items()}
    both = model | central
    parameters = {name: x for name, x in both.items() if "mean_std." not in name and isinstance(x, Tensor)}
    names, central_names = ([name for name in parameters if name in part] for part in (model, central))
    weights = Weights(parameters)
    weights.iteration = int(number(tree, "epoch", 0))
    weights.env_steps = int(number(tree, "frame", 0))
    weights.add_optimizer("policy", tree.get("optimizer"), names)
    weights.add_optimizer("central_value", tree.get("assymetric_vf_optimizer"), central_names)
    at = CENTRAL if central else ""
    where = {"actor": "running_mean_std.", "critic": f"{at}running_mean_std.", "value": f"{at}value_mean_std."}
    for role, prefix in where.items():
        if f"{prefix}running_mean" in both:
            weights.statistics[role] = statistics_in(both, prefix)
    if isinstance(tree.get(STYLE), Mapping):
        weights.statistics[FRAMES] = statistics_in(tree[STYLE])
    return weights


def uncompiled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names without torch.compile."""
    return {str(name).replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}


def statistics_in(buffers: Mapping[str, Tensor], prefix: str = "") -> Statistics:
    """Return the statistics in rl_games' buffers."""
    mean, variance = (buffers[f"{prefix}{name}"].double().reshape(-1) for name in ("running_mean", "running_var"))
    return Statistics(mean, variance, float(buffers[f"{prefix}count"]))


def links_of(ppo: PPO) -> list[Link]:
    """Return the links of all parameters, in the order of rl_games' modules."""
    model = ppo.model
    network = model.actor.network
    if isinstance(network, OwnNetwork):
        return [Link(f"{NET}.{name}", f"actor.network.module.{name}") for name, _ in network.module.named_parameters()]
    central = ppo.config.central_value is not None
    separate = not model.shared_trunk and not central
    body = _body(model.actor, "actor", NET, prefix="a_" if separate else "")
    if separate:
        body += _body(model.critic, "critic", NET, "critic", "c_")
    mean, sigma = _head(ppo, model.actor.head)
    links = [*sigma, *sorted(body, key=_place)]
    if not central:
        links += linear_links(f"{NET}.value", "critic.head.linear")
    elif model.trunk_value is not None:
        links += linear_links(f"{NET}.value", "trunk_value.linear")
    links += mean
    if central:
        links += sorted(_body(model.critic, "critic", OWN), key=_place)
        links += linear_links(f"{OWN}.value", "critic.head.linear")
    return links


def _body(part: nn.Module, role: str, at: str, name: str = "actor", prefix: str = "") -> list[Link]:
    """Return the links of a network without its last layer.

    Rl_games calls a single network the actor's.
    """
    network = network_of(part, role)
    own = "" if is_impala(network) else f"{name}_"
    hidden = f"{at}.{own}mlp"
    cnn = f"{at}.{own}cnn"
    rnn = f"{at}.{prefix}rnn.rnn"
    norm = f"{at}.{prefix}layer_norm"
    links = network_links(network, f"{role}.network", hidden, rnn, norm, cnn)
    return [_of_block(link) if link.theirs.startswith(f"{at}.cnn.") else link for link in links]


BLOCKS = {
    "0": "conv.conv",
    "2.layers.1": "res_block1.conv1.conv",
    "2.layers.3": "res_block1.conv2.conv",
    "3.layers.1": "res_block2.conv1.conv",
    "3.layers.3": "res_block2.conv2.conv",
}
"""Convolutions of a stage of IMPALA's encoder, which has four layers here, by rl_games' names."""


def _of_block(link: Link) -> Link:
    """Return the link of a convolution of IMPALA's encoder, by rl_games' name."""
    at, _, name = link.theirs.partition(".cnn.")
    number, _, rest = name.partition(".")
    stage, layer = divmod(int(number), 4)
    place, _, kind = f"{layer}.{rest}".rpartition(".")
    return replace(link, theirs=f"{at}.cnn.{stage}.{BLOCKS[place]}.{kind}")


def _place(link: Link) -> int:
    """Return the position of a parameter.

    Encoders, hidden layers, recurrent layers; with IMPALA's encoder these come before hidden layers.
    """
    order = ("cnn.", "_mlp.", "rnn.", "layer_norm", ".mlp.")
    return next(i for i, name in enumerate(order) if name in link.theirs)


def _head(ppo: PPO, head: nn.Module) -> tuple[list[Link], list[Link]]:
    """Return the links of the last layer, and those before all others.

    The std if it is a parameter.
    """
    if isinstance(head, GaussianHead):
        mean = linear_links(f"{NET}.mu", "actor.head.mean")
        theirs = head.log_std.form in ("log", "softplus", "linear")
        if isinstance(head.raw_std, Tensor):
            return mean, [Link(f"{NET}.sigma", "actor.head.raw_std", std=None if theirs else "log")]
        if not theirs:
            raise ConfigError(f"std.form={head.log_std.form} of a std from the network is not rl_games': use log")
        return [*mean, *linear_links(f"{NET}.sigma", "actor.head.raw_std")], []
    if not isinstance(ppo.spec.action, MultiDiscrete):
        return linear_links(f"{NET}.logits", "actor.head.linear"), []
    links: list[Link] = []
    start = 0
    for i, n in enumerate(ppo.spec.action.nvec):
        rows = slice(start, start + n)
        links += linear_links(f"{NET}.logits.{i}", "actor.head.linear", lambda tensor, rows=rows: tensor[rows])
        start += n
    return links, []


def load(ppo: PPO, weights: Weights, parts: tuple[str, ...] = ("actor", "critic", "optimizer")) -> None:
    """Load the weights of a file into PPO."""
    learns = "optimizer" in parts
    amp = discriminator_of(ppo) if learns else None
    spare: tuple[str, ...] = ()
    if amp is not None or not learns:  # what acts needs no discriminator
        spare += (DISCRIMINATOR,)
    if ppo.config.central_value is not None:
        # The actor's own critic is not used, and exists only with central_value.actor_value.
        spare += (f"{NET}.value.", f"{NET}.critic_", f"{NET}.c_")
    links = links_of(ppo)
    weights.check_names(links, spare=spare)
    if ppo.model.shared_trunk:
        weights.statistics.pop("critic", None)
        if "actor" in weights.statistics:
            weights.statistics["critic"] = weights.statistics["actor"]
    if amp is not None:
        style = tensors_of_amp(amp)
        weights.check_names(style.links, of=(DISCRIMINATOR,))
        style.check(weights)
    tensors = tensors_of(ppo, links, parts)
    for role, normalizers in tensors.normalizers:
        found = weights.statistics.get(role)
        if not normalizers and found is not None and _unchanged(found):
            del weights.statistics[role]
    tensors.load(weights)
    if amp is not None:  # rl_games has one Adam for both; the replay buffer is in no file
        own = flip_frames(weights, amp.frames)
        own.optimizers[FRAMES] = OptimizerProgress(weights.optimizers["policy"].steps, None)
        tensors_of_amp(amp).load(own)


def dump(ppo: PPO, epoch: int, frame: int, best: float) -> dict[str, Any]:
    """Return PPO in the layout of rl_games 1.6: tensors, numbers and None only."""
    check_rl_games(ppo)
    weights = tensors_of(ppo, links_of(ppo)).take()
    central = {name: tensor for name, tensor in weights.parameters.items() if name.startswith(CENTRAL)}
    model = {name: tensor for name, tensor in weights.parameters.items() if name not in central}
    if f"{NET}.value.weight" not in model and not isinstance(ppo.model.actor.network, OwnNetwork):
        model = _with_value(model, network_of(ppo.model.actor, "actor").features)
    statistics = _statistics(weights, "value") | _statistics(weights, "actor", ppo)
    if ppo.config.central_value is not None and "value" in weights.statistics:
        # It has the statistics of values that count: the actor's are as they began.
        statistics |= _statistics(Weights(statistics={"value": _initial(1)}), "value")
    tree: dict[str, Any] = {
        "model": statistics | model,
        "epoch": epoch,
        "frame": frame,
        "optimizer": weights.torch_adam(list(model), "policy", ppo.config.optimizer),
        "last_mean_rewards": best,
        "env_state": None,
    }
    if ppo.config.central_value is not None:
        config = ppo.config.central_value.optimizer
        own = {name.removeprefix(CENTRAL): tensor for name, tensor in central.items()}
        stats = _statistics(weights, "value") | _statistics(weights, "critic", ppo)
        tree["assymetric_vf_nets"] = {f"model.{name}": tensor for name, tensor in (stats | own).items()}
        tree["assymetric_vf_optimizer"] = weights.torch_adam(list(central), "central_value", config)
    amp = discriminator_of(ppo)
    if amp is None:
        return tree
    style = flip_frames(tensors_of_amp(amp).take(), amp.frames)
    return _with_style(tree, style, ppo.config.optimizer)


def _with_style(tree: dict[str, Any], style: Weights, config: OptimizerConfig) -> dict[str, Any]:
    """Return the file with the discriminator after the policy's parameters, in one Adam."""
    policy = tree["optimizer"]
    adam = style.torch_adam(list(style.parameters), FRAMES, config)
    first = len(policy["param_groups"][0]["params"])
    policy["param_groups"][0]["params"] += [first + place for place in adam["param_groups"][0]["params"]]
    policy["state"] |= {first + place: state for place, state in adam["state"].items()}
    tree["model"] |= style.parameters
    found = style.statistics.get(FRAMES)
    return tree if found is None else tree | {STYLE: buffers_of(found)}


def _with_value(model: dict[str, Tensor], features: int) -> dict[str, Tensor]:
    """Return the model with the value head of rl_games' actor, unused with a central value."""
    value = {f"{NET}.value.weight": torch.zeros(1, features), f"{NET}.value.bias": torch.zeros(1)}
    last = (f"{NET}.mu.", f"{NET}.logits")
    before = {name: tensor for name, tensor in model.items() if not name.startswith(last)}
    return before | value | {name: tensor for name, tensor in model.items() if name.startswith(last)}


def _statistics(weights: Weights, role: str, ppo: PPO | None = None) -> dict[str, Tensor]:
    """Return rl_games' buffers of a role; with `ppo` those of observations, in their shape.

    rl_games normalises images too, which have no statistics here: theirs change nothing.
    """
    found = weights.statistics.get(role)
    shape: tuple[int, ...] = (-1,)
    if ppo is not None:
        model = ppo.config.model
        config: Any = model.critic if role == "critic" and model.critic else model.policy
        groups = (ppo.model.actor if role == "actor" else ppo.model.critic).network.groups
        shape = ppo.spec.obs[groups[0]].shape if len(groups) == 1 else shape
        if found is None and config.normalize_obs:
            found = _initial(math.prod(shape))
    if found is None:
        return {}
    prefix = "value_mean_std" if role == "value" else "running_mean_std"
    buffers = buffers_of(found).items()
    return {f"{prefix}.{key}": buffer.reshape(shape) if buffer.dim() else buffer for key, buffer in buffers}


def _initial(width: int) -> Statistics:
    """Return statistics as rl_games' begin."""
    return Statistics(torch.zeros(width).double(), torch.ones(width).double(), 1.0)


def _unchanged(found: Statistics) -> bool:
    return found.count == 1.0 and not found.mean.any() and bool((found.variance == 1.0).all())


def buffers_of(statistics: Statistics) -> dict[str, Tensor]:
    """Return statistics by rl_games' names."""
    count = torch.tensor(statistics.count, dtype=torch.float64)
    return {"running_mean": statistics.mean, "running_var": statistics.variance, "count": count}

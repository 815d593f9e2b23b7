"""RSL-RL's `model_N.pt` files of all generations, read and written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.extensions.rnd import RND
from canter.algorithms.ppo import PPO
from canter.compat.layout import check_rsl_rl
from canter.compat.pickled_file import CheckpointRefused, number
from canter.compat.rsl_rl.own_model import OwnModel
from canter.compat.weights import (
    Link,
    NetworkTensors,
    Statistics,
    StdOf,
    Weights,
    linear_links,
    network_links,
    network_of,
    tensors_of,
    with_statistics,
)
from canter.core.plain import ConfigError
from canter.nn.distributions import Beta, Distribution
from canter.nn.heads import GaussianHead

_log = logging.getLogger(__name__)

PARTS = ("actor", "critic", "optimizer", "rnd")
"""Parts of a file besides the iteration, by their names in `load_cfg`."""
STD = "actor.distribution.std_param"
LOG_STD = "actor.distribution.log_std_param"
EPS = 0.01
"""Constant that RSL-RL adds to the standard std of an observation."""
OLD_NAMES = {
    "std": STD,
    "log_std": LOG_STD,
    "memory_a.rnn.": "actor.rnn.rnn.",
    "memory_c.rnn.": "critic.rnn.rnn.",
    "actor_obs_normalizer.": "actor.obs_normalizer.",
    "critic_obs_normalizer.": "critic.obs_normalizer.",
    "actor.": "actor.mlp.",
    "critic.": "critic.mlp.",
}
"""Names up to 3.x, and since 5.0."""
BEFORE_5 = {"std": STD.removeprefix("actor."), "log_std": LOG_STD.removeprefix("actor.")}
"""Names of 4.0, which has the std next to the layers, and since."""
OLD_STATISTICS = {
    "obs_norm_state_dict": "actor",
    "critic_obs_norm_state_dict": "critic",
    "privileged_obs_norm_state_dict": "critic",
}
"""Mappings of the observation statistics in 2.x."""
ORDERS = {
    **dict.fromkeys((1, 2), ("actor.distribution.", "actor.mlp.", "critic.mlp.", "actor.rnn.", "critic.rnn.")),
    3: ("actor.distribution.", "actor.rnn.", "actor.mlp.", "critic.rnn.", "critic.mlp."),
}
"""Order of the parameters in the optimizer's state up to 3.x."""


def is_rsl_rl(tree: Mapping[str, Any]) -> bool:
    """Return True for a file of RSL-RL's PPO."""
    return ("model_state_dict" in tree or "actor_state_dict" in tree) and "iter" in tree


def own_buffers(ppo: PPO) -> dict[str, Tensor]:
    """Return the buffers of the user's models by their names in a file."""
    parts = (("actor", ppo.model.actor.network), ("critic", ppo.model.critic.network))
    own = ((role, network) for role, network in parts if isinstance(network, OwnModel))
    return {f"{role}.{name}": x for role, network in own for name, x in network.buffers_of_file().items()}


def weights_in(tree: Mapping[str, Any], path: Path, own: Mapping[str, Tensor] = MappingProxyType({})) -> Weights:
    """Return the weights of a file of any generation, by the names of 5.x; `own` are buffers of the user's models."""
    if "actor_state_dict" in tree and "critic_state_dict" in tree:
        models: dict[str, Any] = {}
        for role in ("actor", "critic"):
            models |= {f"{role}.{BEFORE_5.get(name, name)}": x for name, x in tree[f"{role}_state_dict"].items()}
    elif "model_state_dict" in tree:
        models = {_renamed(name): tensor for name, tensor in tree["model_state_dict"].items()}
    else:
        raise CheckpointRefused(path, f"no file of RSL-RL's PPO: it has {', '.join(map(str, list(tree)[:8]))}")
    names = [name for name in models if ".obs_normalizer." not in name and name not in own]
    weights = Weights(parameters={name: models[name] for name in names}, iteration=int(number(tree, "iter", 0)))
    weights.add_optimizer("policy", tree.get("optimizer_state_dict"), names)
    weights.buffers |= {name: x for name, x in models.items() if name in own}
    for role in ("actor", "critic"):
        at = f"{role}.obs_normalizer."
        if f"{at}_mean" in models and f"{at}_mean" not in own:
            weights.statistics[role] = _statistics(models, at)
    if isinstance(tree.get("rnd_state_dict"), Mapping):
        _add_curiosity(weights, tree)
    for key, role in OLD_STATISTICS.items():
        if isinstance(tree.get(key), Mapping):
            weights.statistics[role] = _statistics(tree[key])
    return weights


CURIOSITY = "rnd."
"""Prefix here of the parameters and statistics of random network distillation."""
CURIOUS = {f"{CURIOSITY}state_normalizer": "rnd", f"{CURIOSITY}reward_normalizer.emp_norm": "rnd bonus"}
"""Names of its normalizers in a file, and roles of their statistics."""


def curiosity_of(ppo: PPO) -> RND | None:
    """Return the extension, or None."""
    return next((extension for extension in ppo.extensions if isinstance(extension, RND)), None)


def tensors_of_curiosity(rnd: RND) -> NetworkTensors:
    """Return predictor and target by RSL-RL's names; only the predictor learns."""
    own: dict[str, Tensor] = {}
    for name, network in (("predictor", rnd.predictor), ("target", rnd.target)):
        layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
        for i, layer in enumerate(layers):
            own |= {f"{CURIOSITY}{name}.{2 * i}.weight": layer.weight, f"{CURIOSITY}{name}.{2 * i}.bias": layer.bias}
    bonus = [rnd.bonus_statistics] if rnd.config.normalize_bonus else []
    normalizers = [("rnd", with_statistics([rnd.normalizer])), ("rnd bonus", with_statistics(bonus))]
    groups = {"rnd": [*rnd.phase.optimizer.groups.values()]}
    return NetworkTensors(own, [Link(name, name) for name in own], normalizers, groups)


def _add_curiosity(weights: Weights, tree: Mapping[str, Any]) -> None:
    """Add predictor, target and statistics of a file."""
    found = {f"{CURIOSITY}{name}": tensor for name, tensor in tree["rnd_state_dict"].items()}
    own = {name: tensor for name, tensor in found.items() if "_normalizer." not in name}
    weights.parameters |= own
    names = [name for name in own if name.startswith(f"{CURIOSITY}predictor.")]
    weights.add_optimizer("rnd", tree.get("rnd_optimizer_state_dict"), names)
    for at, role in CURIOUS.items():
        if f"{at}._mean" in found:
            weights.statistics[role] = _statistics(found, f"{at}.")


def _dump_curiosity(rnd: RND) -> dict[str, Any]:
    """Return predictor, target, statistics and optimizer in RSL-RL's layout."""
    weights = tensors_of_curiosity(rnd).take()
    state = dict(weights.parameters)
    for at, role in CURIOUS.items():
        if (found := weights.statistics.get(role)) is not None:
            shape = (1,) if role == "rnd bonus" else (1, -1)
            buffers = _buffers(found, found.variance.sqrt(), shape)
            state |= {f"{at}.{name}": value for name, value in buffers.items()}
    optimizer = weights.torch_adam(list(weights.moments), "rnd", rnd.config.optimizer)
    state = {name.removeprefix(CURIOSITY): tensor for name, tensor in state.items()}
    return {"rnd_state_dict": state, "rnd_optimizer_state_dict": optimizer}


def _renamed(name: str) -> str:
    for old, new in OLD_NAMES.items():
        if name == old or (old.endswith(".") and name.startswith(old)):
            return new + name[len(old) :]
    return name


def _statistics(found: Mapping[str, Any], at: str = "") -> Statistics:
    mean, variance, count = found[f"{at}_mean"], found[f"{at}_var"], found.get(f"{at}count")
    # Files before 2.1.1 do not count; as many samples as a long run has let the statistics stay where
    # they are.
    samples = float(count) if isinstance(count, Tensor | int | float) else 1e8
    return Statistics(mean.double().reshape(-1), variance.double().reshape(-1), samples)


def links_of(ppo: PPO, std: str) -> list[Link]:
    """Return the links by the names of 5.x.

    `std` is the file's parameter for the standard std, if there is one.
    """
    links: list[Link] = []
    for role, part in (("actor", ppo.model.actor), ("critic", ppo.model.critic)):
        if isinstance(part.network, OwnModel):
            names = [name for name, _ in part.network.model.named_parameters()]
            links += [Link(f"{role}.{name}", f"{role}.network.model.{name}") for name in names]
            continue
        network = network_of(part, role)
        behind = f"{role}.mlp.{len(network.hidden)}"
        names = (f"{role}.mlp", f"{role}.rnn.rnn", "-", f"{role}.cnns.{{}}")
        body = [*network_links(network, f"{role}.network", *names)]
        layers = [link for link in body if ".hidden." in link.ours]
        last = linear_links(behind, "critic.head.linear")
        if role == "actor":
            last, std_links = _actor_head(part, ppo.policy.distribution, behind, std)
            links += std_links
        links += [*layers, *last, *(link for link in body if link not in layers)]
    return links


def _actor_head(actor: nn.Module, distribution: Distribution, behind: str, std: str) -> tuple[list[Link], list[Link]]:
    head = actor.head
    if isinstance(distribution, Beta):  # both have the first concentrations first
        return linear_links(behind, "actor.head.linear"), []
    if not isinstance(head, GaussianHead):
        raise ConfigError("RSL-RL's policies are Gaussian or beta: there are no other actions in its files")
    if isinstance(head.raw_std, Tensor):
        of = "log" if std == LOG_STD else "scalar"
        return linear_links(behind, "actor.head.mean"), [Link(std, "actor.head.raw_std", std=of)]
    if head.log_std.form not in ("scalar", "log"):
        raise ConfigError(f"std.form={head.log_std.form} of a std from the network is not RSL-RL's: use scalar or log")
    return linear_links(behind, "actor.head.mean") + linear_links(behind, "actor.head.raw_std"), []


def load(ppo: PPO, weights: Weights, parts: tuple[str, ...] = PARTS, *, strict: bool = True) -> None:
    """Load the weights of a file into PPO; without `strict`, those that have a place."""
    links = links_of(ppo, LOG_STD if LOG_STD in weights.parameters else STD)
    if strict and {"actor", "critic"} <= set(parts):
        weights.check_names(links, spare=(CURIOSITY,))  # RSL-RL loads it only where it is used
    buffers = {name: x for name, x in own_buffers(ppo).items() if name.partition(".")[0] in parts}
    own = NetworkTensors(buffers, [Link(name, name) for name in buffers])
    own.check(Weights(weights.buffers), strict=strict)
    rnd = curiosity_of(ppo) if "rnd" in parts else None
    side: NetworkTensors | None = None
    if rnd is not None and any(name.startswith(CURIOSITY) for name in weights.parameters):
        side = tensors_of_curiosity(rnd)
        weights.check_names(side.links, of=(CURIOSITY,))
        side.check(weights)
    tensors_of(ppo, links, parts).load(weights, strict=strict)
    own.load(Weights(weights.buffers), strict=strict)
    if side is not None:
        side.load(weights)
    elif rnd is not None:
        _log.warning("the file has no rnd_state_dict: predictor and target of the curiosity restart")


def dump(ppo: PPO, iteration: int, infos: Any = None, generation: int = 5, std: StdOf | None = None) -> dict[str, Any]:
    """Return PPO in the layout of a generation of RSL-RL: tensors, numbers and None only.

    `std` is the `std_type` of the settings that load the file; None for that of PPO's std.
    """
    check_rsl_rl(ppo, generation)
    head = ppo.model.actor.head
    if std is None and isinstance(head, GaussianHead) and head.log_std.form == "log":
        std = "log"
    weights = tensors_of(ppo, links_of(ppo, LOG_STD if std == "log" else STD)).take()
    names = [name for first in ORDERS.get(generation, ("",)) for name in weights.parameters if name.startswith(first)]
    if len(names) < len(weights.parameters):
        raise ConfigError(f"generation={generation}: RSL-RL has had policies with this encoder since 4.0")
    models = {name: weights.parameters[name] for name in names}
    statistics = {
        f"{role}.obs_normalizer.{name}": tensor
        for role, part in (("actor", ppo.model.actor), ("critic", ppo.model.critic))
        if role in weights.statistics
        for name, tensor in _normalizer(weights.statistics[role], network_of(part, role).normalizers).items()
    }
    statistics |= {name: buffer.detach().cpu() for name, buffer in own_buffers(ppo).items()}
    rnd = curiosity_of(ppo)
    return {
        **_layout(models, statistics, generation),
        "optimizer_state_dict": weights.torch_adam(names, "policy", ppo.config.optimizer),
        **({} if rnd is None else _dump_curiosity(rnd)),
        "iter": iteration,
        "infos": infos,
    }


def _layout(models: dict[str, Tensor], statistics: dict[str, Tensor], generation: int) -> dict[str, Any]:
    """Return tensors with names of 5.x in the mappings and names of a generation."""
    if generation >= 4:
        both = statistics | models
        old = {} if generation >= 5 else {STD: "actor.std", LOG_STD: "actor.log_std"}
        return {
            f"{role}_state_dict": {
                old.get(name, name).removeprefix(f"{role}."): tensor
                for name, tensor in both.items()
                if name.startswith(f"{role}.")
            }
            for role in ("actor", "critic")
        }
    model: dict[str, Tensor] = {}
    for name, tensor in (models | (statistics if generation == 3 else {})).items():
        old, new = next(pair for pair in OLD_NAMES.items() if name.startswith(pair[1]))
        model[old + name.removeprefix(new)] = tensor
    tree: dict[str, Any] = {"model_state_dict": model}
    for key, role in (("obs_norm_state_dict", "actor"), ("privileged_obs_norm_state_dict", "critic")):
        start = f"{role}.obs_normalizer."
        own = {name.removeprefix(start): tensor for name, tensor in statistics.items() if name.startswith(start)}
        tree |= {key: own} if own and generation < 3 else {}
    return tree


def _normalizer(found: Statistics, parts: Any) -> dict[str, Tensor]:
    """Return the std for RSL-RL, which divides by `_std + 0.01`, with Canter's quotient."""
    scale = torch.cat([part.scale.reshape(-1) for part in parts if hasattr(part, "scale")]).double().cpu()
    std = scale - EPS
    if not bool((std > 0).all()):
        raise ConfigError(
            f"an observation's std of {scale.min().item():g} is below the {EPS} that RSL-RL adds: "
            "train with model.policy.normalizer.eps_on=std, eps=0.01 to export it"
        )
    return _buffers(found, std)


def _buffers(found: Statistics, std: Tensor, shape: tuple[int, ...] = (1, -1)) -> dict[str, Tensor]:
    """Return statistics by the names of RSL-RL's normalizer."""
    row = {"_mean": found.mean, "_var": found.variance, "_std": std}
    return {name: x.float().reshape(shape) for name, x in row.items()} | {"count": torch.tensor(int(found.count))}

"""rl_games' `nn/NAME.pth` files, read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.ppo import PPO
from canter.compat.pickled_file import CheckpointRefused, number, read_pickled
from canter.compat.rl_games import discriminator
from canter.compat.weights import (
    Link,
    Statistics,
    Weights,
    linear_links,
    load_weights,
    network_links,
    network_of,
    positional,
    take_weights,
    torch_adam,
)
from canter.nn.heads import GaussianHead
from canter.optim import OptimizerConfig
from canter.plain import ConfigError
from canter.specs import MultiDiscrete

NET, CENTRAL = "a2c_network", "central."
"""The policy's network; what stands here before names of the central value's, which is a model of its own."""
OWN = f"{CENTRAL}{NET}"
STYLE = "amp_input_mean_std"
"""Statistics of the frames that a discriminator judges."""


def is_rl_games(tree: Mapping[str, Any]) -> bool:
    """Whether a file was written by rl_games' PPO."""
    return isinstance(tree.get("model"), Mapping) and any(NET in str(name) for name in tree["model"])


def read_weights(path: str | Path) -> Weights:
    """The weights in a file, by the parent's names; those of a central value begin with `central.`."""
    return weights_in(read_pickled(path), Path(path))


def weights_in(tree: Mapping[str, Any], path: Path) -> Weights:
    """The same from a mapping that was read."""
    if not is_rl_games(tree):
        raise CheckpointRefused(path, f"no file of rl_games' PPO: it has {', '.join(map(str, list(tree)[:8]))}")
    model = {str(name).replace("_orig_mod.", ""): tensor for name, tensor in tree["model"].items()}
    central = {
        CENTRAL + str(name).replace("_orig_mod.", "").removeprefix("model."): tensor
        for name, tensor in (tree.get("assymetric_vf_nets") or {}).items()
    }
    names, central_names = (
        [name for name in part if "mean_std." not in name and isinstance(part[name], Tensor)]
        for part in (model, central)
    )
    both = model | central
    weights = Weights(parameters={name: both[name] for name in (*names, *central_names)})
    weights.iteration, weights.env_steps = int(number(tree, "epoch", 0)), int(number(tree, "frame", 0))
    weights.moments, weights.optimizers["policy"] = positional(tree.get("optimizer"), names)
    moments, weights.optimizers["central_value"] = positional(tree.get("assymetric_vf_optimizer"), central_names)
    weights.moments |= moments
    where = {"actor": "running_mean_std", "critic": f"{CENTRAL if central else ''}running_mean_std"}
    for role, prefix in (where | {"value": f"{CENTRAL if central else ''}value_mean_std"}).items():
        if f"{prefix}.running_mean" in both:
            weights.statistics[role] = statistics_in(both, f"{prefix}.")
    if isinstance(tree.get(STYLE), Mapping):
        weights.statistics[discriminator.ROLE] = statistics_in(tree[STYLE])
    return weights


def statistics_in(buffers: Mapping[str, Tensor], prefix: str = "") -> Statistics:
    """Those that rl_games keeps in the buffers of such names."""
    mean, variance = (buffers[f"{prefix}{name}"].double().reshape(-1) for name in ("running_mean", "running_var"))
    return Statistics(mean, variance, float(buffers[f"{prefix}count"]))


def links_of(ppo: PPO) -> list[Link]:
    """What is what, in the order in which rl_games' modules have their parameters."""
    model, central = ppo.model, ppo.config.central_value is not None
    separate = not model.shared_trunk and not central
    a, c = ("a_", "c_") if separate else ("", "")
    actor = network_of(model.actor, "actor")
    parts = list(
        network_links(
            actor, "actor.network", f"{NET}.actor_mlp", f"{NET}.{a}rnn.rnn", f"{NET}.{a}layer_norm", f"{NET}.actor_cnn"
        )
    )
    mean, sigma = _head(ppo, model.actor.head)
    if separate:
        critic = network_of(model.critic, "critic")
        parts += network_links(
            critic,
            "critic.network",
            f"{NET}.critic_mlp",
            f"{NET}.{c}rnn.rnn",
            f"{NET}.{c}layer_norm",
            f"{NET}.critic_cnn",
        )
    value = (
        []
        if central and model.trunk_value is None
        else linear_links(f"{NET}.value", "trunk_value.linear" if central else "critic.head.linear")
    )
    links = [*sigma, *sorted(parts, key=_place), *value, *mean]
    if central:
        critic = network_of(model.critic, "critic")
        own = list(
            network_links(
                critic, "critic.network", f"{OWN}.actor_mlp", f"{OWN}.rnn.rnn", f"{OWN}.layer_norm", f"{OWN}.actor_cnn"
            )
        )
        links += [*sorted(own, key=_place), *linear_links(f"{OWN}.value", "critic.head.linear")]
    return links


def _place(link: Link) -> int:
    """Encoders, then hidden layers of the actor, of the critic, then memory."""
    order = ("actor_cnn", "critic_cnn", "actor_mlp", "critic_mlp", "rnn.", "layer_norm")
    return next(i for i, name in enumerate(order) if name in link.theirs)


def _head(ppo: PPO, head: nn.Module) -> tuple[list[Link], list[Link]]:
    """The last layer, and what stands before all others: the deviation where it is a parameter."""
    if isinstance(head, GaussianHead):
        mean = linear_links(f"{NET}.mu", "actor.head.mean")
        theirs = head.log_std.form in ("log", "softplus", "linear")
        if isinstance(head.raw_std, Tensor):
            return mean, [Link(f"{NET}.sigma", "actor.head.raw_std", std=None if theirs else "log")]
        if not theirs:
            raise ConfigError(f"std.form={head.log_std.form} of a deviation from the network is not rl_games': use log")
        return [*mean, *linear_links(f"{NET}.sigma", "actor.head.raw_std")], []
    if not isinstance(ppo.spec.action, MultiDiscrete):
        return linear_links(f"{NET}.logits", "actor.head.linear"), []
    return [link for links in _choices(ppo.spec.action.nvec) for link in links], []


def _choices(nvec: tuple[int, ...]) -> Iterator[list[Link]]:
    start = 0
    for i, n in enumerate(nvec):
        yield linear_links(f"{NET}.logits.{i}", "actor.head.linear", our_rows=(start, start + n))
        start += n


def load(ppo: PPO, weights: Weights, parts: tuple[str, ...] = ("actor", "critic", "optimizer")) -> None:
    """Put the weights of a file into PPO."""
    links, learns = links_of(ppo), "optimizer" in parts
    unknown = sorted(set(weights.parameters) - {link.theirs for link in links})
    amp = discriminator.discriminator_of(ppo) if learns else None
    if amp is not None or not learns:  # what acts needs no discriminator
        unknown = [name for name in unknown if not name.startswith(discriminator.PREFIX)]
    # With a central value the actor's own critic judges nothing, and is there only with central_value.actor_value.
    own_critic = (f"{NET}.value.", f"{NET}.critic_", f"{NET}.c_")
    spare = ppo.config.central_value is not None
    unknown = [name for name in unknown if not (spare and name.startswith(own_critic))]
    if unknown:
        raise ConfigError(f"the settings have no place for the file's {', '.join(unknown)}")
    if ppo.model.shared_trunk:
        weights.statistics.pop("critic", None)
        if "actor" in weights.statistics:
            weights.statistics["critic"] = weights.statistics["actor"]
    if amp is not None:
        discriminator.check(amp, weights)
    load_weights(ppo, weights, links, parts)
    if amp is not None:
        discriminator.load(amp, weights)


def dump(ppo: PPO, epoch: int, frame: int, best: float) -> dict[str, Any]:
    """PPO as rl_games 1.6 saves it: tensors, numbers and None only."""
    weights = take_weights(ppo, links_of(ppo))
    model, central = _split(weights.parameters)
    if f"{NET}.value.weight" not in model:
        model = _with_value(model, network_of(ppo.model.actor, "actor").features)
    statistics = _statistics(weights, ("value", "value_mean_std"), ("actor", "running_mean_std"))
    if ppo.config.central_value is not None:
        statistics |= {name: buffer for name, buffer in _untouched().items() if name in statistics}
    tree: dict[str, Any] = {
        "model": statistics | model,
        "epoch": epoch,
        "frame": frame,
        "optimizer": torch_adam(weights, list(model), "policy", ppo.config.optimizer),
        "last_mean_rewards": best,
        "env_state": None,
    }
    if ppo.config.central_value is not None:
        config = ppo.config.central_value.optimizer
        own = {name.removeprefix(CENTRAL): tensor for name, tensor in central.items()}
        stats = _statistics(weights, ("value", "value_mean_std"), ("critic", "running_mean_std"))
        tree["assymetric_vf_nets"] = {f"model.{name}": tensor for name, tensor in (stats | own).items()}
        tree["assymetric_vf_optimizer"] = torch_adam(weights, list(central), "central_value", config)
    amp = discriminator.discriminator_of(ppo)
    return tree if amp is None else _with_style(tree, discriminator.take(amp), ppo.config.optimizer)


def _with_style(tree: dict[str, Any], style: Weights, config: OptimizerConfig) -> dict[str, Any]:
    """A file with AMP's discriminator behind the policy's parameters, in one Adam with them."""
    policy, adam = tree["optimizer"], torch_adam(style, list(style.parameters), "policy", config)
    first = len(policy["param_groups"][0]["params"])
    policy["param_groups"][0]["params"] += [first + place for place in adam["param_groups"][0]["params"]]
    policy["state"] |= {first + place: state for place, state in adam["state"].items()}
    tree["model"] |= style.parameters
    found = style.statistics.get(discriminator.ROLE)
    return tree if found is None else tree | {STYLE: buffers_of(found)}


def _untouched() -> dict[str, Tensor]:
    """The actor's statistics of values beside a central value, which has those that count."""
    one = Statistics(torch.zeros(1).double(), torch.ones(1).double(), 1.0)
    return _statistics(Weights(statistics={"value": one}), ("value", "value_mean_std"))


def _with_value(model: dict[str, Tensor], features: int) -> dict[str, Tensor]:
    """With the value head that rl_games' actor has in any case; beside a central value nobody asks it."""
    value = {f"{NET}.value.weight": torch.zeros(1, features), f"{NET}.value.bias": torch.zeros(1)}
    last = (f"{NET}.mu.", f"{NET}.logits")
    before = {name: tensor for name, tensor in model.items() if not name.startswith(last)}
    return before | value | {name: tensor for name, tensor in model.items() if name.startswith(last)}


def _split(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    central = {name: tensor for name, tensor in parameters.items() if name.startswith(CENTRAL)}
    return {name: tensor for name, tensor in parameters.items() if name not in central}, central


def _statistics(weights: Weights, *roles: tuple[str, str]) -> dict[str, Tensor]:
    """rl_games' buffers; a value's are of one number."""
    found: dict[str, Tensor] = {}
    for role, name in roles:
        if role in weights.statistics:
            found |= {f"{name}.{key}": buffer for key, buffer in buffers_of(weights.statistics[role]).items()}
    return found


def buffers_of(statistics: Statistics) -> dict[str, Tensor]:
    """rl_games' names of them."""
    count = torch.tensor(statistics.count, dtype=torch.float64)
    return {"running_mean": statistics.mean, "running_var": statistics.variance, "count": count}

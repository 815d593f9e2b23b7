"""Weights, statistics and optimizer state of PPO by the names of a source library.

A list of links pairs the parameters, in both directions. A source library has one normalizer over
all concatenated observations, Canter one for each group; its optimizer stores moments by position,
Canter's by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from canter.algorithms.ppo import PPO
from canter.core.plain import ConfigError
from canter.nn.cnn import CNN
from canter.nn.heads import GaussianHead, LogStd, WithHeads
from canter.nn.network import Network
from canter.nn.normalizer import Normalizer
from canter.nn.optimizer import OptimizerConfig, ParameterGroup
from canter.nn.rnn import RNN

Rows = tuple[int, int | None]
ALL: Rows = (0, None)
StdOf = Literal["scalar", "log"]
"""Meaning of the source library's parameter: the standard deviation, or its logarithm."""
Moments = tuple[Tensor, Tensor]
"""Adam's running mean and square of a parameter's gradient."""


@dataclass(frozen=True)
class Link:
    """A parameter of the source library and the one here, or some rows of each."""

    theirs: str
    ours: str
    their_rows: Rows = ALL
    our_rows: Rows = ALL
    std: StdOf | None = None
    """For a standard deviation: the meaning of the source library's number."""

    def of_moments(self) -> Link:
        """Return the link of the parameter's moments, which are never converted."""
        return replace(self, std=None)


@dataclass(frozen=True)
class Statistics:
    """Mean and variance `[D]` of `count` samples, float64."""

    mean: Tensor
    variance: Tensor
    count: float


@dataclass(frozen=True)
class OptimizerProgress:
    """Steps and learning rate of an optimizer; None if the file has no rate."""

    steps: int
    learning_rate: float | None


@dataclass
class Weights:
    """Contents of a file of the source library, by its names of parameters."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """Statistics of the observations of `actor` and `critic`, and of `value`."""
    optimizers: dict[str, OptimizerProgress] = field(default_factory=dict)
    """Steps and learning rate of the optimizer of each phase, by Canter's names of phases."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers of networks of the user's."""
    iteration: int = 0
    env_steps: int = 0
    """Transitions up to the checkpoint; 0 if the file does not say."""

    def add_optimizer(self, phase: str, state: Any, names: list[str]) -> None:
        """Add the state of a torch optimizer, whose parameters have these names in its order."""
        moments, self.optimizers[phase] = positional(state, names)
        self.moments |= moments


def network_of(part: nn.Module, role: str) -> Network:
    """Return the standard network of an actor or critic.

    Raise ConfigError for any other network.
    """
    network = part.network
    if not isinstance(network, Network):
        raise ConfigError(
            f"the {role}'s network is a {type(network).__name__}: only a standard network can be exported"
        )
    return network


def network_links(network: Network, ours: str, hidden: str, rnn: str, norm: str, cnn: str) -> Iterator[Link]:
    """Yield the links of a network without its last layer.

    `hidden`, `rnn`, `norm` and `cnn` are the source library's names; `{}` stands for the
    observation group.
    """
    for i, encoder in enumerate(network.encoders):
        if isinstance(encoder, CNN):
            for name, _ in encoder.layers.named_parameters():
                yield Link(f"{cnn.format(network.groups[i])}.{name}", f"{ours}.encoders.{i}.layers.{name}")
    if isinstance(network.memory, RNN):
        for k in range(len(network.memory.cells)):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                yield Link(f"{rnn}.{name}_l{k}", f"{ours}.memory.cells.{k}.{name}")
        for name, _ in network.memory.norm.named_parameters():
            yield Link(f"{norm}.{name}", f"{ours}.memory.norm.{name}")
    for name, _ in network.hidden.named_parameters():
        yield Link(f"{hidden}.{name}", f"{ours}.hidden.{name}")


def linear_links(theirs: str, ours: str, their_rows: Rows = ALL, our_rows: Rows = ALL) -> list[Link]:
    """Return the links of the weight and bias of one layer."""
    return [Link(f"{theirs}.{name}", f"{ours}.{name}", their_rows, our_rows) for name in ("weight", "bias")]


# theirs to ours
# ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(
    ppo: PPO, weights: Weights, links: Iterable[Link], parts: Iterable[str] = ("actor", "critic"), strict: bool = True
) -> None:
    """Load a file's weights into PPO, all or none: names and shapes are compared first.

    `parts` may leave out the actor or the critic, and may name `optimizer`. Without `strict`,
    parameters that the file lacks keep their values.
    """
    parts = set(parts)
    own = _learned(ppo)
    links = [link for link in links if link.ours in own and _part_of(link.ours) in parts]
    links = [link for link in links if strict or link.theirs in weights.parameters]
    values = {name: _joined(name, of, weights.parameters, ppo, own) for name, of in _grouped(links, "ours").items()}
    missing = sorted(name for name in own if _part_of(name) in parts and name not in values)
    if missing and strict:
        raise ConfigError(f"the file has nothing for {', '.join(missing)}: it was made with other settings")
    normalized = [pair for pair in normalizers_of(ppo) if _part_of(pair[1]) in parts]
    for normalizers, name in normalized:
        check_statistics(normalizers, weights.statistics.get(name), name)
    for name, value in values.items():
        own[name].copy_(value)
    for normalizers, name in normalized:
        set_statistics(normalizers, weights.statistics.get(name))
    if "optimizer" in parts and weights.moments:
        _set_moments(ppo, weights, links, own)


def _learned(ppo: PPO) -> dict[str, Tensor]:
    """Return the parameters by name, with a fixed std, which the source libraries save too."""
    buffers = {name: tensor for name, tensor in ppo.model.named_buffers() if name == "actor.head.raw_std"}
    return dict(ppo.model.named_parameters()) | buffers


def _part_of(name: str) -> str:
    return "actor" if name.partition(".")[0] == "actor" else "critic"


def _grouped(links: Iterable[Link], by: Literal["ours", "theirs"]) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(getattr(link, by), []).append(link)
    return found


def _joined(name: str, links: list[Link], theirs: Mapping[str, Tensor], ppo: PPO, own: Mapping[str, Tensor]) -> Tensor:
    """Return a parameter here from the linked rows of the file, with its shape checked."""
    rows: list[Tensor] = []
    for link in links:
        if link.theirs not in theirs:
            raise ConfigError(f"the file has no {link.theirs}, which is {name} here: it was made with other settings")
        value = torch.atleast_1d(theirs[link.theirs])[slice(*link.their_rows)]
        if link.std is not None and not (link.std == "log" and _same_number(link, ppo)):
            value = raw_std(value.exp() if link.std == "log" else value, log_std_of(ppo))
        rows.append(value)
    joined = torch.cat(rows)
    if joined.shape != own[name].shape:
        source = ", ".join(link.theirs for link in links)
        raise ConfigError(
            f"{source}: {tuple(joined.shape)} in the file, {tuple(own[name].shape)} by the settings ({name})"
        )
    return joined.to(own[name].dtype)


def _same_number(link: Link, ppo: PPO) -> bool:
    """Return True if the std is the same number in both.

    Converting it to a logarithm and back would round it.
    """
    return link.std == log_std_of(ppo).form and not log_std_of(ppo).floor


def log_std_of(ppo: PPO) -> LogStd:
    """Return the parameterisation of the standard deviation."""
    head = ppo.model.actor.head
    assert isinstance(head, GaussianHead)
    return head.log_std


def raw_std(std: Tensor, form: LogStd) -> Tensor:
    """Return the learned number of a standard deviation in this parameterisation."""
    if not bool((std > form.floor).all()):
        raise ConfigError(f"a std of {std.min().item():g} in the file is not above {form.floor:g}: it died in training")
    return form.inverse(std)


def normalizers_of(ppo: PPO) -> Iterator[tuple[list[Normalizer], str]]:
    """Yield the normalizers with statistics, each with its role."""
    for role, part in (("actor", ppo.model.actor), ("critic", ppo.model.critic)):
        network = part.network if isinstance(part.network, WithHeads) else network_of(part, role)
        yield [each for each in network.normalizers if isinstance(each, Normalizer)], role
    head = ppo.model.critic.head.normalizer
    yield [head] if isinstance(head, Normalizer) else [], "value"


def check_same(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for tensors of other names or shapes than those here."""
    unmatched = sorted(own.keys() ^ theirs.keys())
    if unmatched:
        raise ConfigError(f"file and settings do not have the same layers: {', '.join(unmatched)} in only one of them")
    for name, tensor in own.items():
        if theirs[name].shape != tensor.shape:
            shapes = f"{tuple(theirs[name].shape)} in the file, {tuple(tensor.shape)} by the settings"
            raise ConfigError(f"{name}: {shapes}")


def check_moments(own: Mapping[str, Tensor], weights: Weights) -> None:
    """Raise ConfigError for moments of other shapes than those of the parameters here."""
    known = {name: pair for name, pair in weights.moments.items() if name in own}
    for k in (0, 1):
        check_same({name: own[name] for name in known}, {name: pair[k] for name, pair in known.items()})


def check_statistics(parts: list[Normalizer], found: Statistics | None, name: str) -> None:
    """Raise ConfigError unless file and settings have statistics of the same width."""
    width = sum(part.mean.numel() for part in parts)
    if (found is None) != (not parts):
        spare = "file has statistics, but the settings do not normalise"
        lacking = "settings normalise, but the file has"
        what = f"{lacking} no statistics" if parts else spare
        raise ConfigError(f"{name}: the {what}: import the settings that it was made with")
    if found is not None and found.mean.numel() != width:
        raise ConfigError(f"{name}: statistics of {found.mean.numel()} numbers in the file, {width} by the settings")


def set_statistics(parts: list[Normalizer], found: Statistics | None) -> None:
    """Set the normalizers of a network to the statistics of a file."""
    start = 0
    for part in parts:
        assert found is not None
        stop = start + part.mean.numel()
        part.count.fill_(found.count)
        part.mean.copy_(found.mean[start:stop].view_as(part.mean))
        part.m2.copy_((found.variance[start:stop] * found.count).view_as(part.m2))
        nothing = torch.zeros(1, dtype=torch.bool, device=part.mean.device)
        part.update(torch.zeros((1, *part.mean.shape), device=part.mean.device), nothing)  # mean and std follow
        start = stop


def _set_moments(ppo: PPO, weights: Weights, links: list[Link], own: Mapping[str, Tensor]) -> None:
    """Set Adam's moments.

    Those of a std in another parameterisation stay 0, as they belong to another number.
    """
    for phase, group, moments in groups_of(ppo):
        for name, pair in moments.items():
            of = [link for link in links if link.ours == name and link.theirs in weights.moments]
            if not of or (of[0].std is not None and of[0].std != log_std_of(ppo).form):
                continue
            for k, moment in enumerate(pair):
                theirs = {link.theirs: weights.moments[link.theirs][k] for link in of}
                moment.copy_(_joined(name, [link.of_moments() for link in of], theirs, ppo, own))
        if phase in weights.optimizers:
            set_optimizer_progress(group, weights.optimizers[phase])


def set_optimizer_progress(group: ParameterGroup, progress: OptimizerProgress) -> None:
    """Set the steps and the learning rate of an optimizer."""
    group.adam.step.fill_(progress.steps)
    if progress.learning_rate is not None:
        group.learning_rate.fill_(progress.learning_rate)


def optimizer_progress(group: ParameterGroup) -> OptimizerProgress:
    """Return the steps and the learning rate of an optimizer."""
    return OptimizerProgress(int(group.adam.step.item()), group.learning_rate.item())


def groups_of(ppo: PPO) -> Iterator[tuple[str, ParameterGroup, dict[str, Moments]]]:
    """Yield each phase and parameter group with Adam's moments by name, as views."""
    for phase, optimizer in ppo.optimizers.items():
        for group in optimizer.groups.values():
            yield phase, group, moments_in(group, ppo.model.named_parameters())


def moments_in(group: ParameterGroup, named: Iterable[tuple[str, Tensor]]) -> dict[str, Moments]:
    """Return Adam's moments of a group's parameters by name, as views."""
    sizes = [parameter.numel() for parameter in group.parameters]
    rows = zip(group.parameters, group.adam.exp_avg.split(sizes), group.adam.exp_avg_sq.split(sizes), strict=True)
    found = {id(parameter): (mean.view_as(parameter), square.view_as(parameter)) for parameter, mean, square in rows}
    return {name: found[id(parameter)] for name, parameter in named if id(parameter) in found}


def positional(state: Any, names: list[str]) -> tuple[dict[str, Moments], OptimizerProgress]:
    """Return a torch optimizer's moments by name, with its steps and learning rate.

    `names` are the parameters in the optimizer's order.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return {}, OptimizerProgress(0, None)
    moments: dict[str, Moments] = {}
    steps = 0
    for position, name in enumerate(names):
        match state["state"].get(position):
            case {"exp_avg": Tensor() as mean, "exp_avg_sq": Tensor() as square, **entry}:
                moments[name] = (mean, square)
                steps = max(steps, int(entry.get("step", 0)))
    groups = state.get("param_groups") or [{}]
    rate = groups[0].get("lr") if isinstance(groups[0], Mapping) else None
    return moments, OptimizerProgress(steps, float(rate) if isinstance(rate, int | float | Tensor) else None)


# ours to theirs
# ------------------------------------------------------------------------------------------------------


def statistics_of(parts: list[Normalizer]) -> Statistics | None:
    """Return the concatenated statistics of all normalizers of a network."""
    if not parts:
        return None
    count = parts[0].count.item()
    variance = [part.m2 / part.count if count else torch.ones_like(part.m2) for part in parts]
    mean = torch.cat([part.mean.reshape(-1) for part in parts]).cpu()
    return Statistics(mean, torch.cat([each.reshape(-1) for each in variance]).cpu(), count)


@torch.no_grad()
def take_weights(ppo: PPO, links: list[Link]) -> Weights:
    """Return PPO's weights by the source library's names, in the order of the links."""
    own = {name: parameter.detach().cpu() for name, parameter in _learned(ppo).items()}
    statistics = {name: found for parts, name in normalizers_of(ppo) if (found := statistics_of(parts)) is not None}
    weights = Weights(statistics=statistics)
    moments: dict[str, Moments] = {}
    for phase, group, found in groups_of(ppo):
        weights.optimizers[phase] = optimizer_progress(group)
        moments |= {name: (mean.cpu(), square.cpu()) for name, (mean, square) in found.items()}
    for name, of in _grouped(links, "theirs").items():
        weights.parameters[name] = torch.cat([_linked_rows(link, own[link.ours], ppo) for link in of])
        if any(link.ours not in moments for link in of):  # a fixed std
            continue
        pairs = [[_linked_rows(link.of_moments(), moments[link.ours][k], ppo) for link in of] for k in (0, 1)]
        weights.moments[name] = (torch.cat(pairs[0]), torch.cat(pairs[1]))
    return weights


def _linked_rows(link: Link, value: Tensor, ppo: PPO) -> Tensor:
    if link.std is not None and not _same_number(link, ppo):
        log_std = log_std_of(ppo)(value)
        return log_std if link.std == "log" else log_std.exp()
    return value[slice(*link.our_rows)]


def torch_adam(weights: Weights, names: list[str], phase: str, config: OptimizerConfig) -> dict[str, Any]:
    """Return the state of `torch.optim.Adam` for these parameters, in this order."""
    progress = weights.optimizers[phase]
    state: dict[int, dict[str, Tensor]] = {}
    for i, name in enumerate(names):
        if name in weights.moments and progress.steps:
            mean, square = weights.moments[name]
            state[i] = {"step": torch.tensor(float(progress.steps)), "exp_avg": mean, "exp_avg_sq": square}
    switches = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
    group = {"lr": progress.learning_rate, "betas": config.betas, "eps": config.eps}
    group["weight_decay"] = config.weight_decay
    group |= dict.fromkeys(switches, False) | {"foreach": None, "fused": None, "params": list(range(len(names)))}
    return {"state": state, "param_groups": [group]}

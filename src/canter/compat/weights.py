"""Weights, statistics and optimizer state by the names of a source library.

`NetworkTensors` lists the tensors here that a file holds; its links pair them with the file's, in
both directions. A source library has one normalizer over all concatenated observations, Canter one
for each group; its optimizer stores moments by position, Canter's by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

StdOf = Literal["scalar", "log"]
"""Meaning of the source library's parameter: the standard deviation, or its logarithm."""
Moments = tuple[Tensor, Tensor]
"""Adam's running mean and square of a parameter's gradient."""
View = Callable[[Tensor], Tensor]
"""Returns the part of a tensor here that a tensor of the file holds, in the file's shape."""


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor itself."""
    return tensor


@dataclass(frozen=True)
class Link:
    """A parameter of the source library, or the next rows of one, and the one here, or a part of it."""

    theirs: str
    ours: str
    view: View = whole
    std: StdOf | None = None
    """For a standard deviation: the meaning of the source library's number."""


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
        given = state if isinstance(state, Mapping) and isinstance(state.get("state"), Mapping) else {"state": {}}
        steps = 0
        for position, name in enumerate(names):
            match given["state"].get(position):
                case {"exp_avg": Tensor() as mean, "exp_avg_sq": Tensor() as square, **entry}:
                    self.moments[name] = (mean, square)
                    steps = max(steps, int(entry.get("step", 0)))
        groups = given.get("param_groups") or [{}]
        rate = groups[0].get("lr") if isinstance(groups[0], Mapping) else None
        known = float(rate) if isinstance(rate, int | float | Tensor) else None
        self.optimizers[phase] = OptimizerProgress(steps, known)

    def torch_adam(self, names: list[str], phase: str, config: OptimizerConfig) -> dict[str, Any]:
        """Return the state of `torch.optim.Adam` for these parameters, in this order."""
        progress = self.optimizers[phase]
        state: dict[int, dict[str, Tensor]] = {}
        for i, name in enumerate(names):
            if name in self.moments and progress.steps:
                mean, square = self.moments[name]
                state[i] = {"step": torch.tensor(float(progress.steps)), "exp_avg": mean, "exp_avg_sq": square}
        switches = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
        group = {"lr": progress.learning_rate, "betas": config.betas, "eps": config.eps}
        group["weight_decay"] = config.weight_decay
        group |= dict.fromkeys(switches, False) | {"foreach": None, "fused": None, "params": list(range(len(names)))}
        return {"state": state, "param_groups": [group]}

    def check_names(self, links: Iterable[Link], of: tuple[str, ...] = ("",), spare: tuple[str, ...] = ()) -> None:
        """Raise ConfigError for a parameter without a link, if its name starts like `of` and not like `spare`."""
        known = {link.theirs for link in links}
        unknown = sorted(name for name in self.parameters if name.startswith(of) and name not in known)
        unknown = [name for name in unknown if not name.startswith(spare)]
        if unknown:
            raise ConfigError(f"the settings have no place for the file's {', '.join(unknown)}")


def network_of(part: nn.Module, role: str) -> Network:
    """Return the standard network of an actor or critic.

    Raise ConfigError for any other network.
    """
    network = part.network
    if not isinstance(network, Network):
        kind = type(network).__name__
        raise ConfigError(f"the {role}'s network is a {kind}: only a standard network can be exported")
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


def linear_links(theirs: str, ours: str, view: View = whole) -> list[Link]:
    """Return the links of the weight and bias of one layer."""
    return [Link(f"{theirs}.{name}", f"{ours}.{name}", view) for name in ("weight", "bias")]


@dataclass(frozen=True)
class NetworkTensors:
    """The tensors here that a file of the source library holds."""

    parameters: Mapping[str, Tensor]
    links: Sequence[Link]
    """In the order of the source library."""
    normalizers: Sequence[tuple[str, list[Normalizer]]] = ()
    """Role of the statistics, and the normalizers whose concatenated statistics they are."""
    groups: Mapping[str, Sequence[ParameterGroup]] = field(default_factory=dict)
    """Parameter groups of the optimizer of each phase."""
    log_std: LogStd | None = None
    """Parameterisation of the standard deviation, if a link is of one."""

    # theirs to ours

    def check(self, weights: Weights, *, strict: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Return views of the tensors here, each with its value in the file.

        Raise ConfigError for other names, shapes or statistics; without `strict`, tensors that the
        file lacks are left out.
        """
        unlinked = sorted(self.parameters.keys() - {link.ours for link in self.links})
        if unlinked and strict:
            raise ConfigError(f"the file has nothing for {', '.join(unlinked)}: it was made with other settings")
        values = self._values(self.parameters, weights.parameters, strict=strict)
        for k, own in enumerate(self._moments()):
            moments = {name: pair[k] for name, pair in weights.moments.items()}
            values += self._values(own, moments, strict=False, of_moments=True)
        for role, parts in self.normalizers:
            check_statistics(parts, weights.statistics.get(role), role)
        return values

    @torch.no_grad()
    def load(self, weights: Weights, *, strict: bool = True) -> None:
        """Load a file's weights, all or none: everything is checked first."""
        for view, value in self.check(weights, strict=strict):
            view.copy_(value)
        for role, parts in self.normalizers:
            set_statistics(parts, weights.statistics.get(role))
        loaded = self.groups.items() if weights.moments else ()
        for group, progress in ((g, weights.optimizers.get(phase)) for phase, groups in loaded for g in groups):
            if progress is not None:
                group.adam.step.fill_(progress.steps)
                if progress.learning_rate is not None:
                    group.learning_rate.fill_(progress.learning_rate)

    def _values(
        self, own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, strict: bool, of_moments: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []
        for name, links in self._by_name(own).items():
            here = ", ".join(link.ours for link in links)
            if name not in theirs and strict:
                raise ConfigError(f"the file has no {name}, which is {here} here: it was made with other settings")
            if name not in theirs:
                continue
            views = [torch.atleast_1d(link.view(own[link.ours])) for link in links]
            shape = (sum(len(view) for view in views), *views[0].shape[1:])
            value = torch.atleast_1d(theirs[name])
            if value.shape != shape:
                shapes = f"{tuple(value.shape)} in the file, {shape} by the settings"
                raise ConfigError(f"{name}: {shapes} ({here})")
            rows = value.split([len(view) for view in views])
            for link, view, part in zip(links, views, rows, strict=True):
                if of_moments and link.std is not None and link.std != self._std.form:
                    continue  # moments of another number
                found.append((view, part if of_moments else self._to_ours(link, part)))
        return found

    def _by_name(self, own: Mapping[str, Tensor]) -> dict[str, list[Link]]:
        """Return the links by the file's names, without those whose tensors are not among `own`."""
        named: dict[str, list[Link]] = {}
        for link in self.links:
            named.setdefault(link.theirs, []).append(link)
        return {name: links for name, links in named.items() if all(link.ours in own for link in links)}

    def _moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return Adam's running means and squares of the gradients, by the names here."""
        found: dict[str, Moments] = {}
        for groups in self.groups.values():
            for group in groups:
                found |= moments_in(group, self.parameters.items())
        return {name: pair[0] for name, pair in found.items()}, {name: pair[1] for name, pair in found.items()}

    @property
    def _std(self) -> LogStd:
        assert self.log_std is not None
        return self.log_std

    def _same_number(self, link: Link) -> bool:
        """Return True if both learn the same number; converting it back and forth would round it."""
        return link.std is None or (link.std == self._std.form and not self._std.floor)

    def _to_ours(self, link: Link, value: Tensor) -> Tensor:
        if link.std is None or (link.std == "log" and self._same_number(link)):
            return value
        std = value.exp() if link.std == "log" else value
        if not bool((std > self._std.floor).all()):
            floor = f"{self._std.floor:g}"
            raise ConfigError(f"a std of {std.min().item():g} in the file is not above {floor}: it died in training")
        return self._std.inverse(std)

    # ours to theirs

    @torch.no_grad()
    def take(self) -> Weights:
        """Return the weights by the source library's names, in the order of the links, on the CPU."""
        weights = Weights(parameters=self._joined(self.parameters))
        means, squares = (self._joined(own, of_moments=True) for own in self._moments())
        weights.moments = {name: (means[name], squares[name]) for name in means}
        weights.statistics = {role: found for role, parts in self.normalizers if (found := statistics_of(parts))}
        for phase, groups in self.groups.items():
            group = groups[-1]
            progress = OptimizerProgress(int(group.adam.step.item()), group.learning_rate.item())
            weights.optimizers[phase] = progress
        return weights

    def _joined(self, own: Mapping[str, Tensor], *, of_moments: bool = False) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for name, links in self._by_name(own).items():
            views = [torch.atleast_1d(link.view(own[link.ours])) for link in links]
            if not of_moments:
                views = [self._to_theirs(link, view) for link, view in zip(links, views, strict=True)]
            joined[name] = torch.cat(views).cpu()
        return joined

    def _to_theirs(self, link: Link, value: Tensor) -> Tensor:
        if self._same_number(link):
            return value
        log_std = self._std(value)
        return log_std if link.std == "log" else log_std.exp()


def tensors_of(
    ppo: PPO, links: Iterable[Link], parts: Iterable[str] = ("actor", "critic", "optimizer")
) -> NetworkTensors:
    """Return the tensors of some parts of PPO: the actor, the critic, and their optimizers."""
    parts = set(parts)
    fixed = {name: tensor for name, tensor in ppo.model.named_buffers() if name == "actor.head.raw_std"}
    learned = dict(ppo.model.named_parameters()) | fixed  # the source libraries save a fixed std too
    own = {name: tensor for name, tensor in learned.items() if _part_of(name) in parts}
    groups = {phase: [*optimizer.groups.values()] for phase, optimizer in ppo.optimizers.items()}
    head = ppo.model.actor.head
    normalizers = [("value", with_statistics([ppo.model.critic.head.normalizer]))]
    for role, part in (("actor", ppo.model.actor), ("critic", ppo.model.critic)):
        network = part.network if isinstance(part.network, WithHeads) else network_of(part, role)
        normalizers.append((role, with_statistics(network.normalizers)))
    return NetworkTensors(
        own,
        [link for link in links if link.ours in own],
        [pair for pair in normalizers if _part_of(pair[0]) in parts],
        groups if "optimizer" in parts else {},
        head.log_std if isinstance(head, GaussianHead) else None,
    )


def _part_of(name: str) -> str:
    return "actor" if name.partition(".")[0] == "actor" else "critic"


def with_statistics(normalizers: Iterable[Any]) -> list[Normalizer]:
    """Return the normalizers that have statistics."""
    return [each for each in normalizers if isinstance(each, Normalizer)]


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


def moments_in(group: ParameterGroup, named: Iterable[tuple[str, Tensor]]) -> dict[str, Moments]:
    """Return Adam's moments of a group's parameters by name, as views."""
    sizes = [parameter.numel() for parameter in group.parameters]
    rows = zip(group.parameters, group.adam.exp_avg.split(sizes), group.adam.exp_avg_sq.split(sizes), strict=True)
    found = {id(parameter): (mean.view_as(parameter), square.view_as(parameter)) for parameter, mean, square in rows}
    return {name: found[id(parameter)] for name, parameter in named if id(parameter) in found}


def statistics_of(parts: list[Normalizer]) -> Statistics | None:
    """Return the concatenated statistics of all normalizers of a network."""
    if not parts:
        return None
    count = parts[0].count.item()
    variance = [part.m2 / part.count if count else torch.ones_like(part.m2) for part in parts]
    mean = torch.cat([part.mean.reshape(-1) for part in parts]).cpu()
    return Statistics(mean, torch.cat([each.reshape(-1) for each in variance]).cpu(), count)

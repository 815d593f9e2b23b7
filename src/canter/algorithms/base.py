"""Which settings were changed, for those that have no part in a configuration.

What training needs of an algorithm, whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Annotated, Any, Protocol, TypeVar

import torch
from torch import Tensor

from canter.core.data.rollout import Rollout
from canter.core.plain import check_settings
from canter.core.registry import Registry
from canter.core.specs import EnvSpec, Symmetry
from canter.core.storage.validity import check_same_shape
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_copy_, tree_map
from canter.engines.choose import EngineName
from canter.nn.actor_critic import Policy

Rule = tuple[Any, str, str]
"""Whether it holds; the keys, with blanks between them, that then have no part; and why."""


def unused_lines(config: Any, rules: Iterable[Rule], prefix: str = "") -> list[str]:
    """A line for each setting that was changed and by a rule has no effect; `prefix` is of all keys."""
    return [
        f"algorithm.{path}={value} has no part here: {reason}"
        for holds, keys, reason in rules
        if holds
        for key in keys.split()
        for path, value in _changed_below(config, prefix + key)
    ]


def _changed_below(config: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every setting at or below a key that is not at its default."""
    *parents, last = key.split(".")
    owner = reduce(getattr, parents, config)
    value, default = getattr(owner, last), getattr(type(owner)(), last)
    if value == default:
        return
    if is_dataclass(value) and type(value) is type(default) and not _needed(value):
        for field in fields(value):
            yield from _changed_below(config, f"{key}.{field.name}")
    else:
        yield key, value


def _needed(settings: Any) -> bool:
    """Whether a setting among these has no default."""
    return any(field.default is MISSING and field.default_factory is MISSING for field in fields(settings))


RecordT = TypeVar("RecordT", bound=TensorStruct)


@dataclass(frozen=True)
class Headline:
    """A metric that people watch, with its names on consoles and in reports."""

    metric: str
    """Name in the log, or what the names of several begin with before a slash: `optim/learning_rate`."""
    label: str
    """Short name, for a table."""
    topic: str
    """What it is about; a table has a column for each topic. "" is for charts only."""
    title: str = ""
    """Name of its chart in a report; "" takes the label."""
    text: str = ""
    """What a report says about it."""
    floor: float = -math.inf
    """Where a chart is cut off below."""
    percent: bool = False
    """Whether it is a fraction, shown as a percentage."""
    line: str = ""
    """Name in the lines of a text console; "" leaves it out there."""
    block: str = ""
    """Name in the blocks of a verbose console; "" leaves it out there."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What an algorithm declares about itself to consoles, reports and counters, which name no algorithm."""

    headlines: tuple[Headline, ...] = ()
    """The metrics to show, in this order; without any, the first that it reports."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its own settings that a verbose console shows: name there -> key."""
    optimizer_steps: str = ""
    """The metric that counts the optimiser steps of an update."""
    counters: Mapping[str, str] = field(default_factory=dict)
    """Further metrics that count something: name -> title. A report shows the last value instead of a chart."""


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How an algorithm learns from a rollout, in numbers, as far as it wants them checked before a run."""

    horizon: int
    """Steps per rollout in each environment."""
    epochs: int = 1
    num_minibatches: int = 1
    drawn: int = 0
    """Rows of a minibatch that are drawn from what is remembered; 0 where a rollout is cut into minibatches."""
    warmup_steps: int = 0
    """Transitions before the first update."""
    gamma: float | None = None
    """None for an algorithm that is not known to discount."""
    gae_lambda: float = 1.0


class Algorithm(Protocol[RecordT]):
    """Chooses actions and learns from rollouts. A class that inherits from this one gets the defaults."""

    horizon: int
    """Steps per rollout."""
    sequence_length: int = 1
    """Steps of one sequence; the policy's memory is kept at the start of each. 1 without memory."""
    policy: Policy
    """Inference view of what is being learned: what is judged, shown and saved."""
    pace: int = 1
    """Iterations that count as one where settings say how often the log and checkpoints are written; above 1 where an
    iteration is short."""
    grows: tuple[str, ...] = ()
    """Parts of `state_dict` whose size is that of what was collected so far; they check it themselves."""
    stage: Any = None
    """What the host has decided about this iteration; each stage has CUDA graphs of its own."""
    reads_reset: bool = True
    """Whether `act` reads `reset`; where it does not, that is found out for a whole rollout at once, afterwards."""
    shares_rows: bool = False
    """Whether a wide network's update is worth several threads on a CPU however short a rollout is."""
    streams: tuple[str, ...] = ()
    """Names of the attributes that are random streams, `torch.Generator`; their states are saved by these names."""

    @property
    def acting(self) -> Policy:
        """The policy that acts in training and learns, and takes weights of others; `policy` may be its mean."""
        return self.policy

    def empty_record(self) -> RecordT:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        ...

    def begin_iteration(self) -> None:
        """Called on the host before each rollout, also where rollout and update are replayed as CUDA graphs."""

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, RecordT, State]:
        """Actions for the environment, what to remember of this step `[N, ...]`, and the next state.

        `reset` `[N]` marks environments that begin a new episode with this observation.
        """
        ...

    def update(self, rollout: Rollout[RecordT]) -> Metrics:
        """Learn from one rollout."""
        ...

    def generators(self) -> list[torch.Generator]:
        """The random streams that `act` and `update` draw from."""
        return [getattr(self, name) for name in self.streams]

    def use_engine(self, name: EngineName) -> None:
        """Compute by this engine from now on; raises ValueError where it cannot. Called before anything is learned."""
        if name not in ("auto", "autograd"):
            raise ValueError(f"execution.engine={name}: this algorithm has no engines; use auto")

    def set_progress(self, fraction: float | Tensor) -> None:
        """Tell how much of the run is done, 0..1, before each update; schedules follow it.

        Between two rows of the log it is a 0-d tensor on the device, as the host has not read it.
        """

    def about(self) -> dict[str, Any]:
        """What was decided when it was built, as plain data for `run.json`, such as the engine that computes it."""
        return {}

    def artefacts(self) -> dict[str, Callable[..., None]]:
        """Files that it leaves at the end of a run beside the policy: name -> function that writes one to a path.

        Called as `write(path, env_steps=..., return_=..., lta=...)`, see `canter.nn.policy_file.save_policy`.
        """
        return {}

    def living(self) -> Any:
        """The tensors of `state_dict` where they live, at addresses that stay, as a tree; None where that is not known.

        On a GPU, where the host learns of a NaN only after the update, they are copied there before each one. Without
        them the host looks at every rollout before the update, which waits for the device.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on: copies of what is `living`, and the random states."""
        random = {name: getattr(self, name).get_state() for name in self.streams}
        return tree_map(torch.clone, self.living()) | random

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        living = self.living()
        check_same_shape("the state of the algorithm", {name: state[name] for name in living}, living)
        tree_copy_(living, state)
        for name in self.streams:
            getattr(self, name).set_state(state[name])


class AlgorithmConfig(Protocol):
    """Frozen settings that build an algorithm.

    They may have four members more: `declared`, a class attribute (`Declared`), and methods: `plan() -> RolloutPlan`,
    `unused(spec) -> list[str]`, a line for each setting that was changed and has no part in a configuration, and
    `symmetries(spec) -> tuple[Symmetry, ...]`, those of the environment that it relies on.
    """

    @property
    def horizon(self) -> int:
        """Steps per rollout."""
        ...

    def build(self, spec: EnvSpec, seed: int) -> Algorithm[Any]:
        """The algorithm for an environment, on the environment's device."""
        ...


algorithms: Registry[type[AlgorithmConfig]] = Registry("algorithm", check_settings, default="ppo")
"""Settings of algorithms by the name that `kind` has in settings files."""

AnyAlgorithmConfig = Annotated[Any, algorithms]
"""Any of them. Not typed, so that `dataclasses.replace(config.algorithm, gamma=0.9)` needs no cast first."""


def title_of(config: AlgorithmConfig) -> str:
    """An algorithm's name for people: that of its settings' class."""
    return type(config).__name__.removesuffix("Config")


def plan_of(config: AlgorithmConfig) -> RolloutPlan:
    """How an algorithm learns from a rollout, as far as its settings tell."""
    return getattr(config, "plan", lambda: RolloutPlan(horizon=config.horizon))()


def unused_by(config: AlgorithmConfig, spec: EnvSpec) -> list[str]:
    """A line for each setting that was changed and has no part in this configuration."""
    return getattr(config, "unused", lambda spec: [])(spec)


def symmetries_of(config: Any, spec: EnvSpec) -> tuple[Symmetry, ...]:
    """Symmetries of an environment that an algorithm makes use of, to be proven before a run."""
    return getattr(config, "symmetries", lambda spec: ())(spec)


def declared_by(config: Any) -> Declared:
    """What an algorithm declares, by its settings or their class; nothing where they have no such member."""
    return getattr(config, "declared", Declared())


def declared_under(kind: Any) -> Declared:
    """What the algorithm of that name in settings files declares; nothing for a name that is not registered here."""
    kind = algorithms.default if kind is None else kind
    return declared_by(algorithms[kind]) if isinstance(kind, str) and kind in algorithms else Declared()

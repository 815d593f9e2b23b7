"""The protocol between an algorithm and what is around it: loop, checks, consoles and reports.

An algorithm acts, learns from rollouts and saves its state. Its settings (`AlgorithmConfig`) build
it and may describe it further: how it uses a rollout (`RolloutPlan`), which metrics to show
(`ReportSpec`), which settings have no effect. Nothing outside `canter.algorithms` names an
algorithm or one of its metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Annotated, Any, Protocol, TypeVar

import torch
from torch import Tensor

from canter.algorithms.doctor.findings import Rules
from canter.core.data.rollout import Rollout
from canter.core.declarations import Symmetry
from canter.core.plain import check_settings
from canter.core.registry import Registry, UserError
from canter.core.specs import Env, EnvSpec
from canter.core.storage.validity import check_same_shape
from canter.core.struct import Metrics, Obs, State, TensorStruct, tree_copy_, tree_map
from canter.engines.choose import EngineName
from canter.nn.actor_critic import Policy

RecordT = TypeVar("RecordT", bound=TensorStruct)


class Algorithm(Protocol[RecordT]):
    """Chooses actions and learns from rollouts. Inherit from this class to get the defaults."""

    horizon: int
    """Steps per rollout."""
    sequence_length: int = 1
    """Steps per sequence; the recurrent state is stored at the start of each. 1 for feed-forward
    policies."""
    policy: Policy
    """Inference view of the policy that is evaluated, shown and saved."""
    iterations_per_tick: int = 1
    """Iterations that count as one for `log_every` and `save_every`; above 1 for algorithms with
    short iterations."""
    variable_size_keys: tuple[str, ...] = ()
    """Keys of `state_dict` whose size depends on the data collected so far; the algorithm checks
    them itself."""
    stage: Any = None
    """Decisions of the host about this iteration; every stage is captured in CUDA graphs of its
    own."""
    reads_reset: bool = True
    """`act` reads `reset`. Otherwise the collector computes the resets of a whole rollout at once,
    afterwards."""
    multithreaded_update: bool = False
    """Use several CPU threads for the update of wide networks, however short the rollouts."""
    progress: Any = None
    """Completed fraction of the run, 0-d on the device; None for an algorithm without schedules."""
    streams: tuple[str, ...] = ()
    """Attributes that are random streams (`torch.Generator`); their states are saved under these
    names."""

    @property
    def acting(self) -> Policy:
        """Policy that acts and learns; `policy` may be its running mean."""
        return self.policy

    def prepare_env(self, env: Env) -> None:
        """Prepare the environment for this algorithm, before its first reset."""

    def empty_record(self) -> RecordT:
        """Return a record `[N, ...]` of the right shapes and dtypes, as a template for buffers."""
        ...

    def begin_iteration(self) -> None:
        """Prepare an iteration on the host, before its rollout, even if CUDA graphs replay it."""

    def act(self, obs: Obs, state: State, reset: Tensor) -> tuple[Tensor, RecordT, State]:
        """Return actions for the environment, the record `[N, ...]` and the next recurrent state.

        `reset` `[N]` marks environments that begin a new episode with this observation.
        """
        ...

    def update(self, rollout: Rollout[RecordT]) -> Metrics:
        """Learn from one rollout and return the metrics."""
        ...

    def compile_rollout(self, env: Env) -> Callable[[Rollout[RecordT]], Metrics]:
        """Return a function that fills whole rollouts in one program of the environment.

        It returns the simulator's metrics `[T]`. Raises UserError if environment or policy cannot.
        """
        raise UserError(f"execution.mode=scan is for PPO, not for {type(self).__name__}: set execution.mode=auto")

    def generators(self) -> list[torch.Generator]:
        """Return the random streams that `act` and `update` draw from."""
        return [getattr(self, name) for name in self.streams]

    def signals(self, rollout: Rollout[RecordT]) -> Metrics:
        """Return signals of a rollout before it is learned from; the log names them `doctor/...`.

        Called in a few iterations of a run, with the first environments of the rollout; it changes nothing, draws no
        random numbers and computes no gradients.
        """
        return {}

    def use_engine(self, name: EngineName) -> None:
        """Compute with this engine from now on; raise ValueError if it cannot.

        Called before anything is learned.
        """
        if name not in ("auto", "autograd", "plain"):
            raise UserError(f"execution.engine={name}: this algorithm has no engines; use auto")

    def set_progress(self, fraction: float | Tensor) -> None:
        """Set the completed fraction of the run, 0..1, before each update, for schedules.

        Between two rows of the log it is a 0-d tensor on the device, since the host has not read
        it.
        """
        if self.progress is not None:
            self.progress.fill_(fraction)

    def about(self) -> dict[str, Any]:
        """Return decisions of the constructor, such as the engine, as plain data for `run.json`."""
        return {}

    def artefacts(self) -> dict[str, Callable[..., None]]:
        """Return the files to save in addition to the policy at the end of a run: name -> writer.

        Called as `write(path, env_steps=..., return_=..., lta=...)`, see
        `canter.nn.policy_file.save_policy`.
        """
        return {}

    def state_tensors(self) -> Any:
        """Return the live tensors of `state_dict` as a tree; None if unknown.

        They keep their addresses. On a GPU, where the host learns of a NaN only after the update,
        they are copied before each update, so that it can be rolled back. Without them the host
        checks every rollout before the update, which waits for the device.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of `state_tensors`, and the random states."""
        random = {name: getattr(self, name).get_state() for name in self.streams}
        return tree_map(torch.clone, self.state_tensors()) | random

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state into the live tensors; they keep their addresses."""
        tensors = self.state_tensors()
        check_same_shape("the state of the algorithm", {name: state[name] for name in tensors}, tensors)
        tree_copy_(tensors, state)
        for name in self.streams:
            getattr(self, name).set_state(state[name])


class AlgorithmConfig(Protocol):
    """Frozen settings that build an algorithm.

    Any dataclass with these two members will do, without a base class. Five more members are
    optional; the functions at the end of this file read them:

    - `report_spec`, a class attribute: `ReportSpec`
    - `search_space`, a class attribute: the default ranges of `canter tune`, by setting
    - `plan() -> RolloutPlan`
    - `unused(spec) -> list[str]`: a line for each changed setting that has no effect
    - `symmetries(spec) -> tuple[Symmetry, ...]`: the symmetries of the environment that the
      algorithm relies on
    """

    @property
    def horizon(self) -> int:
        """Steps per rollout."""
        ...

    def build(self, spec: EnvSpec, seed: int) -> Algorithm[Any]:
        """Return the algorithm for an environment, on the environment's device."""
        ...


algorithms: Registry[type[AlgorithmConfig]] = Registry("algorithm", check_settings, default="ppo")
"""Settings of algorithms by their `kind` in settings files."""

AnyAlgorithmConfig = Annotated[Any, algorithms]
"""Settings of any algorithm. Untyped, so that `dataclasses.replace(config.algorithm, gamma=0.9)`
needs no cast."""


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How an algorithm uses a rollout, in numbers that are checked before a run."""

    horizon: int
    """Steps per rollout in each environment."""
    epochs: int = 1
    num_minibatches: int = 1
    updates_per_transition: float | None = None
    """Updates for each transition of a rollout, if their number follows from that; None if it is
    `epochs` times `num_minibatches`."""
    drawn: int = 0
    """Minibatch size if minibatches are drawn from a replay buffer; 0 if the rollout is split into
    minibatches."""
    warmup_steps: int = 0
    """Transitions before the first update."""
    gamma: float | None = None
    """Discount; None if unknown."""
    gae_lambda: float = 1.0


@dataclass(frozen=True)
class Headline:
    """A metric to show prominently, with its names on consoles and in reports."""

    metric: str
    """Name in the log, or the part before a slash shared by several: `optim/learning_rate`."""
    label: str
    """Short name, for tables."""
    topic: str
    """Column of the table that it belongs to, such as "policy"; "" shows the metric in charts
    only."""
    title: str = ""
    """Title of its chart in a report; "" takes the label."""
    text: str = ""
    """Explanation below the chart."""
    floor: float = -math.inf
    """Lower cut-off of the chart."""
    percent: bool = False
    """Show a fraction as a percentage."""
    line: str = ""
    """Name in the lines of a text console; "" omits it there."""
    block: str = ""
    """Name in the blocks of a verbose console; "" omits it there."""


@dataclass(frozen=True, kw_only=True)
class ReportSpec:
    """How consoles and reports show an algorithm, so that they need not know any."""

    headlines: tuple[Headline, ...] = ()
    """Metrics to show, in this order; if empty, the first ones that the algorithm reports."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the algorithm on a verbose console: name there -> key."""
    optimizer_steps: str = ""
    """Metric that counts the optimiser steps of an update."""
    counters: Mapping[str, str] = field(default_factory=dict)
    """Further counting metrics: name -> title. A report shows their last value instead of a
    chart."""
    rules: tuple[Rules, ...] = ()
    """Rules of `canter doctor`, in addition to those of every task."""


# Users' settings need no base class (see AlgorithmConfig), hence getattr.


def title_of(config: AlgorithmConfig) -> str:
    """Return the name of an algorithm for people: the class of its settings without "Config"."""
    return type(config).__name__.removesuffix("Config")


def plan_of(config: AlgorithmConfig) -> RolloutPlan:
    """Return how an algorithm uses a rollout, as far as its settings tell."""
    return getattr(config, "plan", lambda: RolloutPlan(horizon=config.horizon))()


def unused_settings_of(config: AlgorithmConfig, spec: EnvSpec) -> list[str]:
    """Return a line for each changed setting that has no effect in this configuration."""
    return getattr(config, "unused", lambda spec: [])(spec)


def symmetries_of(config: Any, spec: EnvSpec) -> tuple[Symmetry, ...]:
    """Return the symmetries of an environment that an algorithm relies on, for a test of them."""
    return getattr(config, "symmetries", lambda spec: ())(spec)


def report_spec_of(config: Any) -> ReportSpec:
    """Return how to show an algorithm, by its settings or their class."""
    return getattr(config, "report_spec", ReportSpec())


def search_space_of(config: Any) -> Mapping[str, str]:
    """Return the default ranges of a search by setting; a number with x is a multiple of its value."""
    return getattr(config, "search_space", {})


def report_spec_for(kind: Any) -> ReportSpec:
    """Return how to show the algorithm of this `kind`; an empty `ReportSpec` if it is unknown."""
    kind = algorithms.default if kind is None else kind
    known = isinstance(kind, str) and kind in algorithms
    return report_spec_of(algorithms[kind]) if known else ReportSpec()


UnusedIf = tuple[Any, str, str]
"""A condition, the keys (separated by blanks) that have no effect if it holds, and the reason."""


def unused_lines(config: Any, rules: Iterable[UnusedIf], prefix: str = "") -> list[str]:
    """Return a line for each changed setting that has no effect; `prefix` is added to all keys."""
    return [
        f"algorithm.{path}={value} has no effect here: {reason}"
        for holds, keys, reason in rules
        if holds
        for key in keys.split()
        for path, value in _changed_below(config, prefix + key)
    ]


def _changed_below(config: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every setting at or below `key` that differs from its default."""
    *parents, last = key.split(".")
    owner = reduce(getattr, parents, config)
    value = getattr(owner, last)
    default = getattr(type(owner)(), last)
    if value == default:
        return
    if is_dataclass(value) and type(value) is type(default) and not _has_required_field(value):
        for setting in fields(value):
            yield from _changed_below(config, f"{key}.{setting.name}")
    else:
        yield key, value


def _has_required_field(settings: Any) -> bool:
    return any(field.default is MISSING and field.default_factory is MISSING for field in fields(settings))

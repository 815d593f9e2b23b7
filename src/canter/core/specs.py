"""The contract between environments and everything that learns from them.

N is the number of parallel environments. Adapters translate every simulator into this contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from canter.core.declarations import MotionSpec, OwnArrays, Symmetry
from canter.core.interface import Interface
from canter.core.registry import UserError
from canter.core.struct import Obs, TensorStruct

ACTION_MASK = "action_mask"
"""Name of the observation group with the mask of discrete actions (True: allowed)."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape of a tensor for one environment (without the N axis) and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Continuous:
    """Real action vector `[N, A]` float32; bounds may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def dim(self) -> int:
        """A, the number of action components."""
        return len(self.low)

    @property
    def bounded(self) -> bool:
        """Every component has two finite bounds."""
        return all(math.isfinite(bound) for bound in (*self.low, *self.high))


@dataclass(frozen=True)
class Discrete:
    """One of `n` discrete actions: `[N]` int64 in 0..n-1. An action mask has shape `[N, n]`."""

    n: int

    @property
    def nvec(self) -> tuple[int, ...]:
        """Number of options as in `MultiDiscrete`: a tuple of one number."""
        return (self.n,)


@dataclass(frozen=True)
class MultiDiscrete:
    """K discrete actions at once: `[N, K]` int64. An action mask has shape `[N, sum(nvec)]`."""

    nvec: tuple[int, ...]


ActionSpec = Continuous | Discrete | MultiDiscrete


FinalObs = Literal["separate", "in_place", "unknown"]
"""Location of the true last observation of an episode; see `EnvSpec`."""
LOST_FINAL_OBS = (
    "the simulator loses the last observation of an episode (final_obs: unknown), so a truncated episode is "
    "bootstrapped from the value of the observation before it"
)
"""Consequence of `unknown` for learning, as the log and `canter check` show it."""


@dataclass(frozen=True)
class EnvSpec:
    """Observations, actions and conventions of an environment.

    `final_obs` says where the true last observation of an episode is. "separate": in
    `Step.final_obs`, while `Step.obs` already belongs to the next episode. "in_place": in
    `Step.obs`, and the following step is a filler (`Step.valid` False) that performs the reset.
    "unknown": nowhere, because the simulator resets within the step and shows only the next
    episode; a truncated episode is then bootstrapped from the observation before its last step.

    `truncates` is True if episodes are cut by a limit that is not part of the task (a time limit, a
    continuing task), False if they never are, None if that is not known.

    With several agents per world each agent counts as an environment: N = worlds x `num_agents`,
    and the index is `world * num_agents + agent`. An agent whose episode ended before its world's
    is not valid until the world resets.
    """

    obs: dict[str, TensorSpec]
    action: ActionSpec
    num_envs: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    final_obs: FinalObs = "separate"
    truncates: bool | None = None
    env_id: str = ""
    num_agents: int = 1
    durations: bool | None = None
    """`Step.info` holds the simulated duration of steps; None if that is not known."""
    symmetries: tuple[Symmetry, ...] = ()
    """Symmetries of the task, for the extension `symmetry`."""
    motion: MotionSpec | None = None
    """Observations of motion clips, for the extension `amp`."""
    own_arrays: OwnArrays = field(default_factory=OwnArrays)
    """Differences between these tensors and the arrays of the environment's own spaces, for
    `Policy.predict` and exported policies."""
    interface: Interface = field(default_factory=Interface)
    """Names, units and scaling of observations and actions, for the contract of exported policies."""

    def __post_init__(self) -> None:
        """Raise UserError for an unknown `final_obs`, and for an interface of other sizes."""
        if self.final_obs not in get_args(FinalObs):
            raise UserError(f"final_obs={self.final_obs!r} must be one of {', '.join(get_args(FinalObs))}")
        actions = self.action.dim if isinstance(self.action, Continuous) else sum(self.action.nvec)
        self.interface.check({name: math.prod(group.shape) for name, group in self.obs.items()}, actions)


@dataclass
class Step(TensorStruct):
    """Result of one step of N environments; all tensors are on the environment's device.

    The tensors may be the environment's own buffers, which the next step overwrites: copy what must
    last.
    """

    obs: Obs
    """Observation to act on next, groups of `[N, ...]`."""
    reward: Tensor
    """`[N]` float32."""
    terminated: Tensor
    """`[N]` bool: the task ended; nothing follows. Takes precedence over `truncated`."""
    truncated: Tensor
    """`[N]` bool: the episode was cut; the value of the true last observation follows. Never True
    with `terminated`."""
    valid: Tensor
    """`[N]` bool: False for a step that is no transition to learn from (a reset step)."""
    final_obs: Obs | None = None
    """True last observations of the environments whose episode ended, if the spec says "separate";
    arbitrary for the others. None if no episode ended in this step, and always if the spec says
    otherwise."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """Further `[N]` tensors, e.g. `duration`, the time that this step took in the simulated
    world."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Values that the simulator reports about this step, 0-d by name, e.g. the mean of a reward
    term; logged as `env/<name>`, averaged over the steps of a rollout that report it. NaN or a
    missing entry reports nothing. Names may appear later, but an environment whose steps are
    captured in a CUDA graph must report the same ones every step."""

    def restarts(self, final_obs: FinalObs) -> Tensor:
        """Return `[N]` bool: `obs` is the first one of an episode; see `episode_starts`."""
        return episode_starts(self.valid, self.terminated, self.truncated, final_obs)


def episode_starts(
    valid: Tensor, terminated: Tensor, truncated: Tensor, final_obs: FinalObs, out: Tensor | None = None
) -> Tensor:
    """Return whether the observation after a step starts an episode, or belongs to none.

    It belongs to none after a step that is not valid. All tensors are `[..., N]` bool; `final_obs`
    is the spec's: "in_place", the observation after the end of an episode still belongs to that
    episode.
    """
    starts = torch.logical_not(valid, out=out)
    return starts if final_obs == "in_place" else starts.logical_or_(terminated).logical_or_(truncated)


@runtime_checkable
class Env(Protocol):
    """N environments stepped together.

    Further abilities are optional and declared by the protocols below: `Stateful`,
    `PartiallyStateful`, `SnapshotState`, `SeedsByRow`, `DeclaresCleanReset`, `ProgressListener`,
    `Capturable`, `Observable`, `DescribesStep`, `SharesCores`, and `MetricSource` and
    `CompilesRollouts` of `canter.core.declarations`.
    """

    @property
    def spec(self) -> EnvSpec:
        """Shapes, dtypes, bounds and conventions."""
        ...

    def reset(self, seed: int | None = None) -> Obs:
        """Start an episode in every environment, reproducibly with a seed; return observations.

        Each rank passes another seed, unless the environment is `SeedsByRow`.
        """
        ...

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment: `[N, A]` float32, `[N]` int64 or `[N, K]` int64."""
        ...

    def close(self) -> None:
        """Free what the environment holds (processes, windows); calling it twice is allowed."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored: an algorithm, a run, an environment.

    Restoring continues bit for bit. An environment that saves only a part of its state is
    `PartiallyStateful`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the future depends on, or the part that outlives episodes.

        Raises `NotImplementedError` if the state cannot be saved after all.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        ...


@runtime_checkable
class PartiallyStateful(Stateful, Protocol):
    """Optional for an environment that saves a part of its state, such as a curriculum's counter.

    When a run resumes, the part is loaded, then `reset` restarts all episodes and must leave the
    part as it is.
    """

    resumes: Literal["partial", "exact"]
    """"partial" for such an environment; "exact", the default without this attribute, for the
    complete state."""


@runtime_checkable
class SnapshotState(Stateful, Protocol):
    """Optional for an environment whose `state_dict` is slow: it is copied before every rollout."""

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Copy the state; return a function that makes the result of `state_dict` of the copy."""
        ...


@runtime_checkable
class SeedsByRow(Protocol):
    """Optional for an environment that seeds by the index among the environments of all ranks.

    It draws with `canter.core.seeding.draw_for_rank` and receives the same seed on every rank.
    """

    seeds_by_row: bool


@runtime_checkable
class DeclaresCleanReset(Protocol):
    """Optional for an environment that is not `Stateful` but whose reset leaves no trace."""

    @property
    def reset_is_clean(self) -> bool:
        """`reset(seed)` now restores the state of a new environment."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """Progress of a run, as environments receive it."""

    iteration: int
    """Completed iterations."""
    env_steps: int
    """Steps of all environments so far, including those not yet checked for validity."""
    fraction: float | None
    """Completed fraction of the budget, 0..1; None for a run without a budget."""


@runtime_checkable
class ProgressListener(Protocol):
    """Optional for an environment that follows the progress of training, as a curriculum does.

    A step that is captured in a CUDA graph sees only what is written in place to tensors of the
    environment.
    """

    def set_progress(self, progress: TrainingProgress) -> None:
        """Receive the progress; called before every rollout."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """Optional for an environment whose `step` may be captured in a CUDA graph.

    Such a step uses only its device, static shapes, and state at fixed addresses.
    """

    def generators(self) -> list[torch.Generator]:
        """Return the random generators that a step draws from."""
        ...


@runtime_checkable
class Observable(Protocol):
    """Optional for a `Stateful` environment: it shows observations without a step.

    The environment check needs it to verify symmetries.
    """

    def observe(self) -> Obs:
        """Return the observations of the current state."""
        ...


@runtime_checkable
class DescribesStep(Protocol):
    """Optional for an environment that can step in several ways."""

    def about(self) -> str:
        """Return how it steps and why, as `canter check` shows it."""
        ...


@runtime_checkable
class SharesCores(Protocol):
    """Optional for an environment whose steps could be shared with other processes."""

    @property
    def idle_cores(self) -> int:
        """Cores that could step environments and do not."""
        ...


def resumes_exactly(env: Any) -> bool:
    """Return whether a `Stateful` environment saves its complete state."""
    return not isinstance(env, PartiallyStateful) or env.resumes == "exact"


def seeds_by_row(env: Any) -> bool:
    """Return whether an environment expects the same seed on every rank; see `SeedsByRow`."""
    return isinstance(env, SeedsByRow) and env.seeds_by_row


def reset_is_clean(env: Env) -> bool:
    """Return whether `reset(seed)` leaves no trace of earlier episodes.

    The environment can then be reused for the check, the run and the evaluation.

    True if the complete state can be saved, because it is then known, or if the environment
    declares it. Any other may keep something over a reset, such as the statistics of a wrapper. The
    environment must have been reset before.
    """
    if isinstance(env, Stateful) and resumes_exactly(env):
        with suppress(NotImplementedError):
            env.state_dict()
            return True
    return isinstance(env, DeclaresCleanReset) and bool(env.reset_is_clean)


def report_progress(env: Env, progress: TrainingProgress) -> None:
    """Pass the progress to the environment, or to the outermost one inside it that listens."""
    inner: Any = env
    while inner is not None and not isinstance(inner, ProgressListener):
        inner = getattr(inner, "env", None)  # wrappers, also those of users, keep what they wrap as `env`
    if inner is not None:
        inner.set_progress(progress)


class UnsupportedSpace(UserError):
    """An observation or action space that no policy supports; the message says which and why."""


class ContractBroken(UserError):
    """An environment violated this contract; the message says how."""


class TerminationRequested(SystemExit):
    """A signal ends the program at once; a plain `SystemExit` of an environment is its error."""


INTERRUPTS = (KeyboardInterrupt, TerminationRequested)
"""Exceptions raised in an environment's code that are not its error; every other one is."""


class EnvFailed(RuntimeError):
    """A failure that only an environment's adapter can detect, such as the death of its process."""

    def __init__(self, message: str, row: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.row = row
        """Index of the environment; None if unknown."""
        self.trace = trace
        """Traceback of another process; empty without one."""

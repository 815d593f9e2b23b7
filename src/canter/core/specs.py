"""The contract between environments and everything that learns from them.

N is the number of parallel environments. Adapters translate every simulator into this contract, so that nothing
above them ever asks which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from canter.core.space_arrays import OwnArrays
from canter.core.struct import Obs, TensorStruct

ACTION_MASK = "action_mask"
"""The observation group that says which discrete actions are allowed (True) now."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape of one environment's row (no N axis) and dtype of a tensor."""

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
        """Whether every component has two finite bounds."""
        return all(math.isfinite(bound) for bound in (*self.low, *self.high))


@dataclass(frozen=True)
class Discrete:
    """One choice among `n`: action `[N]` int64 in 0..n-1. An action mask has shape `[N, n]`."""

    n: int

    @property
    def nvec(self) -> tuple[int, ...]:
        """As a `MultiDiscrete` of one choice has it."""
        return (self.n,)


@dataclass(frozen=True)
class MultiDiscrete:
    """K simultaneous choices: action `[N, K]` int64. An action mask has shape `[N, sum(nvec)]`."""

    nvec: tuple[int, ...]


ActionSpec = Continuous | Discrete | MultiDiscrete


@dataclass(frozen=True)
class Mirror:
    """A signed permutation of a vector: component i becomes `sign[i]` times component `order[i]`.

    Of choices it is a permutation of all that there are: `sign` is 1 throughout, and choice i takes the place of
    `order[i]`.
    """

    sign: tuple[int, ...]
    order: tuple[int, ...] = ()
    """No entries: every component stays in its place."""

    def __post_init__(self) -> None:
        """Refuse what is no signed permutation, by its component."""
        object.__setattr__(self, "order", tuple(self.order) or tuple(range(len(self.sign))))
        if wrong := [i for i, sign in enumerate(self.sign) if sign not in (1, -1)]:
            raise ValueError(f"sign[{wrong[0]}]={self.sign[wrong[0]]} must be 1 or -1")
        if sorted(self.order) != list(range(len(self.sign))):
            missing = sorted(set(range(len(self.sign))) - set(self.order))
            which = f"component {missing[0]} is missing" if missing else f"there are {len(self.sign)} signs"
            raise ValueError(f"order={self.order} must name each component once: {which}")

    @staticmethod
    def of(signs: str, order: tuple[int, ...] = ()) -> Mirror:
        """From a string of + and -; blanks are for the eye."""
        return Mirror(tuple(1 if sign == "+" else -1 for sign in signs if sign in "+-"), order)

    def __call__(self, x: Tensor) -> Tensor:
        """The mirrored vectors `[..., D]`, for a look at them; the constants come from the host."""
        return x[..., list(self.order)] * x.new_tensor(self.sign)


AnyMirror = Mirror | Callable[[Tensor], Tensor]
"""A signed permutation, or any function of tensors `[..., D]` that undoes itself."""


@dataclass(frozen=True)
class Symmetry:
    """A way to mirror the world that its dynamics and rewards do not notice, such as left and right of a robot."""

    name: str
    obs: Mapping[str, AnyMirror]
    """What becomes of each observation group."""
    action: AnyMirror
    """What becomes of an action, as the environment receives it."""
    state: Mapping[str, AnyMirror] = field(default_factory=dict)
    """What becomes of each tensor `[N, D]` of the environment's own state; with it the declaration can be proven."""


@dataclass(frozen=True)
class MotionSpec:
    """How frames of a motion clip look to an environment, for extensions that imitate."""

    time_step: float
    """Seconds from one observation to the next."""
    observe: Mapping[str, Callable[[dict[str, Tensor]], Tensor]]
    """For observation groups: what frames, fields of `canter.core.data.motion` by name, look like, `[..., D]`."""
    joints: tuple[str, ...] = ()
    """Names of the joints, in the order in which `observe` takes them; empty for that of the clip."""
    bodies: tuple[str, ...] = ()
    """Those of the bodies."""
    pose: tuple[int, ...] = ()
    """Components of the observation that are angles of joints, for the pose error; empty takes all components."""


FinalObs = Literal["separate", "in_place", "unknown"]
"""Where the true last observation of an episode is found; see `EnvSpec`."""
LOST_FINAL_OBS = (
    "the simulator loses the last observation of an episode (final_obs: unknown), so where one is cut off, the value "
    "of the observation before it stands for what would have followed"
)
"""What `unknown` means for learning, in the words of the log and of `canter check`."""


@dataclass(frozen=True)
class EnvSpec:
    """What an environment shows and accepts.

    `final_obs` tells where the true last observation of an episode is found. "separate": in `Step.final_obs`, while
    `Step.obs` already belongs to the next episode. "in_place": in `Step.obs`, and the following step is a filler row
    (`Step.valid` False) that performs the reset. "unknown": nowhere, as the simulator resets within the step and shows
    the next episode only; a truncated episode is then valued by the observation before its last step.

    `truncates` is True when episodes are cut by a limit that is not part of the task (a time limit, a continuing
    task), False when they never are, None when nobody knows.

    With several agents to a world every agent is a row, so N = worlds x `num_agents`: row `world * num_agents + agent`.
    An agent whose episode ended while its world goes on has rows that are not valid until the world begins anew.
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
    """Whether `Step.info` tells how long steps take; None when nobody knows."""
    symmetries: tuple[Symmetry, ...] = ()
    """Ways to mirror the world that make no difference to it, for the extension `symmetry`."""
    motion: MotionSpec | None = None
    """How motion clips look to it, for the extension `amp`."""
    own_arrays: OwnArrays = field(default_factory=OwnArrays)
    """How observations and actions look in the environment's own spaces, where that is otherwise: for `Policy.predict`
    and for who uses an exported file."""

    def __post_init__(self) -> None:
        """Refuse a misspelt `final_obs`, which decides what is learned at the end of an episode."""
        if self.final_obs not in get_args(FinalObs):
            raise ValueError(f"final_obs={self.final_obs!r} must be one of {', '.join(get_args(FinalObs))}")


@dataclass
class Step(TensorStruct):
    """What one step of N environments gives; all tensors on the environment's device.

    The tensors may be the environment's own buffers, overwritten by the next step: copy what must last.
    """

    obs: Obs
    """Observation to act on next, groups of `[N, ...]`."""
    reward: Tensor
    """`[N]` float32."""
    terminated: Tensor
    """`[N]` bool: the task ended; nothing follows. Wins over `truncated` when both hold."""
    truncated: Tensor
    """`[N]` bool: the episode was cut; the value of the true last observation follows. Never True with `terminated`."""
    valid: Tensor
    """`[N]` bool: False where this row is no transition of the task (a reset row) and must not be learned from."""
    final_obs: Obs | None = None
    """True last observations in rows that ended, when the spec says "separate"; other rows are arbitrary. None when no
    row ended in this step, and always with the other two."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """Further `[N]` tensors, e.g. `duration`, the time that this step took in the simulated world."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """What the simulator itself reports of this step, 0-d by name, e.g. the mean of a term of the reward; logged as
    `env/<name>`, a mean over the steps of a rollout that reported it. NaN, or no entry, reports nothing. The names are
    learned as they come; an environment whose steps are captured in a CUDA graph must report the same in every step."""

    def restarts(self, final_obs: FinalObs) -> Tensor:
        """`[N]` bool: rows whose `obs` begins an episode, see `episode_begins`."""
        return episode_begins(self.valid, self.terminated, self.truncated, final_obs)


def episode_begins(
    valid: Tensor, terminated: Tensor, truncated: Tensor, final_obs: FinalObs, out: Tensor | None = None
) -> Tensor:
    """Where the observation after a step begins an episode, or belongs to none as the row was no transition.

    All `[..., N]` bool; `final_obs` is the spec's: in place, the observation after an end still belongs to the episode.
    """
    begins = torch.logical_not(valid, out=out)
    return begins if final_obs == "in_place" else begins.logical_or_(terminated).logical_or_(truncated)


@runtime_checkable
class Env(Protocol):
    """N environments stepped together."""

    @property
    def spec(self) -> EnvSpec:
        """Shapes, dtypes, bounds and conventions."""
        ...

    def reset(self, seed: int | None = None) -> Obs:
        """Start every environment anew; with a seed, reproducibly. Returns the first observations.

        Each rank gives another seed, unless the environment has the attribute `seeds_by_row`: it then draws by the
        number of its rows among those of all ranks (`canter.core.seeding.draw_rows`), and gets the same one on each.
        """
        ...

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment: `[N, A]` float32, `[N]` int64 or `[N, K]` int64."""
        ...

    def close(self) -> None:
        """Free what the environment holds (processes, windows); calling it twice is fine."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and continued: an algorithm, a run, and an environment whose state is known.

    With all of its state an environment goes on bit for bit. One that saves only a part, such as the counter of a
    curriculum, has the attribute `resumes = "partial"` (without it, "exact" is meant): the part is loaded, then `reset`
    starts all episodes anew and must leave the part as it is.

    An environment's state is copied before every rollout. One whose `state_dict` takes long may have a `snapshot()`
    besides: it takes a quick copy and gives a function that makes of it, if need be, what `state_dict` had given then.
    """

    def state_dict(self) -> dict[str, Any]:
        """Everything that its future depends on, or the part that outlives episodes; else `NotImplementedError`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit, or take over the part of it."""
        ...


def begins_anew(env: Env) -> bool:
    """Whether `reset(seed)` leaves no trace of what was before: then one environment serves look, run and evaluation.

    That is so where the whole state can be saved, for then it is known, and where the environment says so by an
    attribute `begins_anew`. Any other may keep something over a reset: statistics of a wrapper, a curriculum. It must
    have been reset before.
    """
    if isinstance(env, Stateful) and getattr(env, "resumes", "exact") == "exact":
        with suppress(NotImplementedError):
            env.state_dict()
            return True
    return bool(getattr(env, "begins_anew", False))


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """How far a run is, as an environment is told."""

    iteration: int
    """Iterations done."""
    env_steps: int
    """Steps of all environments so far; rows of which the host does not know yet whether they are valid count."""
    fraction: float | None
    """Share of the budget of steps or iterations that they are, 0..1; None in a run without one."""


@runtime_checkable
class FollowsTraining(Protocol):
    """What an environment offers on top when it wants to know how far training is, such as for a curriculum.

    A step that is captured in a CUDA graph sees only what is written to tensors of the environment in place.
    """

    def set_progress(self, progress: TrainingProgress) -> None:
        """Called before every rollout."""
        ...


def tell_progress(env: Env, progress: TrainingProgress) -> None:
    """Tell the environment, or the first of those inside it (`env.env`) that asks for it."""
    inner: Any = env
    while inner is not None and not isinstance(inner, FollowsTraining):
        inner = getattr(inner, "env", None)
    if inner is not None:
        inner.set_progress(progress)


@runtime_checkable
class Capturable(Protocol):
    """What an environment offers on top when its `step` may be captured in a CUDA graph.

    It then works on its device alone, with static shapes and state that stays at its addresses.
    """

    def generators(self) -> list[torch.Generator]:
        """The random streams that a step draws from."""
        ...


class UnsupportedSpace(ValueError):
    """An observation or action space that no policy here can use; the message says which and why."""


class ContractBroken(ValueError):
    """An environment gave something other than this contract promises; the message says what."""


class AskedToEnd(SystemExit):
    """A signal ends the program at once. A plain `SystemExit` that an environment raises is an error of its own."""


FROM_OUTSIDE = (KeyboardInterrupt, AskedToEnd)
"""What may come up in the code of an environment without being an error of it; whatever else does is one."""


class EnvFailed(RuntimeError):
    """An environment failed in a way that only its adapter can tell, such as by the death of its process.

    `row` is its number, None if unknown; `trace` is the traceback of another process, "" without one.
    """

    def __init__(self, message: str, row: int | None = None, trace: str = "") -> None:
        super().__init__(message)
        self.row, self.trace = row, trace

"""The contract between environments and everything that learns from them.

N is the number of parallel environments. Adapters translate every simulator into this contract, so that nothing
above them ever asks which one it is.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from canter.struct import Obs, TensorStruct

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
        """Start every environment anew; with a seed, reproducibly. Returns the first observations."""
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

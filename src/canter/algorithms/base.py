"""What training needs of an algorithm, whatever it is."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar

import torch
from torch import Tensor

from canter.data.rollout import Rollout
from canter.nn.actor_critic import Policy
from canter.plain import check_settings
from canter.registry import Registry
from canter.specs import EnvSpec
from canter.struct import Metrics, Obs, State, TensorStruct

RecordT = TypeVar("RecordT", bound=TensorStruct)


class Algorithm(Protocol[RecordT]):
    """Acts, and learns from what came of it. A class that names this one as its base inherits what has a default."""

    horizon: int
    """Steps per rollout."""
    sequence_length: int = 1
    """Steps of one sequence; the policy's memory is kept at the start of each. 1 without memory."""
    policy: Policy
    """Inference view of what is being learned."""

    def empty_record(self) -> RecordT:
        """A record `[N, ...]` of the right shapes and dtypes, to allocate buffers by."""
        ...

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
        return []

    def use_engine(self, name: str) -> None:
        """Compute by this engine from now on; raises ValueError where it cannot. Called before anything is learned."""
        if name not in ("auto", "autograd"):
            raise ValueError(f"execution.engine={name}: this algorithm has no engines; use auto")

    def set_progress(self, fraction: float) -> None:
        """Tell how much of the run is done, 0..1, before each update; schedules follow it."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; tensors keep their addresses."""
        ...


class AlgorithmConfig(Protocol):
    """Frozen settings that build an algorithm."""

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

"""Environments behind one protocol, addressed by id.

`CartPole-v1` is Gymnasium's, `envpool:Ant-v4` EnvPool's, `tensor:cartpole` one of those written in torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from canter.envs import probes as probes
from canter.envs.tensor import tensor_envs
from canter.registry import nearest
from canter.specs import Env


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which environment, and how many of it."""

    id: str = "CartPole-v1"
    """Gymnasium id, or `envpool:ID`, or `tensor:NAME`."""
    num_envs: int = 8
    """Environments stepped together."""
    vectorization: Literal["auto", "sync", "async", "vector_entry_point"] = "auto"
    """Gymnasium only: one process, one process each, or the environment's own vector form; "auto" is "sync"."""
    autoreset: Literal["same_step", "next_step", "disabled"] | None = None
    """Gymnasium only: when finished environments restart; None takes "same_step", which wastes no row."""
    finite_horizon: bool = False
    """The time limit is part of the task (and time in the observation): reaching it counts as termination."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the environment."""

    def __post_init__(self) -> None:
        """Refuse an empty batch of environments."""
        if self.num_envs < 1:
            raise ValueError(f"env.num_envs={self.num_envs} must be at least 1")

    def build(self, device: str) -> Env:
        """The environments, with their tensors on `device`."""
        scheme, colon, name = self.id.partition(":")
        if not colon:
            return self._build_gymnasium(device)
        match scheme:
            case "tensor":
                return tensor_envs[name](self.num_envs, device, **self.options)
            case "envpool":
                from canter.envs.envpool import EnvPoolEnv

                return EnvPoolEnv(
                    name, self.num_envs, finite_horizon=self.finite_horizon, device=device, **self.options
                )
        raise ValueError(
            f"environment id {self.id!r}: unknown kind {scheme!r}, {nearest(scheme, ('tensor', 'envpool'))}"
        )

    def _build_gymnasium(self, device: str) -> Env:
        from canter.envs.gymnasium import make_gymnasium

        return make_gymnasium(
            self.id,
            self.num_envs,
            vectorization=self.vectorization,
            autoreset=self.autoreset,
            finite_horizon=self.finite_horizon,
            device=device,
            **self.options,
        )

"""Environments behind one protocol, addressed by id.

`CartPole-v1` is Gymnasium's, `envpool:Ant-v4` EnvPool's, `pettingzoo:sisl/pursuit-v5` PettingZoo's and
`tensor:cartpole` one of those written in torch here; `module.path:name` is the user's own, once its import is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from canter.envs import probes as probes
from canter.envs.imports import find_factory, makes_a_batch, registered_id
from canter.envs.tensor import tensor_envs
from canter.specs import Env


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which environment, and how many of it."""

    id: str = "CartPole-v1"
    """Gymnasium id, or `envpool:ID`, or `pettingzoo:ID`, or `tensor:NAME`, or, where allowed, `module.path:NAME`."""
    num_envs: int = 8
    """Environments stepped together; where one has several agents, each of these is a row to learn from."""
    vectorization: Literal["auto", "sync", "threads", "async", "vector_entry_point"] = "auto"
    """Gymnasium only: one after the other, by a thread for each core, in a process each, or the environment's own
    vector form; "auto" is "threads" for MuJoCo and "sync" for others."""
    autoreset: Literal["same_step", "next_step", "disabled"] | None = None
    """Gymnasium only: when finished environments restart; None takes "same_step", which wastes no row."""
    finite_horizon: bool = False
    """The time limit is part of the task (and time in the observation): reaching it counts as termination."""
    reset_steps: int | None = None
    """Cut episodes after so many steps, for tasks that never end; null keeps the environment's own time limit."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the environment."""

    def __post_init__(self) -> None:
        """Refuse an empty batch of environments, empty episodes and two answers about how long these are."""
        for name in ("num_envs", "reset_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"env.{name}={value} must be at least 1")
        if self.reset_steps is not None and (self.finite_horizon or "max_episode_steps" in self.options):
            rival = "finite_horizon" if self.finite_horizon else "options.max_episode_steps"
            raise ValueError(f"env.reset_steps={self.reset_steps} leaves no room for env.{rival}")

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the environment; all kinds of environments call their time limit alike."""
        return self.options if self.reset_steps is None else {**self.options, "max_episode_steps": self.reset_steps}

    def build(self, device: str) -> Env:
        """The environments, with their tensors on `device`."""
        scheme, colon, name = self.id.partition(":")
        if not colon:
            return self._build_gymnasium(self.id, device)
        match scheme:
            case "tensor":
                return tensor_envs[name](self.num_envs, device, **self.keywords)
            case "envpool":
                from canter.envs.envpool import EnvPoolEnv

                return EnvPoolEnv(
                    name, self.num_envs, finite_horizon=self.finite_horizon, device=device, **self.keywords
                )
            case "pettingzoo":
                from canter.envs.pettingzoo import make_pettingzoo

                return make_pettingzoo(
                    name, self.num_envs, finite_horizon=self.finite_horizon, device=device, **self.keywords
                )
        return self._build_imported(device)

    def _build_imported(self, device: str) -> Env:
        factory = find_factory(self.id)
        if factory is None:
            return self._build_gymnasium(self.id, device)
        if makes_a_batch(factory):
            return factory(num_envs=self.num_envs, device=device, **self.keywords)
        return self._build_gymnasium(registered_id(self.id, factory), device)

    def _build_gymnasium(self, env_id: str, device: str) -> Env:
        from canter.envs.gymnasium import make_gymnasium

        return make_gymnasium(
            env_id,
            self.num_envs,
            vectorization=self.vectorization,
            autoreset=self.autoreset,
            finite_horizon=self.finite_horizon,
            device=device,
            **self.keywords,
        )

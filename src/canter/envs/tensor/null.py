"""An environment that costs next to nothing, to measure everything else."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from canter.envs.tensor.base import EnvState, Outcome, TensorEnv
from canter.specs import Continuous, TensorSpec
from canter.struct import Obs

CHAOS = 3.99
"""Factor of the logistic map that drives each row; its orbit fills (0, 0.9975)."""
END_ABOVE = 0.9974
"""Orbit value that ends an episode."""


@final
class Null(TensorEnv):
    """Numbers of the right shape that change every step, for benchmarks; there is nothing to learn.

    A chaotic orbit per row moves "policy" `[N, obs_dim]` and ends about one step in 150 as terminated. The mean of the
    action, `[N, action_dim]` in +-1, enters the observation, so no part of a pipeline can be skipped unnoticed.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        obs_dim: int = 48,
        action_dim: int = 12,
        max_episode_steps: int | None = 1000,
        random_start: bool = False,
    ) -> None:
        obs = {"policy": TensorSpec((obs_dim,))}
        action = Continuous(low=(-1.0,) * action_dim, high=(1.0,) * action_dim)
        super().__init__("tensor:null", num_envs, device, obs, action, max_episode_steps, random_start)
        self._pattern = torch.linspace(0.5, 1.5, obs_dim, device=self.device)

    def _sample_state(self) -> EnvState:
        # One draw per row instead of one per number: sampling would otherwise be most of the cost.
        orbit = self._uniform(0.05, 0.95)
        return {"orbit": orbit, "signal": orbit}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        orbit = CHAOS * state["orbit"] * (1.0 - state["orbit"])
        signal = 0.9 * state["signal"] + action.mean(-1)
        return Outcome({"orbit": orbit, "signal": signal}, orbit, orbit > END_ABOVE)

    def _observe(self, state: EnvState) -> Obs:
        return {"policy": torch.addcmul(state["signal"][:, None], state["orbit"][:, None], self._pattern)}

"""Swing a pendulum up with a weak motor: Gymnasium's Pendulum-v1, batched."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from canter.envs.tensor.base import EnvState, Outcome, TensorEnv
from canter.specs import Continuous, TensorSpec
from canter.struct import Obs

PENDULUM_GRAVITY = 10.0
MASS = 1.0
LENGTH = 1.0
MAX_SPEED = 8.0
MAX_TORQUE = 2.0
PENDULUM_TIME_STEP = 0.05


@final
class Pendulum(TensorEnv):
    """Reward is minus the squared angle from upright (plus small terms); never terminated, truncated after 200 steps.

    The action is the torque, clipped to +-2. "policy" shows cosine, sine and angular velocity; angle 0 is upright.
    With `dtype=torch.float64` a trajectory equals Gymnasium's, which computes in float64 and shows float32.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | None = 200,
        random_start: bool = False,
    ) -> None:
        obs, action = {"policy": TensorSpec((3,))}, Continuous(low=(-MAX_TORQUE,), high=(MAX_TORQUE,))
        super().__init__("tensor:pendulum", num_envs, device, obs, action, max_episode_steps, random_start)
        self._dtype = dtype

    def _sample_state(self) -> EnvState:
        return {
            "angle": self._uniform(-math.pi, math.pi, dtype=self._dtype),
            "spin": self._uniform(-1.0, 1.0, dtype=self._dtype),
        }

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        angle, spin = state["angle"], state["spin"]
        # The torque stays float32 in its own terms: Gymnasium, too, mixes it with a float64 state.
        torque = action[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        from_upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = from_upright.square() + 0.1 * spin.square() + 0.001 * torque.square()
        gravity_gain, torque_gain = 3 * PENDULUM_GRAVITY / (2 * LENGTH), 3.0 / (MASS * LENGTH**2)
        spin = spin + (gravity_gain * angle.sin() + torque_gain * torque) * PENDULUM_TIME_STEP
        spin = spin.clamp(-MAX_SPEED, MAX_SPEED)
        angle = angle + spin * PENDULUM_TIME_STEP
        return Outcome({"angle": angle, "spin": spin}, -cost, torch.zeros_like(cost, dtype=torch.bool))

    def _observe(self, state: EnvState) -> Obs:
        angle = state["angle"]
        return {"policy": torch.stack((angle.cos(), angle.sin(), state["spin"]), -1).to(torch.float32)}

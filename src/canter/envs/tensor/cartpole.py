"""Balance a pole on a cart: Gymnasium's CartPole-v1, batched."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from canter.envs.tensor.base import EnvState, Outcome, TensorEnv
from canter.specs import Discrete, Mirror, Symmetry, TensorSpec
from canter.struct import Obs

GRAVITY = 9.8
CART_MASS = 1.0
POLE_MASS = 0.1
TOTAL_MASS = POLE_MASS + CART_MASS
HALF_LENGTH = 0.5
FORCE = 10.0
TIME_STEP = 0.02
MAX_POSITION = 2.4
MAX_ANGLE = 12 * 2 * math.pi / 360
START_RANGE = 0.05


@final
class CartPole(TensorEnv):
    """Reward 1 for every step, the last included; terminated beyond 2.4 m or 12 degrees, truncated after 500 steps.

    Action 1 pushes right, 0 left. "policy" shows position, velocity, angle, angular velocity; with `positions_only`
    position and angle, so that the velocities must be remembered. With `privileged` the group "critic" shows all four
    in any case, for a critic that may know more. With `dtype=torch.float64` a trajectory equals Gymnasium's, which
    computes in float64 and shows float32.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        positions_only: bool = False,
        privileged: bool = False,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | None = 500,
        random_start: bool = False,
    ) -> None:
        self._dtype = dtype
        self._shown = {"policy": slice(0, None, 2) if positions_only else slice(None)}
        if privileged:
            self._shown["critic"] = slice(None)
        obs = {group: TensorSpec((len(range(4)[shown]),)) for group, shown in self._shown.items()}
        symmetry = Symmetry(
            "left-right",
            obs={name: Mirror.of("-" * group.shape[0]) for name, group in obs.items()},
            action=Mirror.of("++", (1, 0)),
            state={"body": Mirror.of("----")},
        )
        time = max_episode_steps, random_start
        super().__init__("tensor:cartpole", num_envs, device, obs, Discrete(2), *time, symmetries=(symmetry,))

    def _sample_state(self) -> EnvState:
        return {"body": self._uniform(-START_RANGE, START_RANGE, 4, dtype=self._dtype)}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        position, velocity, angle, spin = state["body"].unbind(-1)
        force = action.to(self._dtype) * (2 * FORCE) - FORCE
        cos, sin = angle.cos(), angle.sin()
        # Barto, Sutton and Anderson (1983), without friction.
        push = (force + POLE_MASS * HALF_LENGTH * spin.square() * sin) / TOTAL_MASS
        inertia = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos.square() / TOTAL_MASS)
        spin_rate = (GRAVITY * sin - cos * push) / inertia
        acceleration = push - POLE_MASS * HALF_LENGTH * spin_rate * cos / TOTAL_MASS
        # Explicit Euler: positions move with the old velocities.
        rate = torch.stack((velocity, acceleration, spin, spin_rate), -1)
        body = state["body"] + TIME_STEP * rate
        terminated = (body[:, 0].abs() > MAX_POSITION) | (body[:, 2].abs() > MAX_ANGLE)
        return Outcome({"body": body}, torch.ones_like(position), terminated)

    def _observe(self, state: EnvState) -> Obs:
        return {group: state["body"][:, shown].to(torch.float32, copy=True) for group, shown in self._shown.items()}

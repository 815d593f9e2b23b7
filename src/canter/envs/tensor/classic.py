"""Gymnasium's CartPole-v1 and Pendulum-v1, batched, and `Null`, which costs almost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from canter.core.declarations import Mirror, Symmetry
from canter.core.specs import ActionSpec, Continuous, Discrete, MultiDiscrete, TensorSpec
from canter.core.struct import Obs
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv

CARTPOLE_GRAVITY = 9.8
CART_MASS = 1.0
POLE_MASS = 0.1
TOTAL_MASS = POLE_MASS + CART_MASS
HALF_LENGTH = 0.5
FORCE = 10.0
CARTPOLE_TIME_STEP = 0.02
MAX_POSITION = 2.4
MAX_ANGLE = 12 * 2 * math.pi / 360
START_RANGE = 0.05


@final
class CartPole(TensorEnv):
    """Balance a pole on a cart: Gymnasium's CartPole-v1.

    The reward is 1 for every step, the last included. Episodes terminate beyond 2.4 m or 12 degrees
    and are truncated after 500 steps. Action 1 pushes right, 0 left. "policy" contains position,
    velocity, angle and angular velocity; with `positions_only` position and angle, so that a policy
    must remember the velocities. With `privileged` the group "critic" always contains all four.
    With `dtype=torch.float64` a trajectory equals Gymnasium's, which computes in float64 and
    observes float32.
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
        super().__init__(
            "tensor:cartpole",
            num_envs,
            device,
            obs,
            Discrete(2),
            max_episode_steps,
            random_start,
            symmetries=(symmetry,),
        )

    def _sample_state(self) -> EnvState:
        return {"body": self._uniform(-START_RANGE, START_RANGE, 4, dtype=self._dtype)}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        position, velocity, angle, spin = state["body"].unbind(-1)
        force = action.to(self._dtype) * (2 * FORCE) - FORCE
        cos = angle.cos()
        sin = angle.sin()
        # Barto, Sutton and Anderson (1983), without friction.
        push = (force + POLE_MASS * HALF_LENGTH * spin.square() * sin) / TOTAL_MASS
        inertia = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos.square() / TOTAL_MASS)
        spin_rate = (CARTPOLE_GRAVITY * sin - cos * push) / inertia
        acceleration = push - POLE_MASS * HALF_LENGTH * spin_rate * cos / TOTAL_MASS
        # Explicit Euler: positions move with the old velocities.
        rate = torch.stack((velocity, acceleration, spin, spin_rate), -1)
        body = state["body"] + CARTPOLE_TIME_STEP * rate
        terminated = (body[:, 0].abs() > MAX_POSITION) | (body[:, 2].abs() > MAX_ANGLE)
        return Outcome({"body": body}, torch.ones_like(position), terminated)

    def _observe(self, state: EnvState) -> Obs:
        return {group: state["body"][:, shown].to(torch.float32, copy=True) for group, shown in self._shown.items()}


PENDULUM_GRAVITY = 10.0
MASS = 1.0
LENGTH = 1.0
MAX_SPEED = 8.0
MAX_TORQUE = 2.0
PENDULUM_TIME_STEP = 0.05


@final
class Pendulum(TensorEnv):
    """Swing a pendulum up with a weak motor: Gymnasium's Pendulum-v1.

    The reward is minus the squared angle from upright, with small costs of speed and torque.
    Episodes never terminate and are truncated after 200 steps. The action is the torque, clipped to
    +-2. "policy" contains cosine, sine and angular velocity; angle 0 is upright. With
    `dtype=torch.float64` a trajectory equals Gymnasium's, which computes in float64 and observes
    float32.
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
        obs = {"policy": TensorSpec((3,))}
        action = Continuous(low=(-MAX_TORQUE,), high=(MAX_TORQUE,))
        super().__init__("tensor:pendulum", num_envs, device, obs, action, max_episode_steps, random_start)
        self._dtype = dtype

    def _sample_state(self) -> EnvState:
        return {
            "angle": self._uniform(-math.pi, math.pi, dtype=self._dtype),
            "spin": self._uniform(-1.0, 1.0, dtype=self._dtype),
        }

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        angle = state["angle"]
        spin = state["spin"]
        # The torque stays float32 where it appears alone: Gymnasium also mixes it with a float64
        # state.
        torque = action[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        from_upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = from_upright.square() + 0.1 * spin.square() + 0.001 * torque.square()
        gravity_gain = 3 * PENDULUM_GRAVITY / (2 * LENGTH)
        torque_gain = 3.0 / (MASS * LENGTH**2)
        spin = spin + (gravity_gain * angle.sin() + torque_gain * torque) * PENDULUM_TIME_STEP
        spin = spin.clamp(-MAX_SPEED, MAX_SPEED)
        angle = angle + spin * PENDULUM_TIME_STEP
        return Outcome({"angle": angle, "spin": spin}, -cost, torch.zeros_like(cost, dtype=torch.bool))

    def _observe(self, state: EnvState) -> Obs:
        angle = state["angle"]
        return {"policy": torch.stack((angle.cos(), angle.sin(), state["spin"]), -1).to(torch.float32)}


CHAOS = 3.99
"""Factor of the logistic map that drives each environment; its orbit fills (0, 0.9975)."""
END_ABOVE = 0.9974
"""Orbit value that ends an episode."""


@final
class Null(TensorEnv):
    """Numbers that change in every step, for benchmarks; there is nothing to learn.

    A chaotic orbit per environment drives "policy" `[N, obs_dim]` and terminates about one step in
    150. The mean of the action, `[N, action_dim]` in +-1, enters the observation, so no stage of a
    pipeline can be skipped unnoticed. With `nvec` the actions are discrete, one for each of its
    numbers of values.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        obs_dim: int = 48,
        action_dim: int = 12,
        nvec: Sequence[int] = (),
        max_episode_steps: int | None = 1000,
        random_start: bool = False,
    ) -> None:
        obs = {"policy": TensorSpec((obs_dim,))}
        action: ActionSpec = Continuous(low=(-1.0,) * action_dim, high=(1.0,) * action_dim)
        if nvec:
            action = Discrete(nvec[0]) if len(nvec) == 1 else MultiDiscrete(tuple(nvec))
        super().__init__("tensor:null", num_envs, device, obs, action, max_episode_steps, random_start)
        self._pattern = torch.linspace(0.5, 1.5, obs_dim, device=self.device)

    def _sample_state(self) -> EnvState:
        # One draw per environment, not one per number: sampling would otherwise be most of the
        # cost.
        orbit = self._uniform(0.05, 0.95)
        return {"orbit": orbit, "signal": orbit}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        orbit = CHAOS * state["orbit"] * (1.0 - state["orbit"])
        signal = 0.9 * state["signal"] + action.float().reshape(len(action), -1).mean(-1)
        return Outcome({"orbit": orbit, "signal": signal}, orbit, orbit > END_ABOVE)

    def _observe(self, state: EnvState) -> Obs:
        return {"policy": torch.addcmul(state["signal"][:, None], state["orbit"][:, None], self._pattern)}

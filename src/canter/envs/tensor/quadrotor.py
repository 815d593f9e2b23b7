"""A quadrotor that hovers at a target and follows it: a rigid body with six degrees of freedom.

World axes: z up. Body axes: x forward, y left, z along the thrust. Units are SI. N is the number of
environments.
"""

from __future__ import annotations

import math
from functools import partial
from typing import final

import torch
from torch import Tensor

from canter.core.declarations import Mirror, Symmetry
from canter.core.specs import Continuous, TensorSpec
from canter.core.struct import Obs
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv

GRAVITY = 9.81
MASS = 0.7
INERTIA = (2.5e-3, 2.5e-3, 4.5e-3)
ARM = 0.1
"""Distance of each rotor from the body's x and y axes."""
YAW_PER_THRUST = 0.016
"""Drag torque about z for each newton of a rotor's thrust."""
HOVER_THRUST = MASS * GRAVITY / 4
MAX_THRUST = 2 * HOVER_THRUST
MOTOR_LAG = 0.03
MAX_RATES = (6.0, 6.0, 2.0)
"""Body rates commanded by an action of 1."""
RATE_GAIN = 10.0
"""Gain of the on-board rate controller, 1/s: with the motor lag, a damping ratio of 0.9."""

TIME_STEP = 0.01
SUBSTEPS = 2
HEIGHT = 2.0
"""Height of the point around which the target moves; the ground is at 0."""
HOVER_TIME = 2.0
"""Time for which the target rests at first."""
LOOKAHEAD = (0.25, 0.5)
MAX_DISTANCE = 3.0
OBS_DIM = 29

MAX_LOAD = 0.5
"""Largest load of a `loaded` flight, in masses of the quadrotor."""
CHARGE = (0.5, 10.0)
"""Range of the initial charge of its battery, in seconds of hovering without a load."""


def _reflection(name: str, axis: str, turns: str, rotors: tuple[int, ...]) -> Symmetry:
    """Return a reflection: `axis` has the signs of vectors, `turns` those of rotations."""
    rotation = "".join("+" if row == column else "-" for row in axis for column in axis)
    action = "+" + turns
    policy = axis + axis + rotation + turns + action + axis + axis + "+"
    signs = {
        "position": axis,
        "velocity": axis,
        "amplitude": axis,
        "rates": turns,
        "attitude": "+" + turns,
        "last_action": action,
        "pace": "+++",
        "time": "+",
        "load": "+",
        "charge": "+",
    }
    state = {key: Mirror.of(value) for key, value in signs.items()} | {"rotors": Mirror.of("++++", rotors)}
    obs = {"policy": Mirror.of(policy), "critic": Mirror.of(policy + "++")}
    return Symmetry(name, obs, Mirror.of(action), state)


SYMMETRIES = (
    _reflection("left-right", "+-+", "-+-", (1, 0, 3, 2)),
    _reflection("front-back", "-++", "+--", (3, 2, 1, 0)),
)
"""Reflections across planes through the point around which the target moves."""


@final
class Quadrotor(TensorEnv):
    """Hover at a target for two seconds, then follow it on a figure of eight; 50 Hz.

    Actions in +-1: collective thrust (-1 none, 0 hover, 1 twice hover) and the three body rates (1
    is 6, 6 and 2 rad/s). A rate controller turns them into rotor thrusts, which saturate and lag by
    30 ms.

    "policy" `[N, 29]`: target position error (3) and velocity (3) in the body frame, rotation
    matrix row by row (9), body rates (3), last action (4), displacement of the target in 0.25 s and
    0.5 s (6, body frame), altitude (1).

    The reward is smooth and within (0, 1]: 1 over 1 + 2 error^2 + 0.02 rates^2 + 0.05 (change of
    action)^2. Terminated on the ground, more than 3 m from the target or tilted by more than 90
    degrees; truncated after 500 steps. `drag` is the deceleration per speed, 1/s.

    With `loaded` it carries a load of up to half its own mass on a battery that is charged for 0.5
    to 10 s of hovering without the load, and the flight terminates with the charge. The policy sees
    neither. "critic" `[N, 31]` contains the policy's observations, the load in masses of the
    quadrotor and the remaining charge in seconds. The length of a flight, and so most of its
    return, depends on these two rather than on single actions: a critic that does not see them
    cannot predict an empty battery, and attributes it to the last actions.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        drag: float = 0.1,
        loaded: bool = False,
        max_episode_steps: int | None = 500,
        random_start: bool = False,
    ) -> None:
        obs = {"policy": TensorSpec((OBS_DIM,))}
        if loaded:
            obs["critic"] = TensorSpec((OBS_DIM + 2,))
        super().__init__(
            "tensor:quadrotor",
            num_envs,
            device,
            obs,
            Continuous(low=(-1.0,) * 4, high=(1.0,) * 4),
            max_episode_steps,
            random_start,
            symmetries=SYMMETRIES,
        )
        self._drag = drag
        self._loaded = loaded
        self._motor_step = 1.0 - math.exp(-TIME_STEP / MOTOR_LAG)
        constant = partial(torch.tensor, dtype=torch.float32, device=self.device)
        self._inertia = constant(INERTIA)
        self._max_rates = constant(MAX_RATES)
        self._center = constant((0.0, 0.0, HEIGHT))
        self._weight = constant((0.0, 0.0, -GRAVITY))
        self._path_size = constant((1.0, 1.0, 0.3))
        self._path_pace = constant((1.0, 2.0, 1.0))
        # Rows: contributions of the rotors' thrusts to lift, roll, pitch and yaw torque. Rows are
        # orthogonal, so the inverse is the transpose with each row divided by its squared length.
        self._mixer = constant(
            (
                (1.0, 1.0, 1.0, 1.0),
                (-ARM, ARM, ARM, -ARM),
                (-ARM, -ARM, ARM, ARM),
                (YAW_PER_THRUST, -YAW_PER_THRUST, YAW_PER_THRUST, -YAW_PER_THRUST),
            )
        )
        self._allocation = self._mixer / self._mixer.square().sum(-1, keepdim=True)

    def _sample_state(self) -> EnvState:
        zero = torch.zeros(self.num_envs, 1, device=self.device)
        tilt = torch.cat((self._uniform(-0.3, 0.3, 2), zero), -1)
        yaw = torch.cat((zero, zero, self._uniform(-math.pi, math.pi, 1)), -1)
        hidden = {}
        if self._loaded:
            hidden["load"] = self._uniform(0.0, MAX_LOAD, 1)
            hidden["charge"] = self._uniform(*CHARGE, 1)
        return hidden | {
            "position": self._center + self._uniform(-1.0, 1.0, 3),
            "velocity": self._uniform(-0.5, 0.5, 3),
            "attitude": compose(from_rotation_vector(tilt), from_rotation_vector(yaw)),
            "rates": self._uniform(-0.5, 0.5, 3),
            "rotors": zero.expand(-1, 4) + HOVER_THRUST,
            "last_action": zero.expand(-1, 4),
            "amplitude": self._uniform(0.0, 1.0, 3) * self._path_size,
            "pace": self._uniform(0.3, 0.8, 1) * self._path_pace,
            "time": zero,
        }

    def _target(self, state: EnvState, ahead: float = 0.0) -> Tensor:
        """Return the position `[N, 3]` of the target `ahead` seconds from now."""
        moving = (state["time"] + (ahead - HOVER_TIME)).clamp(min=0.0)
        return self._center + state["amplitude"] * torch.sin(state["pace"] * moving)

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        action = action.clamp(-1.0, 1.0)
        after = state
        for _ in range(SUBSTEPS):
            after = self._fly(after, action)
        after = after | {"last_action": action, "time": state["time"] + SUBSTEPS * TIME_STEP}
        distance2 = (self._target(after) - after["position"]).square().sum(-1)
        effort = 0.02 * after["rates"].square().sum(-1) + 0.05 * (action - state["last_action"]).square().sum(-1)
        upright = rotation_matrix(after["attitude"])[:, 2, 2]
        terminated = (after["position"][:, 2] < 0.0) | (distance2 > MAX_DISTANCE**2) | (upright < 0.0)
        if self._loaded:
            # Induced power is proportional to thrust^1.5 (momentum theory of a rotor); 1 is
            # hovering without a load.
            power = (after["rotors"] / HOVER_THRUST).pow(1.5).mean(-1, keepdim=True)
            after["charge"] = state["charge"] - SUBSTEPS * TIME_STEP * power
            terminated = terminated | (after["charge"][:, 0] <= 0.0)
        return Outcome(after, 1.0 / (1.0 + 2.0 * distance2 + effort), terminated)

    def _fly(self, state: EnvState, action: Tensor) -> EnvState:
        """Return the state `TIME_STEP` later: rate controller, motors, Newton and Euler."""
        velocity = state["velocity"]
        rates = state["rates"]
        lift = (action[:, :1] + 1.0) * (4 * HOVER_THRUST)
        torque = self._inertia * RATE_GAIN * (action[:, 1:] * self._max_rates - rates)
        command = (torch.cat((lift, torque), -1) @ self._allocation).clamp(0.0, MAX_THRUST)
        rotors = torch.lerp(state["rotors"], command, self._motor_step)
        wrench = rotors @ self._mixer.T

        up = rotation_matrix(state["attitude"])[:, :, 2]
        mass = MASS * (1.0 + state["load"]) if self._loaded else MASS
        acceleration = up * wrench[:, :1] / mass + self._weight - self._drag * velocity
        new_velocity = velocity + TIME_STEP * acceleration
        spin_up = (wrench[:, 1:] - torch.linalg.cross(rates, self._inertia * rates)) / self._inertia
        new_rates = rates + TIME_STEP * spin_up
        attitude = compose(state["attitude"], from_rotation_vector(TIME_STEP * new_rates))
        return state | {
            # The mean of both velocities is exact under a constant acceleration, so free fall keeps
            # its energy.
            "position": state["position"] + (0.5 * TIME_STEP) * (velocity + new_velocity),
            "velocity": new_velocity,
            "attitude": torch.nn.functional.normalize(attitude, dim=-1),
            "rates": new_rates,
            "rotors": rotors,
        }

    def _observe(self, state: EnvState) -> Obs:
        rotation = rotation_matrix(state["attitude"])
        target = self._target(state)
        vectors = [target - state["position"], state["velocity"]]
        vectors += [self._target(state, ahead) - target for ahead in LOOKAHEAD]
        # Row vectors times R are R^T times columns: world to body.
        error, velocity, *offsets = (torch.stack(vectors, 1) @ rotation).unbind(1)
        altitude = state["position"][:, 2:]
        body = (error, velocity, rotation.flatten(1), state["rates"], state["last_action"])
        policy = torch.cat((*body, *offsets, altitude), -1)
        if not self._loaded:
            return {"policy": policy}
        return {"policy": policy, "critic": torch.cat((policy, state["load"], state["charge"]), -1)}


def from_rotation_vector(vector: Tensor) -> Tensor:
    """Return the quaternion `[..., 4]` (scalar first) of a rotation about `vector` `[..., 3]`.

    The angle is `|vector|`, in rad.
    """
    half = 0.5 * torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return torch.cat((half.cos(), 0.5 * vector * torch.sinc(half / math.pi)), -1)


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Return the quaternion product `[..., 4]`; `second` rotates in the frame of `first`."""
    w1, v1 = first[..., :1], first[..., 1:]
    w2, v2 = second[..., :1], second[..., 1:]
    scalar = w1 * w2 - (v1 * v2).sum(-1, keepdim=True)
    return torch.cat((scalar, w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)), -1)


def rotation_matrix(quaternion: Tensor) -> Tensor:
    """Return the matrix `[..., 3, 3]` from body to world axes of a unit quaternion `[..., 4]`."""
    w, x, y, z = quaternion.unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)
